"""Reading a checkpoint: one that is cut short, or of another model, is refused before anything is loaded from it.

The stock trainer finds out while it loads: it raises whatever the reader of the damaged file raises, with the model
already changed; names that the checkpoint lacks are a line in the log, and training goes on from random weights until
the optimizer's state does not fit. Here every file's table of contents is read first, which costs no more than opening
the files: the formats have their lengths there or, as zip files, at their end.
"""

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints

from bareloop.trainer.checkpoint_error import CheckpointError

__all__ = ["faults", "load_model", "load_optimizer"]

_STATE_FILE = "trainer_state.json"
_OPTIMIZER_FILES = ("optimizer.pt", "scheduler.pt")
_WEIGHTS_FILE = "model.safetensors"
_NAMES_SHOWN = 3


def load_model(trainer: Any, stock_load: Callable[..., None], folder: str, model: Any = None) -> None:
    """What `trainer._load_from_checkpoint(folder, model)` does, on a checkpoint that can be resumed from.

    Raises:
        CheckpointError: a file is cut short or missing, or the weights are those of another model. Nothing is loaded.
    """
    if not (trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled):
        found = faults(folder) if os.path.isdir(folder) else [f"there is no folder {folder}"]
        if found:
            raise _unfit(folder, "is not a whole checkpoint", found)
        differences = _other_model(Path(folder), trainer.model if model is None else model)
        if differences:
            raise _unfit(folder, "is a checkpoint of another model", differences)
    stock_load(folder, model)


def load_optimizer(trainer: Any, stock_load: Callable[[Any], None], folder: str | None) -> None:
    """What `trainer._load_optimizer_and_scheduler(folder)` does.

    Raises:
        CheckpointError: the optimizer's state is that of other parameters.
    """
    try:
        stock_load(folder)
    except (ValueError, KeyError) as error:
        if folder is None or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
            raise
        raise _unfit(folder, "does not fit this optimizer or scheduler", [str(error)]) from error


def faults(folder: str) -> list[str]:
    """What keeps the checkpoint in `folder` from being resumed from, a clause for each file; empty when it is whole."""
    found, names = [], sorted(os.listdir(folder))
    for name in names:
        fault = _fault(Path(folder, name))
        if fault is not None:
            found.append(f"{name} {fault}")
    if _STATE_FILE not in names:
        found.append(f"{_STATE_FILE} is missing (it is written last)")
    present = [name for name in _OPTIMIZER_FILES if name in names]
    if len(present) == 1:
        found.append(f"{present[0]} is there without the other of {' and '.join(_OPTIMIZER_FILES)}")
    return found


def _fault(path: Path) -> str | None:
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt"):
                return None
        if path.name.endswith(".index.json"):
            shards = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
            missing = sorted(shard for shard in shards if not path.with_name(shard).is_file())
            return f"names shards that are missing: {', '.join(missing)}" if missing else None
        if path.name == _STATE_FILE:
            return None if "global_step" in json.loads(path.read_text(encoding="utf-8")) else "has no global_step"
        if path.suffix in (".pt", ".pth", ".bin") and path.is_file():
            return None if zipfile.is_zipfile(path) or _is_old_pickle(path) else "is cut short (no end of its archive)"
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        return f"is cut short or damaged ({error})"
    return None


def _is_old_pickle(path: Path) -> bool:
    """Whether this is torch's format from before the zip files, in which a file that is cut short cannot be told."""
    with path.open("rb") as file:
        return file.read(2) == b"\x80\x02"


def _other_model(folder: Path, model: nn.Module) -> list[str]:
    """In what the weights in `folder` are not those of `model`; empty also where this cannot be told (adapters)."""
    path = folder / _WEIGHTS_FILE
    if not path.is_file() or hasattr(model, "peft_config"):
        return []
    with safe_open(path, framework="pt") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    differences = [
        f"{name} is {list(saved[name])} there and {list(shape)} here"
        for name, shape in own.items()
        if name in saved and saved[name] != shape
    ]
    missing = _missing(model, set(saved))
    # The stock trainer lets weights be missing where it has no optimizer's state, which would not fit.
    if missing and ((folder / _OPTIMIZER_FILES[0]).is_file() or not saved.keys() & own.keys()):
        differences.extend(f"{name} is not there" for name in missing)
    return differences


def _missing(model: nn.Module, saved: set[str]) -> list[str]:
    """Trainable parameters of `model` that are in `saved` under none of their names."""
    names: dict[nn.Parameter, list[str]] = {}
    saved = saved.union(getattr(model, "_keys_to_ignore_on_save", None) or ())
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(parameter, []).append(name)
    return [aliases[0] for aliases in names.values() if not saved.intersection(aliases)]


def _unfit(folder: str, what: str, why: list[str]) -> CheckpointError:
    reasons = "; ".join(why[:_NAMES_SHOWN]) + (
        f"; and {len(why) - _NAMES_SHOWN} more" if len(why) > _NAMES_SHOWN else ""
    )
    return CheckpointError(f"{folder} {what}: {reasons}. {_way_out(folder)}")


def _way_out(folder: str) -> str:
    path = Path(os.path.abspath(folder))
    if path.name.startswith(PREFIX_CHECKPOINT_DIR) and path.parent.is_dir():
        others = [other for other in sort_checkpoints(str(path.parent)) if Path(other) != path and not faults(other)]
        if others:
            return f"Whole beside it: {others[-1]}; give that as resume_from_checkpoint."
    return "Give another folder as resume_from_checkpoint, or none to start anew."
