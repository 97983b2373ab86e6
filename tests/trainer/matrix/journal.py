"""A run as lines of text, one per fact, in the order in which things happened: two runs are equal when their lines are.

Floats are written by their bits and tensors by the digest of theirs, so that nothing is rounded on the way. Only
wall-clock figures and the run's own folder are masked.
"""

import dataclasses
import enum
import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = ["Journal", "first_difference", "lines"]

CLOCK = re.compile(r"(_runtime|_per_second|_preparation_time|^step_time)$|_mem_(cpu|gpu)(_|$)")
"""Keys whose values are times or sizes of the process: they must be there on both sides, their values may differ."""

SHOWN = 4
"""Tensors of at most so many elements are written out beside their digest."""


class Journal:
    """The facts of one run, as they come.

    Args:
        folder: the run's output folder, masked wherever it turns up.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.written: list[str] = []

    def add(self, fact: str, value: Any = None) -> None:
        """Writes `value` under the name `fact`, one line per leaf."""
        self.written.extend(f"{path} = {leaf}".replace(self.folder, "<folder>") for path, leaf in lines(value, fact))


def lines(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """(path, leaf) of every leaf of a nested value; order, types and bits count.

    Raises:
        TypeError: a value that this function would have to compare by its address.
    """
    if isinstance(value, Mapping):
        yield path, f"{type(value).__name__} of {list(value)}"
        for key, item in value.items():
            masked = isinstance(key, str) and CLOCK.search(key)
            yield from [(f"{path}.{key}", "<clock>")] if masked else lines(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        yield path, f"{type(value).__name__} of {len(value)}"
        for index, item in enumerate(value):
            yield from lines(item, f"{path}[{index}]")
    elif isinstance(value, (set, frozenset)):
        yield from lines(sorted(value, key=repr), path)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from lines({field.name: getattr(value, field.name) for field in dataclasses.fields(value)}, path)
    else:
        yield path, leaf(value)


def leaf(value: Any) -> str:
    """Text that is equal for two values exactly when their types and bits are."""
    if isinstance(value, torch.Tensor):
        return tensor_leaf(value)
    if isinstance(value, np.ndarray):
        return f"array {value.dtype} {value.shape} {digest(np.ascontiguousarray(value).tobytes())}"
    if isinstance(value, (float, np.floating)):
        return f"{type(value).__name__} {value!r} {float(value).hex()}"
    if value is None or isinstance(value, (bool, int, str, bytes, enum.Enum, np.generic, torch.dtype, torch.device)):
        return f"{type(value).__name__} {value!r}"
    raise TypeError(f"value={value!r}: no leaf of a journal; turn it into numbers, text or tensors first")


def tensor_leaf(tensor: torch.Tensor) -> str:
    """Kind, dtype, shape and digest; the elements too where they are few."""
    local = tensor.detach()
    if hasattr(local, "to_local"):
        local = local.to_local()  # type: ignore[operator]
    flat = local.cpu().contiguous().reshape(-1)
    values = f" {flat.tolist()}" if flat.numel() <= SHOWN else ""
    return f"{str(tensor.dtype)[6:]} {list(tensor.shape)} {digest(flat.view(torch.uint8).numpy().tobytes())}{values}"


def digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()[:16]


def first_difference(expected: list[str], found: list[str], context: int = 3) -> str | None:
    """The first lines that differ, with the `context` equal ones before them; None when there is no difference."""
    for index, (left, right) in enumerate(itertools.zip_longest(expected, found, fillvalue="<nothing more>")):
        if left != right:
            before = "".join(f"  both:  {line}\n" for line in expected[max(0, index - context) : index])
            return f"{before}  stock: {left}\n  lean:  {right}"
    return None
