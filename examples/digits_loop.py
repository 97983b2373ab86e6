"""A small convolutional network on scikit-learn's digits, with the loop people write themselves.

The last batch of a pass is shorter than the others and weighs as much as they do.
"""

import math

import torch
from digits_task import EPOCHS, accuracy, arguments, digits, network
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from tqdm import tqdm


def main() -> None:
    options = arguments(__doc__)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    loader, test = digits(options, device)
    model = network().to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    total = EPOCHS * math.ceil(len(loader) / options.accumulate)
    scheduler = OneCycleLR(optimizer, max_lr=0.01, total_steps=total + 1)
    total = options.steps if options.steps > 0 else total

    model.train()
    progress = tqdm(total=total)
    for _ in range(EPOCHS):
        for index, (images, targets) in enumerate(loader, start=1):
            images, targets = images.to(device), targets.to(device)
            loss = nn.functional.cross_entropy(model(images), targets) / options.accumulate
            loss.backward()
            if index % options.accumulate == 0 or index == len(loader):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                progress.update()
                if progress.n == total:
                    break
        if progress.n == total:
            break
    progress.close()
    print(f"accuracy {accuracy(model, test):.3f}")


if __name__ == "__main__":
    main()
