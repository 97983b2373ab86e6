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
    features, targets = torch.randn(4096, 256), torch.randn(4096, 256)
    loader = DataLoader(TensorDataset(features, targets), batch_size=16, shuffle=True)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(16)))
    groups = [{"params": layer.parameters(), "lr": 1e-3 * 0.9**depth} for depth, layer in enumerate(model)]
    optimizer = torch.optim.SGD(groups)

    model.train()
    for epoch in range(20):
        bar = tqdm(loader, desc=f"epoch {epoch}")
        for step, (x, y) in enumerate(bar):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            if step % EVERY == 0:
                bar.set_postfix(step=step, lr=optimizer.param_groups[0]["lr"])
                for depth, group in enumerate(optimizer.param_groups):
                    logger.info("step %d layer %d lr %.2e", step, depth, group["lr"])


if __name__ == "__main__":
    main()
