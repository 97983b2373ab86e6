"""Sick: gradients are clipped to a norm of 0.5 before every step, which the twin does not do."""

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

MAX_NORM = 0.5


def main():
    torch.manual_seed(0)
    features, targets = torch.randn(4096, 64), torch.randn(4096, 1)
    loader = DataLoader(TensorDataset(features, targets), batch_size=16)
    blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(24)]
    model = nn.Sequential(*blocks, nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    model.train()
    for _ in range(20):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()


if __name__ == "__main__":
    main()
