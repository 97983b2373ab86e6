"""An agent that lets go of a script in the middle of an optimizer's step."""

import subprocess
import sys

SCRIPT = """
import importlib

import torch
from bareloop.profiler.probes.agent import Agent

agent = Agent({"role": "time", "first_steps": 99, "socket": "/nowhere", "participant": "a"})
agent._at_boundary = lambda skipped: agent._leave_alone()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
heard = []
importlib.import_module("torch.optim.optimizer").register_optimizer_step_post_hook(lambda *_: heard.append("user's own hook"))
before = model.weight.detach().clone()
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
assert not torch.equal(before, model.weight)
assert "bareloop" not in torch.autograd.backward.__code__.co_filename
assert len(heard) == 3, heard
print("trained on")
"""


def test_the_script_trains_on_after_it_is_left_alone() -> None:
    script = SCRIPT.replace("agent._at_boundary =", "agent.channel = object()\nagent._at_boundary =")
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "trained on\n", ran.stderr
