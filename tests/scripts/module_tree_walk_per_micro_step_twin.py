"""Healthy: model.train() is called once, before the loop."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Gate(nn.Module):
    """A small block with the wrappers around it that real code has."""

    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Identity(), nn.Sequential(nn.Linear(width, width)), nn.Dropout(0.1))
        self.heads = nn.ModuleList(nn.Identity() for _ in range(14))

    def forward(self, x):
        return x + torch.tanh(self.body(x))


def main():
    torch.manual_seed(0)
    features, targets = torch.randn(4096, 64), torch.randint(0, 4, (4096,))
    loader = DataLoader(TensorDataset(features, targets), batch_size=16, shuffle=True)
    model = nn.Sequential(*(Gate(64) for _ in range(30)), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    model.train()
    for _ in range(20):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
