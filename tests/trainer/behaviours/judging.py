"""`judge`: a behaviour on a class of trainers, with what each trainer it built left behind, for comparing classes."""

import contextlib
import gc
import hashlib
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from bareloop.trainer.report import LOOP, FallBack
from behaviours.behaviour import Behaviour

__all__ = ["Outcome", "Run", "judge"]

CLOCK_KEYS = ("runtime", "per_second", "preparation_time", "_mem_")
"""Parts of the names of logged values that depend on the machine."""

STATE = (
    "epoch",
    "global_step",
    "max_steps",
    "num_train_epochs",
    "total_flos",
    "num_input_tokens_seen",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
    "train_batch_size",
)
"""Fields of the trainer's state that two classes must agree on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What one trainer left behind, in a form that is equal exactly when the bits are."""

    history: tuple[str, ...]
    """The log history, one entry each, without wall-clock values."""

    state: str
    weights: str
    """Digest of all parameters and buffers."""

    optimizer: str | None
    """Digest of the optimizer's state; None where there was none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of one behaviour on one class."""

    failure: str | None
    """Traceback where the behaviour does not hold."""

    runs: tuple[Run, ...]
    """One for each trainer that was built, in order."""

    files: tuple[str, ...]
    """All files in the check's folder, relative to it."""

    warned: tuple[str, ...]
    """Python warnings, sorted, each once."""

    fallbacks: tuple[str, ...]
    """Reasons for which trainers that trained ran the stock loop; empty for the stock class."""

    stock_parts: tuple[str, ...]
    """Parts of the lean loop that ran the stock way, because the user has overridden them for example."""

    lean_runs: int
    """Trainers that trained with the lean loop."""


def judge(behaviour: Behaviour, trainer_class: type[Any]) -> Outcome:
    """Run the check of `behaviour` on `trainer_class` in a folder of its own, seeded."""
    built: list[Any] = []
    failure = None
    with _alone() as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            behaviour.check(_watched(trainer_class, built))
        except Exception:  # whatever breaks a check is the verdict on the class, and is reported with its traceback
            failure = traceback.format_exc()
        files = tuple(sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()))
    trained = [trainer for trainer in built if getattr(trainer, "_total_loss_scalar", None) is not None]
    reasons = [reason for trainer in trained for reason in _fallbacks(trainer)]
    parts = {each.part for trainer in trained for each in _report(trainer)}
    return Outcome(
        failure=failure,
        runs=tuple(_run(trainer) for trainer in built if hasattr(trainer, "state")),
        files=files,
        warned=tuple(sorted({str(warning.message) for warning in caught})),
        fallbacks=tuple(dict.fromkeys(reasons)),
        stock_parts=tuple(sorted(parts - {LOOP})),
        lean_runs=sum(hasattr(trainer, "lean_report") and not _fallbacks(trainer) for trainer in trained),
    )


@contextlib.contextmanager
def _alone() -> Iterator[Path]:
    """An empty current folder, fixed seeds, and no memory of messages that were given once already.

    The trainer collects garbage at the start of each training, which takes 0.1 s with the library's modules loaded:
    ten times as long as a check trains. What is there before the check is kept out of that.
    """
    gc.freeze()
    transformers.utils.logging.warning_once.cache_clear()
    transformers.set_seed(0)
    verbosity = transformers.utils.logging.get_verbosity()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        try:
            yield Path(folder)
        finally:
            transformers.utils.logging.set_verbosity(verbosity)
            gc.unfreeze()


def _watched(trainer_class: type[Any], built: list[Any]) -> type[Any]:
    """A subclass that changes nothing and puts each trainer into `built`."""

    def __init__(self: Any, *args: Any, **settings: Any) -> None:
        built.append(self)
        trainer_class.__init__(self, *args, **settings)

    return type(
        trainer_class.__name__, (trainer_class,), {"__init__": __init__, "__module__": trainer_class.__module__}
    )


def _fallbacks(trainer: Any) -> tuple[str, ...]:
    """Why this trainer ran the stock loop, as its report has it; empty where it ran lean, and for stock trainers."""
    return tuple(each.reason for each in _report(trainer) if each.part == LOOP)


def _report(trainer: Any) -> tuple[FallBack, ...]:
    report = getattr(trainer, "lean_report", None)
    return () if report is None else report.fallen_back


def _run(trainer: Any) -> Run:
    optimizer = getattr(trainer, "optimizer", None)
    return Run(
        history=tuple(
            repr({key: value for key, value in entry.items() if not any(part in key for part in CLOCK_KEYS)})
            for entry in trainer.state.log_history
        ),
        state=repr({name: getattr(trainer.state, name) for name in STATE}),
        weights=_digest(trainer.model.state_dict()),
        optimizer=None if optimizer is None else _digest(optimizer.state_dict()),
    )


def _digest(tree: Any) -> str:
    """Hexadecimal digest of nested containers of tensors and plain values."""
    digest = hashlib.sha256()

    def feed(node: Any) -> None:
        if isinstance(node, torch.Tensor):
            digest.update(f"{node.dtype}{tuple(node.shape)}".encode())
            digest.update(node.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(node, dict):
            for key, value in node.items():
                digest.update(repr(key).encode())
                feed(value)
        elif isinstance(node, list | tuple):
            for value in node:
                feed(value)
        else:
            digest.update(repr(node).encode())

    feed(tree)
    return digest.hexdigest()
