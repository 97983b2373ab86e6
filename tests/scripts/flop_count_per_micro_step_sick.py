"""Sick: the parameters are counted again for every batch, for a figure that is printed once in 100 steps."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

TASKS = 200


class Adapters(nn.Module):
    """A shared trunk and a small adapter per task; a batch uses one of them."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(128, 2048), nn.GELU(), nn.Linear(2048, 128))
        self.adapters = nn.ModuleList(nn.Sequential(nn.Linear(128, 8), nn.Linear(8, 4)) for _ in range(TASKS))

    def forward(self, x, task):
        return self.adapters[task](self.trunk(x))


def num_parameters(model):
    """Trainable parameters without embeddings."""
    embeddings = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    return sum(p.numel() for name, p in model.named_parameters() if p.requires_grad and name not in embeddings)


def main():
    torch.manual_seed(0)
    features, targets = torch.randn(4096, 128), torch.randint(0, 4, (4096,))
    loader = DataLoader(TensorDataset(features, targets), batch_size=32)
    model = Adapters()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    model.train()
    flops, start, step = 0, time.perf_counter(), 0
    for _ in range(40):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x, step % TASKS), y).backward()
            optimizer.step()
            flops += 6 * x.shape[0] * num_parameters(model)
            step += 1
            if step % 100 == 0:
                print(f"step {step}: {flops / (time.perf_counter() - start) / 1e9:.2f} GFLOP/s")


if __name__ == "__main__":
    main()
