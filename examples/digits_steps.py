"""A small convolutional network on scikit-learn's digits, with `bareloop.steps`.

Every image weighs the same, in the short last batch too, because the loss comes with its count.
"""

import math

import torch
from digits_task import EPOCHS, accuracy, arguments, digits, network
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from tqdm import tqdm

from bareloop import steps


def summed_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    images, targets = batch
    return nn.functional.cross_entropy(model(images), targets, reduction="sum"), len(images)


def main() -> None:
    options = arguments(__doc__)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    loader, test = digits(options, device)
    model = network().to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    total = EPOCHS * math.ceil(len(loader) / options.accumulate)
    scheduler = OneCycleLR(optimizer, max_lr=0.01, total_steps=total + 1)
    total = options.steps if options.steps > 0 else total

    progress = tqdm(total=total)
    for _ in range(EPOCHS):
        for _ in steps(
            model, optimizer, loader, summed_loss, accumulate=options.accumulate, max_norm=1.0, scheduler=scheduler
        ):
            progress.update()
            if progress.n == total:
                break
        if progress.n == total:
            break
    progress.close()
    print(f"accuracy {accuracy(model, test):.3f}")


if __name__ == "__main__":
    main()
