"""A run's state as a text and a list of byte tensors, and back: what a late joiner downloads, without pickle.

The text is JSON: it can build numbers, strings, lists and dictionaries and nothing else, so a peer that lies can hand over
wrong numbers, but no code. Tensors travel as bytes, so every dtype does, to the bit. Packing costs one copy of parameters,
buffers and optimizer state in host memory (three times the parameters for Adam), made only when somebody asks.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bareloop.swarm.engine import TrainingState

__all__ = ["fingerprint", "pack", "schema", "unpack"]


def pack(state: TrainingState) -> tuple[str, list[Tensor]]:
    """`state` as JSON and the tensors it refers to, each copied to the host as uint8[bytes].

    Raises:
        ValueError: something in a state_dict is neither a number, a string, a tensor, nor a list or dictionary of those.
    """
    tensors: list[Tensor] = []
    seen: dict[tuple[Any, ...], dict[str, Any]] = {}
    parts = {
        "model": _bare(state.model).state_dict(),
        "optimizer": state.optimizer.state_dict(),
        "scheduler": None if state.scheduler is None else state.scheduler.state_dict(),
    }
    layout = {name: _written(part, name, tensors, seen) for name, part in parts.items()}
    return json.dumps(layout), tensors


def unpack(state: TrainingState, text: str, tensors: Sequence[Tensor]) -> None:
    """Loads what `pack` returned into `state`, in place.

    Raises:
        ValueError: it does not fit: another model, optimizer or scheduler, or not made by `pack`. `state` may then hold a part.
    """
    try:
        layout = json.loads(text)
        parts = {name: _read(layout[name], tensors) for name in ("model", "optimizer", "scheduler")}
        if (parts["scheduler"] is None) != (state.scheduler is None):
            raise ValueError("one peer has a scheduler and the other has none")
        _bare(state.model).load_state_dict(parts["model"])
        state.optimizer.load_state_dict(parts["optimizer"])
        if state.scheduler is not None:
            state.scheduler.load_state_dict(parts["scheduler"])
    except (LookupError, TypeError, AttributeError, RuntimeError, ValueError) as error:
        raise ValueError(f"the state of another peer does not fit this one's: {error}") from error


def schema(model: nn.Module) -> str:
    """Names the shapes and dtypes of the model's state: equal for equal models."""
    described = [
        (name, str(t.dtype), tuple(t.shape)) for name, t in _bare(model).state_dict().items() if isinstance(t, Tensor)
    ]
    return hashlib.blake2b(repr(described).encode(), digest_size=8).hexdigest()


def fingerprint(model: nn.Module) -> str:
    """Names the values of the model's parameters: equal where they are equal to the bit. About 1 s for each GB."""
    digest = hashlib.blake2b(digest_size=8)
    for parameter in _bare(model).parameters():
        digest.update(_bytes(parameter).numpy().data)
    return digest.hexdigest()


def _bare(model: nn.Module) -> nn.Module:
    """The module under DistributedDataParallel and torch.compile, whose names are the same for all peers."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def _bytes(tensor: Tensor) -> Tensor:
    """The values of `tensor` in host memory as uint8[bytes], in the order of its indices."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _written(value: Any, where: str, tensors: list[Tensor], seen: dict[tuple[Any, ...], dict[str, Any]]) -> Any:
    """`value` as JSON; tensors go to `tensors`, each memory once (tied weights)."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        key = (value.data_ptr(), value.dtype, value.device, value.shape, value.stride())
        if key not in seen or not value.numel():
            seen[key] = {"tensor": len(tensors), "dtype": str(value.dtype)[6:], "shape": list(value.shape)}
            if value.numel():
                tensors.append(_bytes(value).clone())
        return seen[key]
    if isinstance(value, dict):
        kind = "counter" if isinstance(value, Counter) else "dict"
        for key in value:
            if not isinstance(key, (bool, int, float, str)):
                raise ValueError(f"{where} has the key {key!r}, which can't be sent to peers: use strings or numbers")
        return {kind: [[k, _written(v, f"{where}[{k!r}]", tensors, seen)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_written(item, f"{where}[{i}]", tensors, seen) for i, item in enumerate(value)]}
    raise ValueError(
        f"{where} holds a {type(value).__name__}, which can't be sent to peers: a state_dict may hold numbers, strings,"
        " tensors, lists and dictionaries"
    )


def _read(value: Any, tensors: Sequence[Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        dtype, shape = getattr(torch, value["dtype"]), value["shape"]
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{value['dtype']} is no dtype")
        if 0 in shape:
            return torch.empty(shape, dtype=dtype)
        return tensors[value["tensor"]].view(dtype).reshape(shape)
    ((kind, items),) = value.items()
    if kind in ("dict", "counter"):
        pairs = {key: _read(item, tensors) for key, item in items}
        return Counter(pairs) if kind == "counter" else pairs
    if kind not in ("list", "tuple"):
        raise ValueError(f"{kind!r} is nothing that was packed")
    read = [_read(item, tensors) for item in items]
    return tuple(read) if kind == "tuple" else read
