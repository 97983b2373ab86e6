"""What an operator reads into Python and what it copies, from its name, arguments and result."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["COPIES", "READS", "Transfer", "copies_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """One copy of a tensor."""

    direction: str
    """"host to device", "device to host", "device to device" or "cast"."""
    bytes: int
    """Size of the destination."""
    waits: bool
    """The host waits for it: from a device to the host, and not asked to be non_blocking."""
    source_device: str


def _first(args: Sequence[Any], kwargs: dict[str, Any]) -> "torch.Tensor | None":
    return args[0]


def _by_mask(args: Sequence[Any], kwargs: dict[str, Any]) -> "torch.Tensor | None":
    """x[mask]: the number of True entries is read to size the result."""
    masks = _masks(args[1])
    return masks[0] if masks else None


def _put_by_mask(args: Sequence[Any], kwargs: dict[str, Any]) -> "torch.Tensor | None":
    """x[mask] = values: read, unless one mask and one value make it a masked_fill."""
    masks = _masks(args[1])
    if not masks:
        return None
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    given = [index for index in args[1] if index is not None]
    return None if len(given) == 1 and args[2].numel() == 1 and not accumulate else masks[0]


def _masks(indices: "Sequence[torch.Tensor | None]") -> "list[torch.Tensor]":
    import torch

    return [index for index in indices if index is not None and index.dtype in (torch.bool, torch.uint8)]


def _repeats(args: Sequence[Any], kwargs: dict[str, Any]) -> "torch.Tensor | None":
    return None if kwargs.get("output_size") is not None else args[0]


READS: dict[str, Callable[[Sequence[Any], dict[str, Any]], "torch.Tensor | None"]] = {
    "aten::_local_scalar_dense": _first,
    "aten::nonzero": _first,
    "aten::equal": _first,
    "aten::masked_select": _first,
    "aten::_unique": _first,
    "aten::_unique2": _first,
    "aten::unique_dim": _first,
    "aten::unique_dim_consecutive": _first,
    "aten::unique_consecutive": _first,
    "aten::bincount": _first,
    "aten::index.Tensor": _by_mask,
    "aten::index_put_": _put_by_mask,
    "aten::index_put": _put_by_mask,
    "aten::_index_put_impl_": _put_by_mask,
    "aten::repeat_interleave.Tensor": _repeats,
}
"""Operator (with its overload, where the overload decides) -> the tensor that the host reads, None when it does not."""


def _to_copy(args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> "Iterator[Transfer | None]":
    yield _transfer(args[0], result, bool(kwargs.get("non_blocking")))


def _copy(args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> "Iterator[Transfer | None]":
    yield _transfer(args[1], args[0], bool(args[2] if len(args) > 2 else kwargs.get("non_blocking")))


def _foreach_copy(args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> "Iterator[Transfer | None]":
    non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
    for destination, source in zip(args[0], args[1], strict=True):
        yield _transfer(source, destination, non_blocking)


def _constant(args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> "Iterator[Transfer | None]":
    # torch.tensor(data, device=...) copies out of the dispatcher's sight and then announces the result.
    if args[0].device.type not in ("cpu", "meta"):
        yield Transfer(direction="host to device", bytes=args[0].nbytes, waits=False, source_device="cpu")


COPIES: dict[str, Callable[[Sequence[Any], dict[str, Any], Any], "Iterator[Transfer | None]"]] = {
    "aten::_to_copy": _to_copy,
    "aten::copy_": _copy,
    "aten::_foreach_copy_": _foreach_copy,
    "aten::lift_fresh": _constant,
}


def copies_of(operator: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> list[Transfer]:
    """The copies between devices, and the casts on one device, that this call of an operator in `COPIES` made."""
    return [transfer for transfer in COPIES[operator](args, kwargs, result) if transfer is not None]


def _transfer(source: "torch.Tensor", destination: "torch.Tensor", non_blocking: bool) -> Transfer | None:
    origin, target = source.device, destination.device
    if "meta" in (origin.type, target.type):
        return None
    if origin == target:
        direction = "cast" if source.dtype != destination.dtype else None
    elif origin.type == "cpu":
        direction = "host to device"
    else:
        direction = "device to host" if target.type == "cpu" else "device to device"
    if direction is None:
        return None
    waits = direction == "device to host" and not non_blocking
    return Transfer(direction=direction, bytes=destination.nbytes, waits=waits, source_device=origin.type)
