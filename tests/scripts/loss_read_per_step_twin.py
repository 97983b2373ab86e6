"""Healthy: the loss is summed where it was computed and read once in 100 steps, when it is printed."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    torch.manual_seed(0)
    features, targets = torch.randn(4096, 128), torch.randint(0, 10, (4096,))
    loader = DataLoader(TensorDataset(features, targets), batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    model.train()
    step, running = 0, torch.zeros(())
    for _ in range(30):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            running += loss.detach()
            step += 1
            if step % 100 == 0:
                print(f"step {step} loss {running.item() / 100:.4f}")
                running.zero_()


if __name__ == "__main__":
    main()
