"""Traces by hand, and a record of everything that an ablation may touch."""

import builtins
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from bareloop.trace import Counts, Environment, Group, Ledger, Optimizer, ProcessFacts, StepFacts, Trace


@pytest.fixture
def make_trace() -> Callable[..., Trace]:
    """make(framework, packages, counts={...} or None, steps=(...), **ledger) -> a trace of one process."""

    def make(
        *,
        framework: str | None = None,
        packages: dict[str, str] | None = None,
        counts: dict[str, Any] | None = None,
        steps: tuple[StepFacts, ...] = (),
        **ledger: Any,
    ) -> Trace:
        group = Group(learning_rate=0.1, weight_decay=0.0, tensors=10, elements=1000)
        optimizer = Optimizer(name="SGD", fused=None, foreach=None, groups=(group,))
        work = Ledger(**{"optimizers": (optimizer,), **ledger})
        basis = {
            "steps": 4,
            "micro_steps_per_step": 1.0,
            "ops_per_step": 100.0,
            "ops_by_phase": {},
            "python_calls_per_step": 50.0,
            "python_calls_by_phase": {},
        }
        process = ProcessFacts(
            rank=0,
            pid=1,
            environment=Environment(framework=framework, packages=packages or {}),
            work=work,
            steps=steps,
            counts=None if counts is None else Counts(**{**basis, **counts}),
        )
        return Trace(script="train.py", command=("python", "train.py"), processes=(process,), work=work)

    return make


@pytest.fixture
def untouched() -> Callable[[], Any]:
    """A context that fails when any attribute of torch, builtins, logging or tqdm is another object after it."""
    import torch
    import tqdm.std

    owners = (
        torch,
        torch.Tensor,
        torch._C.TensorBase,
        torch.nn.Parameter,
        torch.nn.Module,
        torch.nn.Linear,
        torch.nn.utils,
        torch.nn.utils.clip_grad,
        builtins,
        logging.Logger,
        tqdm.std.tqdm,
    )

    def snapshot() -> list[dict[str, int]]:
        return [{name: id(value) for name, value in vars(owner).items()} for owner in owners]

    @contextmanager
    def check() -> Iterator[None]:
        before = snapshot()
        try:
            yield
        finally:
            assert snapshot() == before

    return check
