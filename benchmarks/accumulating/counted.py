"""What one micro-step does: operators, bytes that they move, host reads, Python calls, and memory that gradients take.

Operators are counted by a dispatch mode below autograd, as they are issued, in this thread and in backward. An operator
moves the tensors that it reads and those that it writes, each once: `add_` of two tensors 12 bytes per fp32 element,
`zero_` 4. Views and uninitialised tensors move nothing. Python calls are counted in a micro-step of its own, by
`sys.setprofile`: every frame that is entered, C functions not. All but the Python calls of what waits for threads
(hivemind's progress tracker) are exact: they must be equal in two micro-steps, or `count` refuses.
"""

import functools
import gc
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from accumulating.ways import Way
from bareloop.profiler.probes.transfers import READS

__all__ = ["Counted", "Tally", "alive", "count", "gradient_bytes", "micro_step", "tally"]

WARM_UP = 2
_HERE = str(Path(__file__).parent)
_OVERWRITES = frozenset({"aten::zero_", "aten::fill_", "aten::copy_"})
"""Write their first argument without reading it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """Of one micro-step."""

    ops: int
    """Operators that move data: kernels, on an accelerator."""
    bytes: int
    host_reads: int
    python_calls: int
    gradient_bytes: int
    """On the model's device, when backward has ended: gradients, and sums of them."""
    host_bytes: int
    """In shared memory, for the averaging of gradients and parameters with peers."""


class Tally(TorchDispatchMode):
    """Operators, bytes and reads while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.issued: Counter[tuple[str, tuple[tuple[int, ...], ...]]] = Counter()
        """All operators by name and shapes of their tensors."""
        self.ops = 0
        """Those that move data."""
        self.bytes = 0
        self.host_reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = [(argument, list(_tensors(value))) for argument, value in _named(func, args, kwargs)]
        shapes = tuple(tuple(tensor.shape) for _, tensors in given for tensor in tensors)
        self.issued[str(func), shapes] += 1
        if not _moves_nothing(func):
            self.ops += 1
            self.bytes += _moved(func, given, result)
        self.host_reads += _reads(func, args, kwargs)
        return result


def micro_step(way: Way, model: nn.Module, batch: dict[str, Tensor]) -> None:
    """Forward and backward of one micro-batch, gathered `way`."""
    way.before()
    model(**batch).loss.backward()
    way.after()


def tally(way: Way, model: nn.Module, batch: dict[str, Tensor]) -> Tally:
    """What one micro-step does."""
    with Tally() as found:
        micro_step(way, model, batch)
    return found


def count(way: Way, model: nn.Module, batch: dict[str, Tensor], *, others: Sequence[Tensor] = ()) -> Counted:
    """Counts of a micro-step in the middle of a round.

    Args:
        others: tensors of this process that have nothing to do with it, `alive()` before `way` was opened.

    Raises:
        RuntimeError: two micro-steps did not do the same.
    """
    for _ in range(WARM_UP):
        micro_step(way, model, batch)
    first, second = tally(way, model, batch), tally(way, model, batch)
    if first.issued != second.issued:
        apart = [*(first.issued - second.issued), *(second.issued - first.issued)]
        raise RuntimeError(f"two micro-steps did not issue the same operators: {apart}")
    calls = min(_python_calls(way, model, batch) for _ in range(3))
    on_device, on_host = gradient_bytes(way, model, batch, others)
    return Counted(
        ops=first.ops,
        bytes=first.bytes,
        host_reads=first.host_reads,
        python_calls=calls,
        gradient_bytes=on_device,
        host_bytes=on_host,
    )


def gradient_bytes(
    way: Way, model: nn.Module, batch: dict[str, Tensor], others: Sequence[Tensor] = ()
) -> tuple[int, int]:
    """Bytes of all tensors alive when backward has ended, without the model's own, the batch and `others`: (private, shared)."""
    way.before()
    model(**batch).loss.backward()
    own = [*model.parameters(), *model.buffers(), *batch.values(), *others]
    known = {tensor.untyped_storage().data_ptr() for tensor in own}
    gradients = [p.grad for p in model.parameters() if type(p.grad) is Tensor]  # a sealed one holds nothing
    storages = {}
    for tensor in [*gradients, *alive()]:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = (storage.nbytes(), tensor.is_shared())
    way.after()
    private = sum(size for size, shared in storages.values() if not shared)
    return private, sum(size for size, shared in storages.values() if shared)


def alive() -> list[Tensor]:
    """All tensors on the CPU that Python knows of."""
    gc.collect()
    return [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter) and thing.device.type == "cpu"]


def _python_calls(way: Way, model: nn.Module, batch: dict[str, Tensor]) -> int:
    calls = 0

    def event(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        if event == "call" and not frame.f_code.co_filename.startswith(_HERE):
            calls += 1

    sys.setprofile(event)
    try:
        micro_step(way, model, batch)
    finally:
        sys.setprofile(None)
    return calls


def _named(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterable[tuple[Any, Any]]:
    """(argument of the schema, its value) of those that were given."""
    arguments = func._schema.arguments
    yield from zip(arguments, args, strict=False)
    for argument in arguments[len(args) :]:
        if argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _moved(func: Any, given: list[tuple[Any, list[Tensor]]], result: Any) -> int:
    """Bytes read and written by an operator that moves data."""
    total = 0
    for index, (argument, tensors) in enumerate(given):
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written:
            total += size
        if not (written and index == 0 and func._schema.name in _OVERWRITES):
            total += size
    for returned, value in zip(func._schema.returns, result if isinstance(result, tuple) else (result,), strict=False):
        if returned.alias_info is None:
            total += sum(tensor.numel() * tensor.element_size() for tensor in _tensors(value))
    return total


@functools.cache
def _moves_nothing(func: Any) -> bool:
    """Whether it is a view (its result aliases an argument that it does not write) or makes uninitialised memory."""
    if func._schema.name.startswith(("aten::empty", "aten::new_empty", "aten::_unsafe_view", "aten::detach")):
        return True
    infos = [returned.alias_info for returned in func._schema.returns]
    return any(info is not None and not info.is_write for info in infos)


def _reads(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    name, overload = func._schema.name, func._schema.overload_name
    read = READS.get(f"{name}.{overload}") or READS.get(name)
    return read is not None and read(args, kwargs) is not None


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _tensors(entry)
