"""No module and no loader."""

import torch

weight = torch.randn(64, 10, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
while True:
    inputs, labels = torch.randn(32, 64), torch.randint(0, 10, (32,))
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(inputs @ weight, labels).backward()
    optimizer.step()
