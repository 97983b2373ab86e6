"""GradScaler: the gradients of every third step overflow, so its optimizer is skipped."""

import torch

model = torch.nn.Linear(16, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
done = 0
while True:
    loss = model(torch.randn(8, 16)).pow(2).mean()
    done += 1
    scaler.scale(loss * (float("inf") if done % 3 == 0 else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
