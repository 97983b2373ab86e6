"""What a run left in its output folder: (name, content) of every file, in a form that a journal can take."""

import dataclasses
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import TrainingArguments

__all__ = ["files"]

PICKLED = (".pt", ".pth", ".bin")


def files(folder: Path) -> Iterator[tuple[str, Any]]:
    """Every file below `folder` by name; tensors as tensors, settings as mappings, the rest as text."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        yield path.relative_to(folder).as_posix(), content(path)


def content(path: Path) -> Any:
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as opened:
            return {"metadata": opened.metadata(), **{name: opened.get_tensor(name) for name in opened.keys()}}  # noqa: SIM118
    if path.suffix in PICKLED:
        return plain(torch.load(path, weights_only=False))
    if path.suffix == ".json":
        return json.loads(path.read_text(encoding="utf-8"))
    if path.name == ".metadata":
        # Of a sharded checkpoint; the storage's own part holds an id drawn for each save.
        return repr(dataclasses.replace(pickle.loads(path.read_bytes()), storage_meta=None))
    if path.suffix == ".distcp":
        return path.read_bytes()
    return path.read_text(encoding="utf-8")


def plain(value: Any) -> Any:
    return value.to_dict() if isinstance(value, TrainingArguments) else value
