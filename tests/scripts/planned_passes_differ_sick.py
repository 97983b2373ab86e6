"""Sick: the step budget was multiplied by two, so the plan is 60 passes where the twin plans 30."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 60


def main():
    torch.manual_seed(0)
    signals, targets = torch.randn(2048, 1, 128), torch.randint(0, 5, (2048,))
    loader = DataLoader(TensorDataset(signals, targets), batch_size=16, shuffle=True)
    model = nn.Sequential(
        nn.Conv1d(1, 32, 7, padding=3), nn.ReLU(), nn.Conv1d(32, 32, 7, padding=3), nn.ReLU(),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, 5),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * len(loader))

    model.train()
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()


if __name__ == "__main__":
    main()
