"""Sick: 32 samples a step, where the twin takes 16."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = 32


def main():
    torch.manual_seed(0)
    features, targets = torch.randn(4096, 256), torch.randint(0, 10, (4096,))
    loader = DataLoader(TensorDataset(features, targets), batch_size=BATCH_SIZE, shuffle=True, drop_last=True)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss_fn = nn.CrossEntropyLoss()

    model.train()
    for _ in range(40):
        for x, y in loader:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
