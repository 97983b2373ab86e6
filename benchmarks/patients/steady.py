"""A training script with steps of a chosen length, and a share of busy work on top.

Work is counted in units (one small matrix product), not in time: a slowed script does `--slower` more units per step,
so its slowdown is in proportion on a fast machine and on a slow one.
"""

import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--units", type=int, default=180, help="busy units per step; 180 are about 5 ms on a 2020s core")
parser.add_argument("--slower", type=float, default=0.0, help="share of busy work on top, 0.2 for 20 %%")
arguments = parser.parse_args()

MODEL_UNITS = 20  # what the model's own step costs, in units
units = arguments.units + round(arguments.slower * (arguments.units + MODEL_UNITS))
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
state, mixing = torch.randn(96, 96), torch.randn(96, 96) / 10

while True:
    batch = torch.randn(16, 64)
    loss = (model(batch) - batch).pow(2).mean()
    loss.backward()
    with torch.no_grad():
        for _ in range(units):
            state = torch.tanh(state @ mixing)
    optimizer.step()
    optimizer.zero_grad()
