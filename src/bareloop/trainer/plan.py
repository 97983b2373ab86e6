"""What the lean loop decides before an epoch, so that nothing is looked up, inspected or asked inside it."""

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers.optimization import GreedyLR
from transformers.utils.import_utils import is_sagemaker_mp_enabled, is_torch_xla_available

from bareloop.trainer import upstream
from bareloop.trainer.events import Events
from bareloop.trainer.gradients import (
    clip_of,
    clips_unexpectedly,
    one_kernel_takes_all,
    optimizer_step_of,
    wraps_unexpectedly,
)
from bareloop.trainer.micro_step import MicroStep, micro_step_of, without_cpu_index
from bareloop.trainer.report import LOOP, FallBack
from bareloop.trainer.walk import Walk, overrides_train

__all__ = ["Plan", "decide", "overridden_by", "uncovered"]

_ON_THE_WAY = (
    "training_step",
    "compute_loss",
    "compute_loss_context_manager",
    "autocast_smart_context_manager",
    "get_batch_samples",
    "_get_num_items_in_batch",
    "_prepare_inputs",
    "_prepare_input",
    "_prepare_context_parallel_inputs",
    "floating_point_ops",
    "_track_num_input_tokens",
    "_clip_grad_norm",
    "_get_grad_norm",
    "_get_learning_rate",
    "_maybe_log_save_evaluate",
)
"""Methods of the stock trainer that the lean loop does without unless somebody overrides them."""

_COVERED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.FSDP)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The functions that the hot loop calls and the constants it uses."""

    decided_for: tuple[Any, ...]
    """See `_watched`."""
    walk: Walk
    events: Events
    callbacks: list[Any]
    window: Callable[[Iterator[Any], int], tuple[list[Any], Any]]
    """(batches, how many) -> micro-batches of a step, fewer at the end of the data, and their counted labels or None."""
    empty_window_ends: bool
    """An empty window ends the epoch; False where the user's `get_batch_samples` is asked every time, as by stock."""
    micro_step: MicroStep
    """What the stock trainer's `training_step` does."""
    training_step: MicroStep
    """What the loop calls: `micro_step`, or the user's `training_step`, which calls it or not."""
    copies_loss: bool
    """The loss that `training_step` returns may be in a tensor that the user goes on writing to."""
    without_sync: Callable[[], AbstractContextManager[Any]] | None
    """Context of the micro-steps before the last of a window; None where gradients are not reduced."""
    flops: Callable[[Any], float]
    track_tokens: Callable[[Any], None] | None
    clip: Callable[[bool], Tensor | float | None]
    step: Callable[[], Any]
    was_skipped: Callable[[], bool] | None
    """Whether the gradient scaler skipped the step; None without one."""
    steps_scheduler: bool
    zero_grad: Callable[[], None]
    always_reports: bool
    """The norm and the learning rate are wanted at every step, whether a log can be foreseen or not."""
    own_log: bool
    """`log` is the user's."""
    always_calls_log: bool
    """`_maybe_log_save_evaluate` is the user's."""
    lean: tuple[str, ...]
    fallen_back: tuple[FallBack, ...]

    def is_stale(self, trainer: Any) -> bool:
        """Whether somebody changed what it was decided for."""
        return (
            self.walk.is_stale
            or _watched(trainer) != self.decided_for
            or trainer.callback_handler.callbacks != self.callbacks
        )


def _watched(trainer: Any) -> tuple[Any, ...]:
    """What a callback or a loss may replace in the middle of training. A method set on the object, of the trainer or of
    accelerate's, makes its `vars` longer."""
    return (
        trainer.optimizer,
        trainer.lr_scheduler,
        trainer.args,
        trainer.args.include_num_input_tokens_seen,
        trainer.args.average_tokens_across_devices,
        trainer.compute_loss_func,
        trainer.label_smoother,
        trainer.model_accepts_loss_kwargs,
        trainer.loss_is_scaled_for_ga,
        trainer.callback_handler,
        trainer.accelerator,
        len(vars(trainer.accelerator)),
        len(vars(trainer)),
    )


def overridden_by(trainer: Any, name: str, ours: tuple[type, ...]) -> str | None:
    """Who overrides the stock trainer's method `name` for this trainer; None: nobody.

    Args:
        ours: classes whose methods of that name are bareloop's.
    """
    own = vars(trainer).get(name)
    if own is not None and not _is_an_option_of_ours(own):
        return "the object itself"
    for owner in type(trainer).__mro__:
        if name in vars(owner) and owner not in ours:
            is_stock = owner is transformers.Trainer and upstream.is_tested(f"transformers.trainer:Trainer.{name}")
            return None if is_stock else owner.__qualname__
    return None


def _is_an_option_of_ours(method: Any) -> bool:
    """An option's function bound on the object, outside of what the class overrides."""
    return isinstance(method, functools.partial) and method.func.__module__.startswith("bareloop.")


def uncovered(trainer: Any) -> tuple[FallBack, ...]:
    """Why this trainer needs the stock loop; empty when the lean loop covers it."""
    args, accelerator = trainer.args, trainer.accelerator
    checks = (
        (is_torch_xla_available(), "torch_xla is installed, and XLA is not covered"),
        (is_sagemaker_mp_enabled(), "SageMaker's model parallelism is not covered"),
        (trainer.is_deepspeed_enabled, "DeepSpeed owns the backward and the step"),
        (args.n_gpu > 1, f"nn.DataParallel over {args.n_gpu} GPUs is not covered: launch with torchrun instead"),
        (getattr(accelerator, "parallelism_config", None) is not None, "parallelism_config is not covered"),
        (trainer.get_tp_size() != 1, "tensor parallelism is not covered"),
        (trainer.is_distributed_loading_by_transformers, "models sharded when loaded are not covered"),
        (str(getattr(args.optim, "value", args.optim)) in ("lomo", "adalomo"), f"optim={args.optim} steps in backward"),
        (args.torch_empty_cache_steps is not None, "torch_empty_cache_steps is not covered"),
        (accelerator.distributed_type not in _COVERED, f"{accelerator.distributed_type} is not covered"),
        (accelerator.gradient_accumulation_steps != 1, "accelerate accumulates gradients itself"),
    )
    return tuple(FallBack(part=LOOP, reason=reason) for applies, reason in checks if applies)


def decide(trainer: Any, model: nn.Module, ours: tuple[type, ...]) -> Plan:
    """How an epoch of `trainer` runs, as the trainer is now.

    Args:
        model: what is trained: `trainer.model`, wrapped.
        ours: see `overridden_by`.
    """
    owners = {name: overridden_by(trainer, name, ours) for name in _ON_THE_WAY}
    unknown = {each.part for each in upstream.mismatches()}
    walk = Walk(
        model,
        every_time=upstream.MODULE_WALK in unknown or overrides_train(model) is not None,
        optimizer_train=_optimizer_train(trainer.optimizer),
    )
    events = Events(trainer, by_stock=upstream.EVENTS in unknown, after_foreign=walk.look_again)
    fallen = _fallen_back(trainer, walk, events, owners)
    parts = {each.part for each in fallen}
    micro_step = micro_step_of(trainer, walk, owners.__getitem__)
    is_own_step = owners["training_step"] is not None or trainer.lean_options.shrink_on_out_of_memory
    is_own_clip = owners["_clip_grad_norm"] is not None or owners["_get_grad_norm"] is not None
    is_own_log = owners["_maybe_log_save_evaluate"] is not None
    return Plan(
        decided_for=_watched(trainer),
        walk=walk,
        events=events,
        callbacks=list(events.callbacks),
        window=_window_of(trainer, owners),
        empty_window_ends=owners["get_batch_samples"] is None,
        micro_step=micro_step,
        training_step=trainer.training_step if is_own_step else micro_step,
        copies_loss=owners["training_step"] is not None,
        without_sync=_without_sync(trainer, model),
        flops=_flops_of(trainer, owners["floating_point_ops"]),
        track_tokens=_tokens_of(trainer, owners["_track_num_input_tokens"]),
        clip=clip_of(trainer, walk, by_stock=is_own_clip or upstream.CLIP in parts, overridden=is_own_clip),
        step=optimizer_step_of(trainer, by_stock=upstream.OPTIMIZER_STEP in parts),
        was_skipped=_was_skipped(trainer, upstream.OPTIMIZER_STEP in parts),
        steps_scheduler=not isinstance(trainer.lr_scheduler, (torch.optim.lr_scheduler.ReduceLROnPlateau, GreedyLR)),
        zero_grad=model.zero_grad if upstream.ZERO_GRAD in parts else walk.zero_grad,
        always_reports=is_own_log or owners["_get_learning_rate"] is not None,
        own_log=overridden_by(trainer, "log", ours) is not None,
        always_calls_log=is_own_log,
        lean=tuple(part for part in (*_ON_THE_WAY, *upstream.TESTED_FUNCTIONS) if part != LOOP and part not in parts),
        fallen_back=fallen,
    )


def _fallen_back(trainer: Any, walk: Walk, events: Events, owners: dict[str, str | None]) -> tuple[FallBack, ...]:
    """Every part that is left to the library or to the user, once."""
    model, train = walk.model, overrides_train(walk.model)
    own_zero_grad = type(model).zero_grad is not nn.Module.zero_grad or "zero_grad" in vars(model)
    findings = (
        (upstream.MODULE_WALK, None if train is None else f"{train} has a `train` of its own"),
        (upstream.CLIP, one_kernel_takes_all(walk.parameters) or clips_unexpectedly(trainer.accelerator)),
        (upstream.OPTIMIZER_STEP, wraps_unexpectedly(trainer.optimizer)),
        (upstream.ZERO_GRAD, f"{type(model).__qualname__} has its own" if own_zero_grad else None),
    )
    unknown = tuple(each for each in upstream.mismatches() if each.part != LOOP)
    parts = {each.part for each in unknown}
    return (
        *(FallBack(part=name, reason=f"overridden by {owner}") for name, owner in owners.items() if owner),
        *unknown,
        *(each for each in events.fallen_back() if each.part not in parts),
        *(FallBack(part=part, reason=reason) for part, reason in findings if reason is not None and part not in parts),
    )


def _optimizer_train(optimizer: Any) -> Callable[[], Any] | None:
    """`optimizer.train` where it does something: accelerate's wrapper has one that passes on to the optimizer's."""
    inner = optimizer.optimizer if type(optimizer) is AcceleratedOptimizer else optimizer
    has_modes = callable(getattr(inner, "train", None))
    if not has_modes and type(optimizer) is AcceleratedOptimizer:
        has_modes = callable(getattr(getattr(inner, "optimizer", None), "train", None))
    return optimizer.train if has_modes else None


def _window_of(trainer: Any, owners: dict[str, str | None]) -> Callable[[Iterator[Any], int], tuple[list[Any], Any]]:
    device = trainer.args.device
    if owners["get_batch_samples"] is not None:
        return lambda batches, size: trainer.get_batch_samples(batches, size, device)
    if owners["_get_num_items_in_batch"] is not None:
        count = functools.partial(_count_by_the_user, trainer, device)
    elif trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None:
        count = _label_count_of(trainer, device)
    else:
        count = _count_nothing

    def window(batches: Iterator[Any], size: int) -> tuple[list[Any], Any]:
        taken = list(itertools.islice(batches, size))
        return taken, count(taken)

    return window


def _count_by_the_user(trainer: Any, device: torch.device, batches: list[Any]) -> Any:
    return trainer._get_num_items_in_batch(batches, device)


def _count_nothing(batches: list[Any]) -> None:
    return None


def _label_count_of(trainer: Any, device: torch.device) -> Callable[[list[Any]], Any]:
    """micro-batches -> how many labels they have that are not ignored, float32[] on `device`, over all processes where
    tokens are averaged over them; None for batches without tensors as labels."""
    shifts = trainer._loss_shifts_labels
    averages = trainer.args.average_tokens_across_devices and trainer.args.world_size > 1
    replicas = trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size()
    on = without_cpu_index(device)
    checks_shapes = averages and PartialState().debug  # accelerate's debug mode compares the processes first

    def count(batches: list[Any]) -> Any:
        if not batches or "labels" not in batches[0]:
            return None
        try:
            total = _counted(batches, shifts)
        except (TypeError, AttributeError):
            return None
        if checks_shapes:
            total = trainer.accelerator.gather(total.to(on)).sum()
        elif averages:
            total = total.to(on)
            torch.distributed.all_reduce(total)
        return total.to(on) / replicas if torch.is_tensor(total) else total

    return count


def _counted(batches: list[Any], shifts: bool) -> Any:
    labels = [
        batch["shift_labels"] if "shift_labels" in batch else batch["labels"][..., 1:] if shifts else batch["labels"]
        for batch in batches
    ]
    total = labels[0].ne(-100).sum()
    for each in labels[1:]:
        total = total + each.ne(-100).sum()
    return total


def _without_sync(trainer: Any, model: nn.Module) -> Callable[[], AbstractContextManager[Any]] | None:
    accelerator = trainer.accelerator
    if accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False):
        return None
    if isinstance(model, DistributedDataParallel) and not accelerator.is_fsdp2:
        return model.no_sync
    if accelerator.is_fsdp2 or (accelerator.use_distributed and hasattr(model, "no_sync")):
        return functools.partial(accelerator.no_sync, model=model)
    return None


def _flops_of(trainer: Any, owner: str | None) -> Callable[[Any], float]:
    """batch -> floating point operations of its micro-step, as `floating_point_ops` estimates them."""
    if owner is not None:
        return lambda batch: float(trainer.floating_point_ops(batch))
    model = trainer.model
    name = getattr(model, "main_input_name", "input_ids")
    if not hasattr(model, "num_parameters"):
        return lambda batch: 0.0
    for_each_input = 6 * model.num_parameters(exclude_embeddings=True)
    return lambda batch: float(for_each_input * batch[name].numel()) if name in batch else 0.0


def _tokens_of(trainer: Any, owner: str | None) -> Callable[[Any], None] | None:
    is_off = owner is None and trainer.args.include_num_input_tokens_seen == "no"
    return None if is_off else trainer._track_num_input_tokens


def _was_skipped(trainer: Any, by_stock: bool) -> Callable[[], bool] | None:
    accelerator = trainer.accelerator
    scaled = any(getattr(each, "scaler", None) is not None for each in accelerator._optimizers)
    return (lambda: accelerator.optimizer_step_was_skipped) if scaled or by_stock else None
