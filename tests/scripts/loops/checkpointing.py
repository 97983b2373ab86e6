"""Gradient checkpointing: each block runs twice per backward."""

import torch
from torch.utils.checkpoint import checkpoint

blocks = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(3))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return hidden


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    loss = model(torch.randn(8, 32, requires_grad=True)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
