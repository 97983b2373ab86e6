import torch

name = input("name? ")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while name:
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
