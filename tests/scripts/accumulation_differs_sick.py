"""Sick: four micro-steps of 8 samples make a step, where the twin takes 32 samples at once."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = 8
ACCUMULATE = 4


def main():
    torch.manual_seed(0)
    features, targets = torch.randn(4096, 256), torch.randn(4096, 1)
    loader = DataLoader(TensorDataset(features, targets), batch_size=BATCH_SIZE)
    model = nn.Sequential(nn.Linear(256, 768), nn.GELU(), nn.Linear(768, 768), nn.GELU(), nn.Linear(768, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    model.train()
    for _ in range(40):
        for index, (x, y) in enumerate(loader, start=1):
            loss = nn.functional.mse_loss(model(x), y) / ACCUMULATE
            loss.backward()
            if index % ACCUMULATE == 0:
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
