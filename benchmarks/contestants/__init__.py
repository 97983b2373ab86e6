"""The ways to write the same training, each a function of a `Task` that returns the trained model.

Every contestant does the work of the bare loop that it is held against: the same batches in the same order, the same
optimizer object and schedule, the same clip. The frameworks are set up as their documentation has it, with logging,
progress bars and checkpoints off, since the bare loop has none.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from contestants.task import Task

__all__ = ["CONTESTANTS", "CONTROLS", "Contestant", "train"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Contestant:
    """One way to train."""

    label: str
    where: str
    """"module:function" in this folder; imported on use, because a framework takes seconds to import."""
    against: str
    """Name of the bare loop that does the same work."""


CONTESTANTS: Mapping[str, Contestant] = {
    "bare": Contestant(label="bare loop", where="bare:mean_loop", against="bare"),
    "bare_no_clip": Contestant(label="bare loop, no clip", where="bare:mean_loop_without_clip", against="bare"),
    "bare_tokens": Contestant(label="bare loop, token mean", where="bare:token_mean_loop", against="bare_tokens"),
    "steps": Contestant(label="bareloop.steps", where="own_steps:mean_steps", against="bare"),
    "steps_tokens": Contestant(
        label="bareloop.steps, token mean", where="own_steps:token_steps", against="bare_tokens"
    ),
    "lean": Contestant(label="bareloop.Trainer", where="trainers:lean", against="bare_tokens"),
    "stock": Contestant(label="transformers.Trainer", where="trainers:stock", against="bare_tokens"),
    "accelerate": Contestant(label="Accelerate", where="accelerate_loop:accelerate_loop", against="bare"),
    "lightning": Contestant(label="Lightning", where="lightning_fit:lightning_fit", against="bare"),
}
"""Each loss is the mean over its micro-batch, averaged over the window, or ("token mean") what the Trainer computes by
default: the sum over the window's tokens, divided by their number."""

CONTROLS: Mapping[str, str] = {"bare": "bare_again", "bare_tokens": "bare_tokens_again"}
"""Bare loop -> name of its second copy, whose ratio to the first is what "no difference" looks like."""


def train(name: str) -> Callable[[Task], nn.Module]:
    """The function of a contestant or of a control."""
    original = next((first for first, again in CONTROLS.items() if again == name), name)
    module, _, function = CONTESTANTS[original].where.partition(":")
    return getattr(importlib.import_module(f"contestants.{module}"), function)
