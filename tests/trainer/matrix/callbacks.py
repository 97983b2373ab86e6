"""Callbacks of the matrix: those that stop, steer, or meddle."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import TrainerCallback, TrainerControl

from matrix.journal import Journal

__all__ = [
    "at",
    "clipping_changed",
    "eager_logging",
    "gradients_edited",
    "joins_and_leaves",
    "learning_rate_edited",
    "modes_changed",
    "new_control",
    "raises",
    "sets",
    "thawed",
]

Factory = Callable[[], TrainerCallback]


def at(event: str, action: Callable[..., Any], *steps: int) -> Factory:
    """A callback that does `action(args, state, control, **given)` at `event` of `steps`; of all, without any."""

    def method(self: TrainerCallback, args: Any, state: Any, control: Any, **given: Any) -> TrainerControl | None:
        return action(args, state, control, **given) if not steps or state.global_step in steps else None

    return type(f"Acting_{event}", (TrainerCallback,), {event: method})


def sets(flag: str, value: bool = True) -> Callable[..., None]:
    """Sets a flag of the control that it is given, and returns nothing."""
    return lambda args, state, control, **given: setattr(control, flag, value)


def new_control(**flags: bool) -> Callable[..., TrainerControl]:
    """Returns a control of its own in place of the one that it was given."""
    return lambda args, state, control, **given: TrainerControl(**flags)


def raises(args: Any, state: Any, control: Any, **given: Any) -> None:
    raise RuntimeError("the callback gave up")


def modes_changed(args: Any, state: Any, control: Any, model: torch.nn.Module, **given: Any) -> None:
    """Dropout off, by hand; the Trainer puts it on again before the next forward."""
    model.eval()


def gradients_edited(args: Any, state: Any, control: Any, model: torch.nn.Module, **given: Any) -> None:
    """Adds noise to the gradients just before the step."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad += 1e-2 * torch.randn_like(parameter.grad)


def learning_rate_edited(args: Any, state: Any, control: Any, optimizer: Any, **given: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0.5


def clipping_changed(args: Any, state: Any, control: Any, **given: Any) -> None:
    """Arguments changed in training; the Trainer reads them again at every step."""
    args.max_grad_norm = 0.02 * state.global_step
    args.logging_nan_inf_filter = False


def eager_logging(args: Any, state: Any, control: Any, **given: Any) -> None:
    """From here on a line per step."""
    state.logging_steps = 1


def thawed(args: Any, state: Any, control: Any, model: torch.nn.Module, **given: Any) -> None:
    model.requires_grad_(True)


def joins_and_leaves(trainer: transformers.Trainer, journal: Journal) -> None:
    """A callback that joins in the third step, between the optimizer's and its end, and leaves in the fifth."""

    def says(event: str) -> Callable[..., None]:
        return lambda self, args, state, control, **given: journal.add(f"late {event}", state.global_step)

    events = ("on_substep_end", "on_pre_optimizer_step", "on_step_end", "on_log")
    late = type("Late", (TrainerCallback,), {event: says(event) for event in events})

    def join(args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == 2:
            trainer.add_callback(late)
        if state.global_step == 4:
            trainer.remove_callback(late)

    trainer.add_callback(at("on_optimizer_step", join)())
