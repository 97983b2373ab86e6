"""The loops people write themselves, with some care: parameters listed once, gradients reduced once per step.

They keep each micro-batch's loss on the device, as a loop does that will log it, and never read it.
"""

from itertools import islice

import torch
import torch.distributed as dist
from torch import nn

from contestants.task import Task, gpt2, loader, on_all_ranks, optimizer, schedule

__all__ = ["mean_loop", "mean_loop_without_clip", "token_mean_loop"]

CPU = torch.device("cpu")


def mean_loop(task: Task) -> nn.Module:
    """Mean loss of each micro-batch, averaged over the window."""
    return _mean_loop(task, task.setting.max_norm)


def mean_loop_without_clip(task: Task) -> nn.Module:
    """`mean_loop` with gradients as they are."""
    return _mean_loop(task, 0.0)


def _mean_loop(task: Task, max_norm: float) -> nn.Module:
    setting = task.setting
    trained = gpt2(setting)
    model = on_all_ranks(setting, trained)
    parameters = list(model.parameters())
    adamw = optimizer(task, model)
    scheduler = schedule(task, adamw)
    accumulate, alone, losses = setting.accumulate, setting.processes == 1, []
    model.train()
    for index, batch in enumerate(islice(loader(task), task.steps * accumulate), start=1):
        batch = {name: tensor.to(CPU) for name, tensor in batch.items()}
        is_last = index % accumulate == 0
        if alone or is_last:
            losses.append(_backward(model, batch, accumulate))
        else:
            with model.no_sync():
                losses.append(_backward(model, batch, accumulate))
        if is_last:
            if max_norm > 0:
                nn.utils.clip_grad_norm_(parameters, max_norm)
            adamw.step()
            scheduler.step()
            adamw.zero_grad()
    return trained


def _backward(model: nn.Module, batch: dict[str, torch.Tensor], accumulate: int) -> torch.Tensor:
    loss = model(**batch).loss
    (loss / accumulate if accumulate > 1 else loss).backward()
    return loss.detach()


def token_mean_loop(task: Task) -> nn.Module:
    """Sum of the loss over the tokens of the window on all processes, divided by their number: the Trainer's default."""
    setting = task.setting
    trained = gpt2(setting)
    model = on_all_ranks(setting, trained)
    parameters = list(model.parameters())
    adamw = optimizer(task, model)
    scheduler = schedule(task, adamw)
    accumulate, processes, max_norm = setting.accumulate, setting.processes, setting.max_norm
    batches, losses = iter(loader(task)), []
    model.train()
    for _ in range(task.steps):
        window = [{name: tensor.to(CPU) for name, tensor in batch.items()} for batch in islice(batches, accumulate)]
        tokens = sum(batch["labels"][..., 1:].ne(-100).sum() for batch in window)
        if processes > 1:
            dist.all_reduce(tokens)
        for index, batch in enumerate(window, start=1):
            if processes == 1 or index == accumulate:
                losses.append(_backward_of_sum(model, batch, tokens, processes))
            else:
                with model.no_sync():
                    losses.append(_backward_of_sum(model, batch, tokens, processes))
        if max_norm > 0:
            nn.utils.clip_grad_norm_(parameters, max_norm)
        adamw.step()
        scheduler.step()
        adamw.zero_grad()
    return trained


def _backward_of_sum(
    model: nn.Module, batch: dict[str, torch.Tensor], tokens: torch.Tensor, processes: int
) -> torch.Tensor:
    loss = model(**batch, num_items_in_batch=tokens).loss
    # DistributedDataParallel averages over processes what was divided by the tokens of all of them.
    (loss * processes if processes > 1 else loss).backward()
    return loss.detach()
