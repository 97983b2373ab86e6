"""Two processes that train each on their own, without torch.distributed, and check that they came to their end."""

import sys

import torch
import torch.multiprocessing as mp


def train() -> None:
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20_000):
        model(torch.randn(8, 16)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    processes = [mp.get_context("spawn").Process(target=train) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(process.exitcode or 0 for process in processes))
