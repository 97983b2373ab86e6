"""`lean(cls)`: a transformers Trainer class with the hot loop replaced and everything else inherited.

The replacements sit in `LeanLoop`, directly above `transformers.Trainer` in the method order: a method that the user's
class overrides comes before it and reaches it by `super()`, so every override is called when the stock loop calls it.
"""

import functools
import inspect
import logging
from typing import Any, TypeVar

import torch
import transformers
from accelerate.data_loader import DataLoaderShard
from torch import Tensor, nn
from transformers.trainer_utils import has_length

from bareloop.trainer import checkpoint, checkpoint_files, evaluation, losses, memory, resume, swarm, transfer, upstream
from bareloop.trainer.epoch import EpochCall, run_epoch
from bareloop.trainer.micro_step import without_cpu_index
from bareloop.trainer.options import LeanOptions
from bareloop.trainer.plan import Plan, decide, overridden_by, uncovered
from bareloop.trainer.report import LOOP, FallBack, LeanReport
from bareloop.trainer.running_loss import RunningLoss
from bareloop.trainer.swarm_epoch import train_rounds, weighing

__all__ = ["LeanLoop", "Trainer", "lean"]

logger = logging.getLogger("bareloop")

_TrainerClass = TypeVar("_TrainerClass", bound=transformers.Trainer)


class LeanLoop(transformers.Trainer):
    """The lean replacements of the stock trainer's methods. Made part of a class by `lean`; not used on its own."""

    lean_options: LeanOptions
    _plan: Plan | None = None
    """How the epoch runs that is running; None between epochs."""
    _parts: tuple[tuple[str, ...], tuple[FallBack, ...]] | None = None
    """What is lean and what fell back in the last plan."""
    _running_loss: RunningLoss | None = None
    _own_loss: Tensor | None = None
    """What the last lean micro-step returned."""
    _notice_given: bool = False
    _checkpoint_thread: Any = None
    _stock_save_told: bool = False
    _resumed: Any = None
    _position: Any = None
    _swarm: Any = None
    """The peer that this trainer is, or None: see `bareloop.trainer.swarm`."""
    _swarm_part: Any = None

    @property
    def lean_report(self) -> LeanReport:
        """What is lean in this trainer and what fell back, and why."""
        why_stock, parts, running = _why_stock(self), self._parts, self._running_loss
        if parts is None:
            why_stock = (*why_stock, *_own_epoch(self))
        is_lean = not why_stock
        lean_parts, fallen_back = parts if is_lean and parts is not None else ((), why_stock)
        return LeanReport(
            loop_is_lean=is_lean,
            lean=lean_parts,
            fallen_back=(*fallen_back, *_beside_the_loop(self, is_lean)),
            non_finite_losses=0 if running is None else running.dropped(),
            largest_micro_batch=memory.largest_micro_batch(self) if self.lean_options.shrink_on_out_of_memory else None,
        )

    @property
    def _tr_loss(self) -> Tensor:
        """The stock trainer's sum of losses since the last log, with every micro-step in it."""
        if self._running_loss is None:
            raise AttributeError("_tr_loss is set when training begins")
        return self._running_loss.fold()

    @_tr_loss.setter
    def _tr_loss(self, total: Tensor) -> None:
        running = self._running_loss
        if running is not None and running.total is total:
            return  # the stock loop adds in place
        self._running_loss = RunningLoss(total)
        self._notice_given = False

    def _run_epoch(
        self,
        model: nn.Module,
        epoch: int,
        train_dataloader: Any,
        steps_in_epoch: int,
        num_update_steps_per_epoch: int,
        trial: Any,
        ignore_keys_for_eval: list[str] | None,
        start_time: float,
        resume_from_checkpoint: str | None,
        epochs_trained: int,
        steps_trained_in_current_epoch: int,
    ) -> None:
        call = EpochCall(
            model=model,
            epoch=epoch,
            train_dataloader=train_dataloader,
            steps_in_epoch=steps_in_epoch,
            num_update_steps_per_epoch=num_update_steps_per_epoch,
            trial=trial,
            ignore_keys_for_eval=ignore_keys_for_eval,
            start_time=start_time,
            resume_from_checkpoint=resume_from_checkpoint,
            epochs_trained=epochs_trained,
            steps_trained_in_current_epoch=steps_trained_in_current_epoch,
        )
        reasons = _why_stock(self)
        running = self._running_loss
        if self._swarm is not None:
            swarm.refuse(self, reasons, None)
        if reasons or running is None:
            _give_notice(self, reasons)
            with resume.fast_skip(self):
                return super()._run_epoch(**{name: getattr(call, name) for name in EpochCall.__slots__})
        try:
            run_epoch(self, call, self._planned, running, None if self._swarm is None else train_rounds)
        finally:
            self._plan = self._own_loss = None  # they hold the model, and another one may be trained next

    def _planned(self, model: nn.Module) -> Plan:
        self._plan = plan = decide(self, model, (LeanLoop,))
        self._parts = (plan.lean, plan.fallen_back)
        return plan

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        _raise_failed_checkpoint(self)
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        checkpoint.finish(self)
        dropped = 0 if self._running_loss is None else self._running_loss.dropped()
        if dropped:
            logger.warning(
                f"bareloop: {dropped} micro-steps had a loss of NaN or infinity; the logged loss leaves them out, as "
                "logging_nan_inf_filter says"
            )
        if self._swarm is not None:
            return swarm.finished(self, super()._finalize_training, *args, **kwargs)
        return super()._finalize_training(*args, **kwargs)

    def set_initial_training_values(self, *args: Any, **kwargs: Any) -> Any:
        values = super().set_initial_training_values(*args, **kwargs)
        return values if self._swarm is None else swarm.without_end(values)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        model, loader = super()._prepare_for_training(*args, **kwargs)
        if self._swarm is not None:
            swarm.attach(self, model, weighing(self))
        return model, loader

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if self._swarm is not None and "loss" in logs:
            logs.update(swarm.log_entries(self))
        super().log(logs, *args, **kwargs)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        plan = self._plan
        if plan is None or plan.walk.model is not model or self.lean_options.shrink_on_out_of_memory:
            return super().training_step(model, inputs, num_items_in_batch)
        self._own_loss = loss = plan.micro_step(model, inputs, num_items_in_batch)
        return loss

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        arguments = (dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        if self.lean_options.streaming_metrics is None and not self.lean_options.log_extra_losses:
            return super().evaluation_loop(*arguments)
        return evaluation.evaluation_loop(self, super().evaluation_loop, *arguments)

    def get_train_dataloader(self) -> Any:
        try:
            loader = super().get_train_dataloader()
        except ValueError as error:
            if self.train_dataset is not None and has_length(self.train_dataset) and len(self.train_dataset) == 0:
                raise ValueError("train_dataset is empty: give at least one row") from error
            raise
        if isinstance(loader, DataLoaderShard) and loader.device is not None:
            loader.device = without_cpu_index(torch.device(loader.device))
        if self.lean_options.stateful_loader:
            loader = resume.tracked(self, loader)
        return transfer.on_host(self, loader) if self.lean_options.prefetch_batches else loader

    def _init_training_state(self, *args: Any) -> Any:
        if self.lean_options.stateful_loader:
            counted = resume.init_training_state(self, super()._init_training_state, *args)
        else:
            counted = super()._init_training_state(*args)
        return counted if self._swarm is None else swarm.resumed(self, args[3], counted)

    def _load_rng_state(self, folder: Any) -> None:
        if not self.lean_options.stateful_loader:
            return super()._load_rng_state(folder)
        return resume.load_rng_state(self, super()._load_rng_state, folder)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        checkpoint.save_checkpoint(self, super()._save_checkpoint, model, trial)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        checkpoint_files.load_model(self, super()._load_from_checkpoint, resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, folder: Any) -> None:
        checkpoint_files.load_optimizer(self, super()._load_optimizer_and_scheduler, folder)


def lean(cls: type[_TrainerClass]) -> type[_TrainerClass]:
    """A subclass of `cls` that trains with the same results at the cost of a bare loop.

    Its objects take two keywords more, `lean_options` and `swarm`, and have `lean_report`. Wherever a feature of the
    trainer or a version of transformers is not covered, the stock loop runs, with a notice that says why; with a swarm
    (`bareloop.swarm.join`) that is refused.

    Args:
        cls: `transformers.Trainer` or a subclass: `Seq2SeqTrainer`, TRL's `SFTTrainer`, one's own. A class that is lean
            already is returned as it is.

    Raises:
        TypeError: `cls` is not a class of trainers.
    """
    if not (inspect.isclass(cls) and issubclass(cls, transformers.Trainer)):
        raise TypeError(f"lean({cls!r}): give it a class, transformers.Trainer or a subclass of it")
    if issubclass(cls, LeanLoop):
        return cls
    bases: tuple[type, ...] = (LeanLoop,) if cls is transformers.Trainer else (cls, LeanLoop)
    metaclass: Any = type(cls)
    made = metaclass(cls.__name__, bases, {"__module__": cls.__module__, "__doc__": cls.__doc__})
    made.__qualname__ = f"lean({cls.__qualname__})"
    made.__init__ = _init_of(cls, made)
    return made


def _init_of(cls: type, made: type) -> Any:
    """`cls.__init__` that takes `lean_options` and `swarm` too."""

    @functools.wraps(cls.__init__)
    def __init__(
        self: Any, *args: Any, lean_options: LeanOptions | None = None, swarm: Any = None, **kwargs: Any
    ) -> None:
        self.lean_options = LeanOptions() if lean_options is None else lean_options
        self._swarm = swarm
        inherited: Any = super(made, self)
        inherited.__init__(*args, **kwargs)
        _refuse_what_is_not_honoured(self)

    signature = inspect.signature(cls.__init__)
    extra = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in (("lean_options", LeanOptions | None), ("swarm", swarm.Peer | None))
    ]
    parameters = list(signature.parameters.values())
    position = len(parameters) - sum(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    parameters[position:position] = extra
    __init__.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return __init__


def _why_stock(trainer: Any) -> tuple[FallBack, ...]:
    """Why the stock loop has to run; empty when the lean one can."""
    return (*(each for each in upstream.mismatches() if each.part == LOOP), *uncovered(trainer))


def _own_epoch(trainer: Any) -> tuple[FallBack, ...]:
    """The user's `_run_epoch`, in which the lean one runs if it is called there."""
    owner = overridden_by(trainer, "_run_epoch", (LeanLoop,))
    reason = f"_run_epoch is overridden by {owner}, and has not called the one that it overrides"
    return () if owner is None else (FallBack(part=LOOP, reason=reason),)


def _own_loop(trainer: Any) -> str | None:
    """Which method of the loop is overridden, and by whom."""
    for name in ("_run_epoch", "_inner_training_loop", "_prepare_for_training"):
        owner = overridden_by(trainer, name, (LeanLoop, transformers.Trainer))
        if owner is not None:
            return f"{name} is overridden by {owner}"
    return None


def _beside_the_loop(trainer: Any, loop_is_lean: bool) -> tuple[FallBack, ...]:
    """What is not lean outside the loop: the save, and copying ahead under the stock loop."""
    found = []
    reason = checkpoint.why_stock_save(trainer)
    if reason is not None:
        found.append(FallBack(part="checkpoint", reason=reason))
    if trainer.lean_options.prefetch_batches and not loop_is_lean:
        found.append(FallBack(part="prefetch_batches", reason="the stock loop copies each batch when it is used"))
    return tuple(found)


def _give_notice(trainer: Any, reasons: tuple[FallBack, ...]) -> None:
    if reasons and not trainer._notice_given and trainer.is_world_process_zero():
        logger.warning("bareloop: the stock loop runs, since " + "; ".join(each.reason for each in reasons))
    trainer._notice_given = True


def _refuse_what_is_not_honoured(trainer: Any) -> None:
    options = trainer.lean_options
    if not isinstance(options, LeanOptions):
        raise TypeError(f"lean_options={options!r}: give it a LeanOptions")
    checkpoint.refuse_async(trainer)
    resume.refuse_stateful(trainer)
    evaluation.refuse_streaming(trainer)
    transfer.refuse_prefetching(trainer)
    losses.attach(trainer)
    memory.attach(trainer)
    swarm.refuse(trainer, _why_stock(trainer), _own_loop(trainer))


def _raise_failed_checkpoint(trainer: Any) -> None:
    thread = trainer._checkpoint_thread
    if thread is not None and thread.failed:
        checkpoint.raise_failure(trainer)


Trainer = lean(transformers.Trainer)
"""`transformers.Trainer` with the lean loop."""
