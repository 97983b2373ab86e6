"""An epoch of a lean trainer in a swarm: micro-batch after micro-batch, and a step where the peers have a round.

Rounds go on from one epoch to the next. Each micro-batch costs what it costs in `epoch`, one question to the swarm, and
under DistributedDataParallel a reduction, since no one knows beforehand which micro-batch is the last of a round.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.trainer_pt_utils import find_batch_size

from bareloop.trainer import swarm
from bareloop.trainer.division import Count, nonzero
from bareloop.trainer.epoch import EpochCall, Planned, Progress, begin_step, finish, update
from bareloop.trainer.plan import Plan
from bareloop.trainer.running_loss import RunningLoss

__all__ = ["train_rounds", "weighing"]


def train_rounds(
    trainer: Any, call: EpochCall, planned: Planned, running: RunningLoss, batches: Iterator[Any], progress: Progress
) -> None:
    """The hot loop. As in `epoch`, a plan that has become stale is made anew."""
    part, plan = trainer._swarm_part, planned(call.model)
    trainer.accelerator.gradient_state.sync_gradients = True
    trainer.current_gradient_accumulation_steps = 1
    swarm.follow(trainer)
    while not (trainer.control.should_epoch_stop or trainer.control.should_training_stop):
        micro_batches, count = plan.window(batches, 1)
        if progress.restores_rng:
            trainer._load_rng_state(call.resume_from_checkpoint)
            progress.restores_rng = False
        if not micro_batches:
            return
        progress.micro_step += 1
        part.position = swarm.Position(epoch=call.epoch, trained=progress.micro_step + 1)
        if not part.is_open:
            begin_step(trainer, plan.events)
            part.is_open = True
        if plan.is_stale(trainer):
            plan = planned(call.model)
        _micro_batch(trainer, plan, micro_batches[0], count)
        if plan.is_stale(trainer):
            plan = planned(call.model)
        trainer.current_flos += plan.flops(micro_batches[0])
        if plan.track_tokens is not None:
            plan.track_tokens(micro_batches[0])
        stepped = _stepped(trainer, plan, planned, running, progress) if trainer._swarm.ready() else None
        if stepped is not None:
            part.is_open = False
            finish(trainer, call, stepped, progress)
        elif plan.events.on_substep_end is not None:
            plan.events.on_substep_end()
        swarm.follow(trainer)


def _micro_batch(trainer: Any, plan: Plan, batch: Any, count: Any) -> None:
    part = trainer._swarm_part
    divisor, weight, reduction = part.weigh(batch, count)
    with trainer._swarm.micro_batch(weight, reduction=reduction):
        loss = plan.training_step(plan.walk.model, batch, divisor)
    if plan.copies_loss and loss is not trainer._own_loss:
        loss = loss.detach().clone()
    if loss.ndim:
        raise ValueError(f"training_step returned a loss of shape {list(loss.shape)}: it must be a 0-d tensor")
    part.losses.append(loss / nonzero(weight) if reduction == "sum" else loss)
    part.weights.append(weight)
    part.rows += (find_batch_size(batch) or 0) * trainer.args.world_size
    if not plan.walk.was_used:
        plan.walk.look_again()


def _stepped(trainer: Any, plan: Plan, planned: Planned, running: RunningLoss, progress: Progress) -> Plan | None:
    """Steps the optimizer on the round's mean, and keeps its losses; None where the mean could not be had."""
    with trainer._swarm.averaged() as mean:
        if mean is False:
            return None
        plan = update(trainer, plan, planned, progress)
    swarm.follow(trainer, ahead=1)
    _keep_losses(trainer, running)
    return plan


def _keep_losses(trainer: Any, running: RunningLoss) -> None:
    """Adds the round's mean loss, as the terms that gradient accumulation adds: each micro-batch's with its weight."""
    part = trainer._swarm_part
    losses, weights = part.losses, part.weights
    if losses:
        shares = _together(weights, losses[0].device)
        shares = shares / shares.sum()
        since_log = 1 + trainer.state.global_step - trainer._globalstep_last_logged
        for loss in (torch.stack(losses) * shares).unbind():
            running.keep(loss, since_log if trainer.args.logging_nan_inf_filter else 0)
    losses.clear()
    weights.clear()


def _together(weights: list[Count], device: torch.device) -> Tensor:
    tensors = [weight for weight in weights if isinstance(weight, Tensor)]
    if tensors:
        return torch.stack(tensors).to(device, torch.float32)
    return torch.tensor(weights, dtype=torch.float32, device=device)


def weighing(trainer: Any) -> Callable[[Any, Any], tuple[Any, Count, str]]:
    """(batch, its counted labels or None) to (what its loss is to be divided by, its weight, reduction): see `Part`."""
    if trainer.lean_options.swarm_counts == "labels":
        return partial(_by_labels, torch.ones((), device=trainer.args.device))
    return partial(_by_rows, trainer.args.world_size)


def _by_labels(one: Tensor, batch: Any, count: Any) -> tuple[Any, Count, str]:
    if count is None:
        raise ValueError("swarm_counts='labels': a batch has no labels that can be counted; use 'samples'")
    return one, count, "sum"


def _by_rows(ranks: int, batch: Any, count: Any) -> tuple[Any, Count, str]:
    rows = find_batch_size(batch)
    if rows is None:
        raise ValueError(
            "swarm= counts rows, and a batch has no tensor whose first dimension tells them: have the collator return"
            " tensors, or count labels with LeanOptions(swarm_counts='labels')"
        )
    # A micro-batch without a label would be a division by zero, and its NaN would reach every peer.
    return None if count is None else nonzero(count), rows * ranks, "mean"
