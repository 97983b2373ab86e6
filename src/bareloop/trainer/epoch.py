"""One epoch of the lean trainer: what the stock trainer's `_run_epoch` does, in its order, at the cost of a bare loop.

Everything that can be decided beforehand is in the `Plan`; the loop itself is `_train_windows`.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from bareloop.trainer import checkpoint, resume, transfer
from bareloop.trainer.events import Events
from bareloop.trainer.plan import Plan
from bareloop.trainer.running_loss import RunningLoss

__all__ = ["EpochCall", "Planned", "Progress", "begin_step", "finish", "run_epoch", "update"]

logger = logging.getLogger("bareloop")

Planned = Callable[[nn.Module], Plan]


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochCall:
    """The arguments of the stock trainer's `_run_epoch`, by their names."""

    model: nn.Module
    epoch: int
    train_dataloader: Any
    steps_in_epoch: int
    """Micro-steps of an epoch."""
    num_update_steps_per_epoch: int
    """Steps of an epoch."""
    trial: Any
    ignore_keys_for_eval: list[str] | None
    start_time: float
    resume_from_checkpoint: str | None
    epochs_trained: int
    steps_trained_in_current_epoch: int
    """Micro-steps of the resumed epoch that were trained on before."""


@dataclass(slots=True)
class Progress:
    """How far the epoch is; what the stock loop keeps in local variables."""

    micro_step: int = -1
    """Index of the last micro-step."""
    steps: int = 0
    restores_rng: bool = False
    """The random state of the checkpoint is to be restored after the first window was read."""
    norm: Tensor | float | None = None
    learning_rate: float | None = None


Loop = Callable[[Any, EpochCall, Planned, RunningLoss, Iterator[Any], Progress], None]


def run_epoch(trainer: Any, call: EpochCall, planned: Planned, running: RunningLoss, loop: Loop | None = None) -> None:
    """Train for one pass over the data, as `trainer._run_epoch` would.

    Args:
        planned: decides how, for the trainer as it is when called.
        running: takes the losses.
        loop: what goes through the batches; None for windows of `gradient_accumulation_steps`.
    """
    batches, progress = _opened(trainer, call)
    try:
        (loop or _train_windows)(trainer, call, planned, running, batches, progress)
    except ValueError as error:
        if progress.micro_step < 0 and "does not contain any data" in str(error):  # accelerate's dispatching loader
            raise ValueError("train_dataset gave no row at all: is it empty, or was it read before?") from error
        raise
    if progress.micro_step < 0:
        logger.warning(
            f"The training loader gave no batch, so training stops at step {trainer.state.global_step} of "
            f"{trainer.state.max_steps}: the data is empty, or an iterable that was read before and does not start anew"
        )
        trainer.control.should_training_stop = True
    trainer.control = trainer.callback_handler.on_epoch_end(trainer.args, trainer.state, trainer.control)
    _log_save_evaluate(trainer, call, progress)


def _train_windows(
    trainer: Any, call: EpochCall, planned: Planned, running: RunningLoss, batches: Iterator[Any], progress: Progress
) -> None:
    """The hot loop. A plan that has become stale is made anew where the user's code may have run."""
    gradient_state, step, plan = trainer.accelerator.gradient_state, progress.micro_step, planned(call.model)
    for window in range(progress.steps, call.num_update_steps_per_epoch):
        size = trainer.args.gradient_accumulation_steps
        if window == call.num_update_steps_per_epoch - 1:
            size = call.steps_in_epoch % size or size
        micro_batches, count = plan.window(batches, size)
        trainer.current_gradient_accumulation_steps = len(micro_batches)
        if progress.restores_rng:
            trainer._load_rng_state(call.resume_from_checkpoint)
            progress.restores_rng = False
        if not micro_batches and plan.empty_window_ends:
            break
        for index, batch in enumerate(micro_batches, start=1):
            step = progress.micro_step = step + 1
            accumulate = trainer.args.gradient_accumulation_steps
            closes = (step + 1) % accumulate == 0 or step + 1 == call.steps_in_epoch
            gradient_state.sync_gradients = closes
            if step % accumulate == 0:
                begin_step(trainer, plan.events)
            if plan.is_stale(trainer):
                plan = planned(call.model)
            if plan.without_sync is None or index == len(micro_batches):
                _micro_step(trainer, plan, running, batch, count)
            else:
                with plan.without_sync():
                    _micro_step(trainer, plan, running, batch, count)
            if plan.is_stale(trainer):
                plan = planned(call.model)
            trainer.current_flos += plan.flops(batch)
            if plan.track_tokens is not None:
                plan.track_tokens(batch)
            if closes:
                finish(trainer, call, update(trainer, plan, planned, progress), progress)
            elif plan.events.on_substep_end is not None:
                plan.events.on_substep_end()
            if trainer.control.should_epoch_stop or trainer.control.should_training_stop:
                return


def _micro_step(trainer: Any, plan: Plan, running: RunningLoss, batch: Any, count: Any) -> None:
    loss = plan.training_step(plan.walk.model, batch, count)
    if plan.copies_loss and loss is not trainer._own_loss:
        loss = loss.detach().clone()
    since_log = 1 + trainer.state.global_step - trainer._globalstep_last_logged
    running.keep(loss, since_log if trainer.args.logging_nan_inf_filter else 0)
    if not plan.walk.was_used:
        plan.walk.look_again()


def begin_step(trainer: Any, events: Events) -> None:
    control = trainer.control
    control.should_log = control.should_evaluate = control.should_save = False
    if events.on_step_begin is not None:
        events.on_step_begin()


def update(trainer: Any, plan: Plan, planned: Planned, progress: Progress) -> Plan:
    """From the gradients of a step to the new parameters: clip, optimizer, scheduler. Returns the plan to go on with."""
    events, state = plan.events, trainer.state
    # The handler clears should_log at the beginning of a step, so it is set here only by the user's code.
    foreseen = events.log_can_be_foreseen and not plan.always_reports and not trainer.control.should_log
    reports = not foreseen or events.logs_at(state.global_step + 1)
    progress.norm = plan.clip(reports)
    if events.on_pre_optimizer_step is not None:
        events.on_pre_optimizer_step()
        if plan.is_stale(trainer):
            plan = planned(plan.walk.model)
            events = plan.events
    plan.step()
    if events.on_optimizer_step is not None:
        events.on_optimizer_step()
    progress.learning_rate = trainer._get_learning_rate() if reports else None
    if plan.steps_scheduler and (plan.was_skipped is None or not plan.was_skipped()):
        trainer.lr_scheduler.step()
    plan.zero_grad()
    return plan


def finish(trainer: Any, call: EpochCall, plan: Plan, progress: Progress) -> None:
    """What follows an update: the count, callbacks, log, evaluation, checkpoint."""
    events, state = plan.events, trainer.state
    state.global_step += 1
    state.epoch = call.epoch + (progress.micro_step + 1) / call.steps_in_epoch
    if events.on_step_end is not None:
        events.on_step_end()
    control = trainer.control
    if control.should_log or control.should_evaluate or control.should_save or plan.always_calls_log:
        changes_model = control.should_evaluate or control.should_save or plan.always_calls_log
        _log_save_evaluate(trainer, call, progress)
        if changes_model or plan.own_log or events.foreign_log:
            plan.walk.look_again()
    thread = trainer._checkpoint_thread
    if thread is not None and thread.failed:
        checkpoint.raise_failure(trainer)


def _log_save_evaluate(trainer: Any, call: EpochCall, progress: Progress) -> None:
    trainer._maybe_log_save_evaluate(
        trainer._tr_loss,
        progress.norm,
        call.model,
        call.trial,
        call.epoch,
        call.ignore_keys_for_eval,
        call.start_time,
        learning_rate=progress.learning_rate,
    )


def _opened(trainer: Any, call: EpochCall) -> tuple[Iterator[Any], Progress]:
    """The batches of the epoch that are still to be trained on, and where in the epoch that is."""
    loader, progress = call.train_dataloader, Progress()
    if call.epoch == call.epochs_trained and call.resume_from_checkpoint is not None:
        trained = call.steps_trained_in_current_epoch
        if trained > 0 and not trainer.args.ignore_data_skip:
            loader = resume.skip_trained(trainer, loader, trained)
            progress.micro_step = trained - 1
            progress.steps = trained // trainer.args.gradient_accumulation_steps
            progress.restores_rng = True
        elif trained == 0:
            trainer._load_rng_state(call.resume_from_checkpoint)
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(call.epoch)
    # accelerate's set_epoch does not reach a sampler inside its own batch sampler.
    sampler: Any = getattr(getattr(loader, "batch_sampler", None), "batch_sampler", None)
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(call.epoch)
    ahead = trainer.lean_options.prefetch_batches
    if ahead > 0:
        return transfer.prefetched(iter(loader), transfer.SideStream(trainer.args.device), ahead), progress
    return iter(loader), progress
