"""A trainer as a peer of a swarm: `Trainer(..., swarm=swarm.join(...))`. What it takes for granted, and what it refuses.

A step is a round of the run: `max_steps` counts rounds, and so do checkpoints, logs, evaluations and the scheduler. A
peer that joins late or was left behind goes on at the round of the others (`state.global_step` jumps, the learning rate
with it), with its own data where that was. `gradient_accumulation_steps` is 1: the run's target batch says when a round
is whole. The epoch is in `swarm_epoch`; the stock loop never runs in its place.

A checkpoint has one file more, `swarm_state.json`, with the state of the peer and where its data was.
"""

import json
import logging
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, runtime_checkable

from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import SchedulerType
from transformers.optimization import GreedyLR
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from bareloop.trainer.division import Count
from bareloop.trainer.report import FallBack

__all__ = [
    "Part",
    "Peer",
    "Position",
    "attach",
    "finished",
    "follow",
    "log_entries",
    "refuse",
    "resumed",
    "save_state",
    "without_end",
]

logger = logging.getLogger("bareloop")

_FILE = "swarm_state.json"
_BY_METRIC = (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)
"""Kinds of schedulers that are stepped by what a peer's own evaluation gives; the classes are theirs."""
_CLASSES_BY_METRIC = (ReduceLROnPlateau, GreedyLR)


@runtime_checkable
class Peer(Protocol):
    """What a trainer asks of a swarm: an `Accumulator` of `steps` that knows the run. `bareloop.swarm.Swarm` is one."""

    @property
    def round(self) -> int:
        """Rounds that the run has finished."""
        ...

    @property
    def status(self) -> Any:
        """A record with `round_samples`, `peers`, `round_s` and `local_samples_per_s`."""
        ...

    def attach(self, model: Any, optimizer: Any, scheduler: Any = None) -> None:
        """Joins; a late peer has the state of the others when it returns."""
        ...

    def micro_batch(self, count: Count, *, reduction: str) -> AbstractContextManager[object]: ...
    def ready(self) -> bool: ...
    def averaged(self) -> AbstractContextManager[object]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Where a peer is in its own data."""

    epoch: int = 0
    trained: int = 0
    """Micro-batches of this epoch that were trained on."""


@dataclass(kw_only=True, slots=True)
class Part:
    """A trainer's part in a run."""

    weigh: Callable[[Any, Any], tuple[Any, Count, str]]
    """(batch, its counted labels or None) to (what the loss is to be divided by, weight of the micro-batch, reduction)."""
    position: Position = field(default_factory=Position)
    is_open: bool = False
    """on_step_begin was called for this round."""
    losses: list[Tensor] = field(default_factory=list)
    """Of the micro-batches of this round, each a mean[]."""
    weights: list[Count] = field(default_factory=list)
    rows: int = 0
    """Rows that this process trained on since `train()` began."""


def refuse(trainer: Any, why_stock: tuple[FallBack, ...], own_loop: str | None) -> None:
    """Refuse a swarm that cannot be honoured.

    Args:
        why_stock: why the stock loop would have to run.
        own_loop: the method of the loop that is overridden, and by whom.

    Raises:
        ValueError: naming the argument and the way out.
    """
    counts = trainer.lean_options.swarm_counts
    if trainer._swarm is None:
        if counts != "samples":
            raise ValueError(f"swarm_counts={counts!r} without a swarm: give Trainer(..., swarm=...), or leave it out")
        return
    if not isinstance(trainer._swarm, Peer):
        raise ValueError(f"swarm={trainer._swarm!r}: give it what bareloop.swarm.join() returns")
    if why_stock:
        reasons = "; ".join(each.reason for each in why_stock)
        raise ValueError(f"swarm= needs the lean loop, and here the stock loop would have to run: {reasons}")
    if own_loop is not None:
        raise ValueError(
            f"swarm= needs the lean loop, and {own_loop}: its rounds are not the swarm's; don't override it"
        )
    for applies, message in (*_of_the_arguments(trainer.args), *_of_the_trainer(trainer, counts)):
        if applies:
            raise ValueError(f"{message} (with swarm=)")


def _of_the_arguments(args: Any) -> tuple[tuple[bool, str], ...]:
    saves, evaluates = args.save_strategy, args.eval_strategy
    return (
        (
            args.gradient_accumulation_steps != 1,
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}: target_batch of swarm.join() says how many"
            " micro-batches make a step; set it to 1",
        ),
        (
            args.max_steps <= 0,
            f"max_steps={args.max_steps}: set it to the number of rounds; epochs do not give it, since the others' speed"
            " decides how many rounds there are in one",
        ),
        (args.fp16, "fp16=True: peers would add gradients of different scales; use bf16=True, or full precision"),
        (args.auto_find_batch_size, "auto_find_batch_size=True begins training anew in mid-run; set it to False"),
        (
            saves == SaveStrategy.EPOCH or (saves == SaveStrategy.BEST and evaluates == IntervalStrategy.EPOCH),
            f"save_strategy={saves.value!r} saves in the middle of a round; set it to 'steps', and eval_strategy too",
        ),
        (
            args.world_size > 1 and not args.accelerator_config.even_batches,
            "accelerator_config has even_batches=False: the ranks of a peer need batches of one size; set it to True",
        ),
    )


def _of_the_trainer(trainer: Any, counts: str) -> tuple[tuple[bool, str], ...]:
    args = trainer.args
    return (
        (
            args.lr_scheduler_type in _BY_METRIC or isinstance(trainer.lr_scheduler, _CLASSES_BY_METRIC),
            f"lr_scheduler_type={str(args.lr_scheduler_type.value)!r}: such a scheduler goes by this peer's own evaluation, and"
            " the peers' learning rates would differ; use one that goes by the step",
        ),
        (trainer.is_fsdp_enabled, "fsdp: a sharded model can't be accumulated in flat buffers; use DDP inside a peer"),
        (
            trainer.lean_options.shrink_on_out_of_memory,
            "shrink_on_out_of_memory=True: a part of a micro-batch's gradient can't be taken out of the sum again; set it to"
            " False",
        ),
        (
            counts == "labels" and not _counts_labels(trainer),
            "swarm_counts='labels': neither does this model take num_items_in_batch nor is there a compute_loss_func, so its"
            " loss can't be summed over labels; use 'samples'",
        ),
        (
            counts == "labels" and args.world_size > 1 and not args.average_tokens_across_devices,
            "swarm_counts='labels' with average_tokens_across_devices=False: the ranks of a peer would each count their own"
            " labels; set it to True",
        ),
    )


def _counts_labels(trainer: Any) -> bool:
    return bool(trainer.model_accepts_loss_kwargs) or trainer.compute_loss_func is not None


def attach(trainer: Any, model: Any, weigh: Callable[[Any, Any], tuple[Any, Count, str]]) -> None:
    """Joins the run, once model, optimizer and scheduler are those of training, and goes to its round.

    Args:
        model: what is trained, wrapped.
        weigh: see `Part`.

    Raises:
        as `bareloop.swarm.Swarm.attach`.
    """
    if trainer.lean_options.swarm_counts == "samples" and _counts_labels(trainer) and trainer.is_world_process_zero():
        logger.warning(
            "bareloop: the swarm counts rows, and weighs each micro-batch's mean loss by its rows. Where rows differ in"
            " their counted labels, LeanOptions(swarm_counts='labels') weighs as gradient accumulation in transformers"
            " does; target_batch is then a number of labels"
        )
    position = Position() if trainer._swarm_part is None else trainer._swarm_part.position
    trainer._swarm_part = Part(weigh=weigh, position=position)
    optimizer = trainer.optimizer
    if isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    trainer._swarm.attach(model, optimizer, trainer.lr_scheduler)
    trainer.state.global_step = trainer._swarm.round


def follow(trainer: Any, *, ahead: int = 0) -> None:
    """Goes to the round of the others, if they went on without this peer; what is logged is of this peer's own rounds.

    Args:
        ahead: rounds that the run has finished and the trainer has not counted yet.
    """
    state, part = trainer.state, trainer._swarm_part
    jump = trainer._swarm.round - ahead - state.global_step
    if jump:
        state.global_step += jump
        trainer._globalstep_last_logged += jump
        trainer._initial_global_step += jump
        part.losses.clear()
        part.weights.clear()
    if not ahead and state.global_step >= state.max_steps:
        trainer.control.should_training_stop = True


def finished(trainer: Any, stock: Callable[..., Any], trial: Any, planned_samples: int, start_time: float) -> Any:
    """What `trainer._finalize_training` returns, with the rows of this process for samples; leaves the run after it."""
    state, part = trainer.state, trainer._swarm_part
    rounds = state.global_step - trainer._initial_global_step
    # The stock method takes the share of the rounds that were made here.
    samples = part.rows * max(state.max_steps, 1) / rounds if rounds else 0
    output = stock(trial, samples, start_time)
    trainer._swarm.close()
    return output


def log_entries(trainer: Any) -> dict[str, float]:
    """What the log says of the round that ended last."""
    status = trainer._swarm.status
    return {
        "samples": status.round_samples,
        "peers": status.peers,
        "round_s": status.round_s,
        "local_samples_per_s": status.local_samples_per_s,
    }


def without_end(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """What `set_initial_training_values` returns, with as many epochs as the rounds take."""
    return (sys.maxsize, *values[1:])


def save_state(trainer: Any, folder: str) -> None:
    """Writes the state of the peer, and where its data is, into a checkpoint."""
    if trainer._swarm is None or not trainer.args.should_save or trainer.args.save_only_model:
        return
    state = {"peer": trainer._swarm.state_dict(), "position": asdict(trainer._swarm_part.position)}
    with open(os.path.join(folder, _FILE), "w", encoding="utf-8") as file:
        json.dump(state, file, indent=2)


def resumed(trainer: Any, folder: str | None, counted: tuple[int, int]) -> tuple[int, int]:
    """The epoch to go on with and its micro-batches trained on; tells the swarm the round of the checkpoint.

    Args:
        folder: the checkpoint, or None.
        counted: the same as counted by the stock trainer, or by `stateful_loader`.
    """
    trainer._swarm_part = None
    if folder is None:
        return counted
    path = os.path.join(folder, _FILE)
    peer: dict[str, Any] = {**trainer._swarm.state_dict(), "round": trainer.state.global_step}
    if os.path.isfile(path):
        with open(path, encoding="utf-8") as file:
            saved = json.load(file)
        peer = saved["peer"]
        if not trainer.lean_options.stateful_loader:
            counted = saved["position"]["epoch"], saved["position"]["trained"]
            if trainer.args.ignore_data_skip:
                counted = (counted[0] + 1, 0)
    trainer._swarm.load_state_dict(peer)
    return counted
