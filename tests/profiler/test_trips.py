"""Loops that lie in a script of their own, spread over methods: each is run, and its plan read at the second step."""

import runpy
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: E402

from bareloop.profiler.probes.loops import user_places  # noqa: E402
from bareloop.profiler.probes.trips import LoopPlan, plan_of_loops  # noqa: E402

SCRIPT = """
import argparse, contextlib, functools
import torch
from torch.utils.data import DataLoader, TensorDataset

def logged(function):
    @functools.wraps(function)
    def inner(*args):
        return function(*args)
    return inner

class Engine:
    def __init__(self, config):
        self.config, self.step = config, 0
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.loader = DataLoader(TensorDataset(torch.ones(40, 2)), batch_size=4)

    @logged
    def one(self, batch):
        self.model(batch[0]).sum().backward()
        with contextlib.nullcontext():
            try:
                if self.config.fp16:
                    raise AssertionError
                else:
                    self.optimizer.step()
            finally:
                self.step += 1

    def train(self):
        for epoch in range(self.config.epochs):
            for batch in self.loader:
                self.one(batch)
                if self.config.max_steps is not None and self.step >= self.config.max_steps:
                    return

config = argparse.Namespace(epochs=3, fp16=False, max_steps=LIMIT)
engine = Engine(config)
if __name__ == "__main__":
    for stage in ["first"]:
        engine.train()
"""


def run(script: Path, text: str, micro_steps: float = 1.0) -> tuple[int, LoopPlan]:
    """Steps that the script made, and what its loops planned at the second."""
    script.write_text(text)
    plans: list[LoopPlan] = []
    handle = register_optimizer_step_post_hook(
        lambda *_: plans.append(plan_of_loops(user_places(sys._getframe(1)), micro_steps, gated=False))
    )
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        handle.remove()
    return len(plans), plans[1]


@pytest.mark.parametrize(("limit", "steps", "passes"), [("None", 30, 3.0), ("12", 12, None)])
def test_loops_in_methods(tmp_path: Path, limit: str, steps: int, passes: float | None) -> None:
    made, plan = run(tmp_path / "train.py", SCRIPT.replace("LIMIT", limit))
    assert plan.steps == made == steps
    assert plan.passes == passes
    assert "range(self.config.epochs) [3] x self.loader [10]" in plan.source
    assert "at train.py:" in plan.source


PLAIN = """
import itertools, torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
rows = [torch.ones(4, 2) for _ in range(10)]

def work(batch):
    model(batch).sum().backward()
"""

SHAPES = {
    "a break before the count": (
        1,
        """
step = 0
while True:
    work(rows[0])
    optimizer.step()
    if step == 5:
        break
    step += 1
""",
    ),
    "a count from one": (
        1,
        """
step = 1
while step <= 5:
    work(rows[0])
    optimizer.step()
    step += 1
""",
    ),
    "micro-steps counted, steps made": (
        2,
        """
seen = 0
for batch in itertools.cycle(rows):
    work(batch)
    seen += 1
    if seen % 2 == 0:
        optimizer.step()
    if seen >= 11:
        break
""",
    ),
    "epochs counted by hand": (
        1,
        """
epoch = 0
while epoch < 3:
    for batch in rows:
        work(batch)
        optimizer.step()
    epoch += 1
""",
    ),
    "first micro-step steps": (
        4,
        """
for i, batch in enumerate(rows):
    work(batch)
    if i % 4 == 0:
        optimizer.step()
""",
    ),
    "a guard for mixed precision is no accumulation": (
        1,
        """
scaler = None
for a, b in zip(rows, rows):
    work(a)
    if scaler is None:
        optimizer.step()
""",
    ),
    "a limit in a with block": (
        1,
        """
for i in range(100):
    with torch.enable_grad():
        work(rows[0])
    optimizer.step()
    if i + 1 == 7:
        break
""",
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_of_loops(tmp_path: Path, shape: str) -> None:
    micro_steps, text = SHAPES[shape]
    made, plan = run(tmp_path / "train.py", PLAIN + text, micro_steps)
    assert made >= 2
    assert plan.steps == made


UNTOLD = {
    "a generator": "for batch in (row for row in rows):\n    work(batch)\n    optimizer.step()\n",
    "a condition on the loss": "loss = 3\nwhile loss > 0:\n    work(rows[0])\n    optimizer.step()\n    loss -= 1\n",
}


@pytest.mark.parametrize("shape", UNTOLD)
def test_what_the_source_does_not_tell_is_not_guessed(tmp_path: Path, shape: str) -> None:
    made, plan = run(tmp_path / "train.py", PLAIN + UNTOLD[shape])
    assert made >= 2
    assert (plan.steps, plan.passes) == (None, None)
