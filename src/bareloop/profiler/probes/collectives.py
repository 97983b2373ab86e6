"""Names and bytes of collective communication, read off the operators that issue it.

Every collective of torch.distributed, also one that C++ starts (DistributedDataParallel's reducer), passes the
dispatcher as an operator of one of two namespaces: `c10d` (in place) or `_c10d_functional` (traceable).
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["collective_name", "largest_side_bytes"]

# Longest name first where one contains another.
_NAMES = (
    ("reduce_scatter", "reduce_scatter"),
    ("allreduce", "all_reduce"),
    ("all_reduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("all_gather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("all_to_all", "all_to_all"),
    ("broadcast", "broadcast"),
    ("barrier", "barrier"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("reduce", "reduce"),
    ("send", "send"),
    ("recv", "recv"),
)
_NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")


def collective_name(namespace: str, operator: str) -> str | None:
    """The collective an operator is ("all_reduce", "broadcast", ...), None for every other operator.

    >>> collective_name("c10d", "_allgather_base_"), collective_name("aten", "gather")
    ('all_gather', None)
    """
    if namespace not in _NAMESPACES:
        return None
    return next((name for part, name in _NAMES if part in operator), None)


def largest_side_bytes(arguments: Iterable[Any]) -> int:
    """Bytes of the larger side of a collective in this process: of its inputs or of its outputs.

    The gathered output of an all_gather, the full input of a reduce_scatter, the buffer of an all_reduce or broadcast.
    """
    return max((sum(tensor.nbytes for tensor in _tensors(argument)) for argument in arguments), default=0)


def _tensors(argument: Any) -> "Iterator[torch.Tensor]":
    import torch

    if isinstance(argument, torch.Tensor):
        yield argument
    elif isinstance(argument, (list, tuple)):
        for item in argument:
            yield from _tensors(item)
