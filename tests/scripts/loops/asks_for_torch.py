"""Asks whether there is a torch, as `import transformers` does, long before it imports it."""

import importlib.util
import sys

assert importlib.util.find_spec("torch") is not None
assert importlib.util.find_spec("torch") is not None
assert "torch" not in sys.modules

import torch  # noqa: E402

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
