"""Healthy: the bar gets its text, and the log its lines, every 100 steps."""

import logging
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

EVERY = 100
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
logger = logging.getLogger("train")


def main():
    torch.manual_seed(0)
    features, targets = torch.randn(4096, 128), torch.randn(4096, 1)
    loader = DataLoader(TensorDataset(features, targets), batch_size=16, shuffle=True)
    layers = [nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1)]
    model = nn.Sequential(*layers)
    rates = [(f"layer{i}", {"params": layer.parameters()}) for i, layer in enumerate(layers) if i % 2 == 0]
    optimizer = torch.optim.AdamW([group for _, group in rates], lr=1e-3)

    model.train()
    for epoch in range(20):
        bar = tqdm(loader, desc=f"epoch {epoch}")
        for step, (x, y) in enumerate(bar):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            if step % EVERY == 0:
                bar.set_postfix(step=step, lr=optimizer.param_groups[0]["lr"])
                for (name, _), group in zip(rates, optimizer.param_groups, strict=True):
                    logger.info("step %d %s lr %.2e", step, name, group["lr"])


if __name__ == "__main__":
    main()
