"""What `digits_loop.py` and `digits_steps.py` share: flags, model and data, so that they differ in the loop alone.

The images are the 1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

__all__ = ["EPOCHS", "accuracy", "arguments", "digits", "network"]

EPOCHS = 5
TRAINING = 1500
"""Images to train on; the rest measures the accuracy."""


def arguments(description: str | None) -> argparse.Namespace:
    """The flags of both scripts."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--batch", type=int, default=32, help="images in a micro-batch")
    parser.add_argument("--accumulate", type=int, default=4, help="micro-batches in an optimizer step")
    parser.add_argument("--steps", type=int, default=-1, help="stop after so many optimizer steps")
    return parser.parse_args()


def digits(options: argparse.Namespace, device: torch.device) -> tuple[DataLoader, tuple[Tensor, Tensor]]:
    """Loader of training batches (images[batch, 1, 8, 8], digits[batch]), and all test images and digits on `device`."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    targets = torch.tensor(labels)
    loader = DataLoader(
        TensorDataset(images[:TRAINING], targets[:TRAINING]),
        batch_size=options.batch,
        shuffle=True,
        generator=torch.Generator().manual_seed(0),
    )
    return loader, (images[TRAINING:].to(device), targets[TRAINING:].to(device))


def network() -> nn.Module:
    """Two convolutions and a linear layer with new weights, the same ones in every run."""
    torch.manual_seed(42)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(32 * 4 * 4, 10),
    )


@torch.no_grad()
def accuracy(model: nn.Module, test: tuple[Tensor, Tensor]) -> float:
    """Share of the test images that `model` names right."""
    model.eval()
    images, targets = test
    return (model(images).argmax(dim=1) == targets).float().mean().item()
