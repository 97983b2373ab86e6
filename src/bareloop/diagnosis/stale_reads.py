"""Host reads at given lines answered with the value they gave last time, so that none of them waits for a device.

What is saved is the wait and the read; what a script does with the number goes on, with an old number. Every
`_REFRESH`th read of a line is a real one: a loop that waits for a value to change then still ends.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from bareloop.diagnosis.call_sites import CallSites
from bareloop.diagnosis.substitution import replaced

__all__ = ["stale_reads"]

_READS = ("item", "tolist", "__float__", "__int__", "__bool__", "__index__", "cpu")
_REFRESH = 64

_REMEMBERED: dict[tuple[Any, ...], list[Any]] = {}
"""(instruction, method, dtype, shape) -> [value, reads left before a real one]. Kept from turn to turn."""


@contextmanager
def stale_reads(sites: Iterable[tuple[str, int]]) -> Iterator[None]:
    """Inside, `item`, `float()`, `bool()`, `tolist` and `cpu` of a tensor return an old value at `sites`.

    A site is (file, line).
    """
    import torch

    lines = CallSites(sites)
    changes = [(torch.Tensor, name, _stale(getattr(torch.Tensor, name), name, lines)) for name in _READS]
    with replaced(changes):
        yield


def _stale(original: Callable[..., Any], name: str, lines: CallSites) -> Callable[..., Any]:
    shaped = name in ("tolist", "cpu")

    def read(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        place = lines.find(sys._getframe(1))
        if place is None or (name == "cpu" and tensor.device.type == "cpu"):
            return original(tensor, *args, **kwargs)
        key = (place, name, tensor.dtype, tensor.shape if shaped else None)
        kept = _REMEMBERED.get(key)
        if kept is None or kept[1] == 0:
            _REMEMBERED[key] = [original(tensor, *args, **kwargs), _REFRESH - 1]
            return _REMEMBERED[key][0]
        kept[1] -= 1
        return kept[0]

    return read
