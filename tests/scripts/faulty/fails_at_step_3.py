import torch

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(30):
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    if step == 2:
        raise ValueError("boom at step 3")
