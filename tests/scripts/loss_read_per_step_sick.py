"""Sick: the loss is read into Python after every step, for a line that is printed once in 100."""

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
    step, running = 0, 0.0
    for _ in range(30):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            running += loss.item()
            step += 1
            if step % 100 == 0:
                print(f"step {step} loss {running / 100:.4f}")
                running = 0.0


if __name__ == "__main__":
    main()
