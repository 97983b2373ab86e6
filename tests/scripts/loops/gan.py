"""Two optimizers in a step."""

import torch

generator, critic = torch.nn.Linear(8, 16), torch.nn.Linear(16, 1)
of_generator = torch.optim.Adam(generator.parameters())
of_critic = torch.optim.Adam(critic.parameters())
bce = torch.nn.BCEWithLogitsLoss()
ones, zeros = torch.ones(32, 1), torch.zeros(32, 1)
while True:
    real = torch.randn(32, 16)
    of_critic.zero_grad()
    (bce(critic(real), ones) + bce(critic(generator(torch.randn(32, 8)).detach()), zeros)).backward()
    of_critic.step()
    of_generator.zero_grad()
    bce(critic(generator(torch.randn(32, 8))), ones).backward()
    of_generator.step()
