"""Ablations for the tests of turns, found by the script's process through PYTHONPATH."""

from contextlib import contextmanager
from types import SimpleNamespace


@contextmanager
def _ablate(data):
    import torch

    if data["do"] == "refuse":
        raise RuntimeError("nothing to take away")
    forward = torch.nn.Linear.forward
    if data["do"] == "break":
        torch.nn.Linear.forward = lambda self, inputs: inputs.no_such_method()
    if data["do"] == "slow":

        def slow(self, inputs):
            for _ in range(40):
                forward(self, inputs)
            return forward(self, inputs)

        torch.nn.Linear.forward = slow
    try:
        yield
    finally:
        torch.nn.Linear.forward = forward


CAUSE = SimpleNamespace(ablate=_ablate)
