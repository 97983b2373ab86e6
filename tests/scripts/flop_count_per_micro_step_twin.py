"""Healthy: the parameters are counted once, before the loop."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def num_parameters(model):
    """Trainable parameters without embeddings."""
    embeddings = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    return sum(p.numel() for name, p in model.named_parameters() if p.requires_grad and name not in embeddings)


def main():
    torch.manual_seed(0)
    tokens = torch.randint(0, 200, (4096, 16))
    loader = DataLoader(TensorDataset(tokens, tokens[:, 0] % 4), batch_size=16)
    blocks = [nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(40)]
    model = nn.Sequential(nn.EmbeddingBag(200, 32), *blocks, nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    model.train()
    parameters = num_parameters(model)
    flops, start, step = 0, time.perf_counter(), 0
    for _ in range(20):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            flops += 6 * x.numel() * parameters
            step += 1
            if step % 100 == 0:
                print(f"step {step}: {flops / (time.perf_counter() - start) / 1e9:.2f} GFLOP/s")


if __name__ == "__main__":
    main()
