"""Extra losses, logged by returning them.

The stock Trainer logs one number, `loss`. People who train on a sum of losses override `compute_loss` and call
`.item()` on each part: one wait for the device per part and micro-step. Here the parts stay on the device, one
addition each, and are read once per log, where the stock loop reads the loss anyway.

With `LeanOptions(log_extra_losses=("kl", "aux_loss"))` each name is looked up in what the model returns, or, where
`compute_loss` is overridden, in the mapping it returns beside the loss: `return loss, {"kl": kl, "aux_loss": aux}`.

Each is to be a mean over its micro-batch, and the log has the mean over micro-steps. A part that is already divided by
`num_items_in_batch`, as the loss of most language models is, adds up over the window instead: multiply it by
`trainer.current_gradient_accumulation_steps` to see it on the scale of the logged loss.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers
from accelerate.utils import gather_object
from torch import Tensor

__all__ = [
    "attach",
    "compute_loss",
    "hidden_in_evaluation",
    "log",
    "recorded",
    "refuse_extra_losses",
    "refuse_names",
    "restore",
    "weigh",
]

STOCK_KEYS = frozenset(
    {"loss", "grad_norm", "learning_rate", "epoch", "step", "total_flos", "num_input_tokens_seen", "logits", "labels"}
)
"""Keys of a stock log line; and of a stock output that is not a loss."""

STOCK_PREFIXES = ("train_", "eval_", "test_")
"""Reporters rewrite keys by these prefixes, so a name that has one would be filed with the evaluation."""

Recorded = Mapping[str, tuple[Tensor, float]]
"""By name: the weighted sum since the last log (0-d, float32, on the device) and the sum of the weights."""


@dataclass(kw_only=True, slots=True)
class Ledger:
    """The extra losses since the last log of one call of `train()`."""

    run: object
    """The `TrainerState` it belongs to: each call of `train()` has its own."""

    weight: float = 1.0
    """Of the next micro-step; below 1 for a piece of a micro-batch that was split (`memory.py`)."""

    sums: dict[str, tuple[Tensor, float]] = field(default_factory=dict)


def refuse_names(names: Sequence[str]) -> None:
    """Refuse names that the stock log uses, and anything that is not a tuple of names.

    Raises:
        ValueError: naming the entry.
    """
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"log_extra_losses={names!r}: give a tuple of names of outputs, as in ('kl', 'aux_loss')")
    if len(set(names)) != len(names):
        raise ValueError(f"log_extra_losses={names!r}: a name is there twice")
    for name in names:
        _refuse_name(name)


def attach(trainer: Any) -> None:
    """Let this trainer log extra losses, if its options say so; at the end of its construction.

    Its `compute_loss` and `log` are wrapped on the object, outside of any override: an override may be what returns
    the losses, and its `log` is to see them.

    Raises:
        ValueError: the model returns one loss per device, so its extra losses are vectors.
    """
    refuse_extra_losses(trainer)
    if trainer.lean_options.log_extra_losses:
        trainer.compute_loss = partial(compute_loss, trainer, trainer.compute_loss)
        trainer.log = partial(log, trainer, trainer.log)


def refuse_extra_losses(trainer: Any) -> None:
    """See `attach`."""
    names, devices = trainer.lean_options.log_extra_losses, trainer.args.n_gpu
    if names and devices > 1:
        raise ValueError(f"log_extra_losses={names}: DataParallel on {devices} devices; launch one process per device")


def compute_loss(
    trainer: Any,
    stock: Callable[..., Any],
    model: torch.nn.Module,
    inputs: dict[str, Any],
    return_outputs: bool = False,
    num_items_in_batch: Tensor | int | None = None,
) -> Any:
    """What `stock` returns, less the extra losses, which are recorded when the model trains.

    The stock `compute_loss` is asked for the outputs too: it holds them anyway. An overridden one is called as the
    Trainer calls it, because asking for outputs may cost it a second forward (TRL's SFTTrainer).

    Raises:
        ValueError: a name of `log_extra_losses` was not returned, is not a 0-d tensor, or is one of the stock log's.
    """
    if return_outputs:
        return stock(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
    returned = stock(model, inputs, return_outputs=not _overridden(trainer), num_items_in_batch=num_items_in_batch)
    if not isinstance(returned, tuple):
        raise ValueError(
            f"log_extra_losses={trainer.lean_options.log_extra_losses}: compute_loss of {type(trainer).__name__} "
            "returned the loss alone; return (loss, {name: value, ...}) or take the option away"
        )
    loss, outputs = returned
    if trainer.model.training:
        _record(_ledger(trainer), _extra(outputs, trainer.lean_options.log_extra_losses))
    return loss


def log(trainer: Any, stock: Callable[..., None], logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
    """Call `stock` with the means of the extra losses added to a training log; other logs pass unchanged.

    A mean is over the micro-steps since the last log, on all processes, in which that loss was returned.
    """
    if "loss" in logs and "learning_rate" in logs:
        ledger = _ledger(trainer)
        logs = {**logs, **_means(ledger.sums, trainer.args.world_size)}
        ledger.sums = {}
    stock(logs, *args, **kwargs)


def hidden_in_evaluation(trainer: Any, ignore_keys: list[str] | None) -> list[str]:
    """The outputs that evaluation must not take for predictions: what it ignores by default, and the extra losses."""
    if ignore_keys is None:
        ignore_keys = getattr(getattr(trainer.model, "config", None), "keys_to_ignore_at_inference", None)
    return [*(ignore_keys or ()), *trainer.lean_options.log_extra_losses]


def recorded(trainer: Any) -> Recorded:
    """What is recorded now; given to `restore` it undoes the micro-steps since."""
    return _ledger(trainer).sums


def restore(trainer: Any, before: Recorded) -> None:
    """Forget what was recorded after `before` was taken: the micro-step failed and is done again."""
    _ledger(trainer).sums = dict(before)


def weigh(trainer: Any, weight: float) -> None:
    """Let the next micro-steps count `weight` each; 1 is a whole micro-batch."""
    _ledger(trainer).weight = weight


def _overridden(trainer: Any) -> bool:
    owners = (cls for cls in type(trainer).__mro__ if "compute_loss" in vars(cls))
    return next(cls for cls in owners if not cls.__module__.startswith("bareloop.")) is not transformers.Trainer


def _ledger(trainer: Any) -> Ledger:
    ledger: Ledger | None = trainer.__dict__.get("_extra_losses")
    if ledger is None or ledger.run is not trainer.state:
        ledger = trainer._extra_losses = Ledger(run=trainer.state)
    return ledger


def _record(ledger: Ledger, extra: Mapping[str, Any]) -> None:
    # A new dict and new tensors each time, so that `recorded` is a snapshot without a copy.
    sums = dict(ledger.sums)
    for name, value in extra.items():
        if name not in sums:
            _refuse_name(name)
        if not isinstance(value, Tensor) or value.ndim:
            shape = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"log_extra_losses: {name!r} must be a 0-d tensor, got {shape}; return its mean")
        value = value.detach().float()
        if ledger.weight != 1.0:
            value = value * ledger.weight
        total, weight = sums.get(name, (None, 0.0))
        sums[name] = (value if total is None else total + value, weight + ledger.weight)
    ledger.sums = sums


def _extra(outputs: Any, names: Sequence[str]) -> dict[str, Any]:
    """The named outputs by the name they are logged under; a mapping is taken apart into its entries."""
    if not isinstance(outputs, Mapping):
        raise ValueError(
            f"log_extra_losses={names}: the outputs are a {type(outputs).__name__} without names; "
            "let the model return a mapping (return_dict=True)"
        )
    extra: dict[str, Any] = {}
    for name in names:
        value = outputs.get(name)
        if value is None:
            raise ValueError(
                f"log_extra_losses={names}: there is no {name!r} in the outputs, only {', '.join(map(str, outputs))}; "
                "return it or take the name away"
            )
        for key, entry in (value if isinstance(value, Mapping) else {name: value}).items():
            if key in extra:
                raise ValueError(f"log_extra_losses={names}: the outputs name the loss {key!r} twice; rename one")
            extra[key] = entry
    return extra


def _means(sums: Recorded, world_size: int) -> dict[str, float]:
    if not sums and world_size == 1:
        return {}
    values = torch.stack([total for total, _ in sums.values()]).tolist() if sums else []
    here = {name: (value, weight) for value, (name, (_, weight)) in zip(values, sums.items(), strict=True)}
    # Objects, not a reduction: processes may have returned different losses, and this is once per log.
    everywhere = gather_object([here]) if world_size > 1 else [here]
    names = dict.fromkeys(name for process in everywhere for name in process)
    return {name: _mean([process[name] for process in everywhere if name in process]) for name in names}


def _mean(parts: list[tuple[float, float]]) -> float:
    return sum(value for value, _ in parts) / sum(weight for _, weight in parts)


def _refuse_name(name: str) -> None:
    if name in STOCK_KEYS or name.startswith(STOCK_PREFIXES):
        raise ValueError(f"log_extra_losses: {name!r} is a name of the stock log; return the loss under another name")
