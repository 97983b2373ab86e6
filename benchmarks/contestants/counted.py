"""What a contestant does per step: operators, host reads, collectives, copies, Python calls.

Two windows of some steps each, on the training thread, after steps that warm up (optimizer state, reducer buckets):

*   Operators as they are issued: a dispatch mode below autograd and autocast sees what Python, autograd and C++ issue,
    in the forward, in backward and in the optimizer; what an operator calls inside itself is not counted. The same
    window counts host reads, collectives and copies. It is the clinic's own (`bareloop.profiler.probes.ops`).
*   Operators with all those inside them, by PyTorch's record functions, which also see calls that come to nothing
    (`.to` the device where the tensor is); and Python calls, by `sys.setprofile`: every frame that is entered, a
    generator's resumption included, C functions not. Frames of this file are left out.

All are exact and repeat.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import Tensor, nn

from bareloop.profiler.probes.operators import OperatorCounter
from bareloop.profiler.probes.ops import OpsWindow
from contestants.task import Setting, Task

__all__ = ["Counted", "count"]

WARM_UP = 3
STEPS = 2
"""In each window."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """Per step, in this process."""

    ops: float
    """As issued."""
    all_ops: float
    """With those inside operators."""
    host_reads: float
    collectives: float
    collective_bytes: float
    copies: float
    python_calls: float


class _Calls:
    """Counts Python calls and all operators between `start()` and `stop()`."""

    def __init__(self) -> None:
        self.python_calls = 0
        self.operators = OperatorCounter()

    def start(self) -> None:
        self.operators.start("step")
        sys.setprofile(self._event)

    def stop(self) -> None:
        sys.setprofile(None)
        self.operators.stop()

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename != __file__:
            self.python_calls += 1


def count(train: Callable[[Task], nn.Module], setting: Setting) -> tuple[Counted, list[Tensor]]:
    """Counts of one contestant, which trains for a few steps, and the weights that it ended with.

    Raises:
        RuntimeError: it made fewer optimizer steps than it was asked for, or operators could not be counted.
    """
    issued, calls = OpsWindow(lambda: "step"), _Calls()
    at = {
        WARM_UP: issued.start,
        WARM_UP + STEPS: lambda: (issued.stop(), calls.start()),
        WARM_UP + 2 * STEPS: calls.stop,
    }
    done = 0

    def at_step() -> None:
        nonlocal done
        done += 1
        if done in at:
            at[done]()

    steps = WARM_UP + 2 * STEPS + 1
    model = train(Task(setting=setting, steps=steps, at_step=at_step))
    if done != steps:
        raise RuntimeError(f"{train.__name__} made {done} optimizer steps, was asked for {steps}")
    facts, operators = issued.result(STEPS), calls.operators.by_phase()
    if operators is None:
        raise RuntimeError(f"operators of {train.__name__} were not counted: {calls.operators.note}")
    counted = Counted(
        ops=facts.issued_per_step,
        all_ops=sum(operators.values()) / STEPS,
        host_reads=sum(read.per_step for read in facts.host_reads),
        collectives=sum(each.per_step for each in facts.collectives),
        collective_bytes=sum(each.bytes_per_step or 0 for each in facts.collectives),
        copies=sum(copy.per_step for copy in facts.copies),
        python_calls=calls.python_calls / STEPS,
    )
    return counted, [parameter.detach().clone() for parameter in model.parameters()]
