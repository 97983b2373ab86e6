"""`bareloop.steps` in place of the bare loops' bodies."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bareloop.trainer.loop import steps
from contestants.task import Task, gpt2, loader, on_all_ranks, optimizer, schedule

__all__ = ["mean_steps", "token_steps"]


def mean_steps(task: Task) -> nn.Module:
    """The work of `bare.mean_loop`."""
    return _train(task, lambda model, batch: model(**batch).loss)


def token_steps(task: Task) -> nn.Module:
    """The work of `bare.token_mean_loop`, divided once per step."""
    return _train(task, _sum_and_tokens)


def _sum_and_tokens(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    # The model's own loss is a sum where it is told of a count, and divides by it: an op more than a loss of one's own.
    return model(**batch, num_items_in_batch=1).loss, batch["labels"][..., 1:].ne(-100).sum()


def _train(task: Task, loss_fn: Callable[[nn.Module, dict[str, torch.Tensor]], Any]) -> nn.Module:
    setting = task.setting
    trained = gpt2(setting)
    model = on_all_ranks(setting, trained)
    adamw = optimizer(task, model)
    done = steps(
        model,
        adamw,
        loader(task),
        loss_fn,
        accumulate=setting.accumulate,
        max_norm=setting.max_norm or None,
        scheduler=schedule(task, adamw),
    )
    for _, _ in zip(range(task.steps), done, strict=False):
        pass
    return trained
