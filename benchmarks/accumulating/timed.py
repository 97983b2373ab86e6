"""Micro-steps of all ways, turn and turn about in one process, on one model: what differs is the accumulation alone.

Each way keeps its own gradients and puts them back when its turn comes; the parameters are the same tensors for all, but
for `native_averager`, which hooks them and so has a copy of the model, and "told", which is compared with it. "again" is a
second turn of native accumulation: the control. The first micro-step of a turn finds the caches full of another way's
gradients and is not timed.
"""

import copy
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from accumulating.models import MODELS
from accumulating.ways import Way, way

__all__ = ["AGAIN", "in_turns"]

AGAIN = "again"
ON_A_COPY = ("averager", "told")
TURN_S = 0.5
FEWEST_STEPS = 2
WARM_UP = 2


@dataclass(kw_only=True, slots=True)
class _Contestant:
    """A way with its model and, between its turns, the gradients."""

    way: Way
    model: nn.Module
    gradients: list[Tensor | None]


def in_turns(name: str, orders: Sequence[Sequence[str]], seed: int) -> list[dict[str, dict[str, float]]]:
    """[round][way] -> seconds of wall clock and of this thread's CPU per micro-step, and `step_s` of the calls around it.

    Raises:
        RuntimeError: what a way itself raises.
    """
    torch.manual_seed(seed)
    model, batch = MODELS[name].build().train(), MODELS[name].batch(MODELS[name].samples)
    names = dict.fromkeys(name for names in orders for name in names if name != AGAIN)
    with ExitStack() as stack:
        contestants = {name: _opened(stack, name, model, batch) for name in names}
        contestants[AGAIN] = contestants["native"]
        steps = max(FEWEST_STEPS, round(TURN_S / _turn(contestants["native"], batch, FEWEST_STEPS)["wall_s"]))
        return [{name: _turn(contestants[name], batch, steps) for name in names} for names in orders]


def _opened(stack: ExitStack, name: str, model: nn.Module, batch: Mapping[str, Tensor]) -> _Contestant:
    if name in ON_A_COPY:
        model = copy.deepcopy(model)
    parameters = list(model.parameters())
    opened = stack.enter_context(way(name, parameters, len(batch["labels"])))
    contestant = _Contestant(way=opened, model=model, gradients=[parameter.grad for parameter in parameters])
    _turn(contestant, batch, WARM_UP)
    return contestant


def _turn(contestant: _Contestant, batch: Mapping[str, Tensor], steps: int) -> dict[str, float]:
    parameters = list(contestant.model.parameters())
    for parameter, gradient in zip(parameters, contestant.gradients, strict=True):
        parameter.grad = gradient
    _timed(contestant, batch)
    wall_s, cpu_s = time.perf_counter(), time.thread_time()
    around_s = [_timed(contestant, batch) for _ in range(steps)]
    wall_s, cpu_s = time.perf_counter() - wall_s, time.thread_time() - cpu_s
    contestant.gradients = [parameter.grad for parameter in parameters]
    return {"wall_s": wall_s / steps, "cpu_s": cpu_s / steps, "step_s": median(around_s)}


def _timed(contestant: _Contestant, batch: Mapping[str, Tensor]) -> float:
    """One micro-step; seconds of what is around forward and backward."""
    start_s: Any = time.perf_counter()
    contestant.way.before()
    before_s = time.perf_counter() - start_s
    contestant.model(**batch).loss.backward()
    start_s = time.perf_counter()
    contestant.way.after()
    return before_s + time.perf_counter() - start_s
