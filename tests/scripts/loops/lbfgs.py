"""A closure: several forwards and backwards inside one step."""

import torch

torch.manual_seed(0)
model, inputs, targets = torch.nn.Linear(8, 1), torch.randn(64, 8), torch.randn(64, 1)
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn=None, tolerance_change=0, tolerance_grad=0)


def closure() -> torch.Tensor:
    optimizer.zero_grad()
    loss = ((model(inputs) - targets) ** 2).mean()
    loss.backward()
    return loss


while True:
    optimizer.step(closure)
