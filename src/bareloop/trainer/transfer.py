"""Batches copied to the accelerator ahead of their use, on a stream of their own.

accelerate's loader copies a batch on the stream that computes, when the batch is asked for: the copy waits for the
kernels queued before it and the next kernels wait for the copy. On a stream of its own it runs beside them. It gains
what the copy of one batch takes, at the cost of the device memory of the batches ahead; for token ids (kilobytes) that
is nothing, for images it can be the step. Written from the rules of the allocator; not run on a device by our tests,
which have none: what they hold is the order in which batches are read, copied and handed out.

A collator that draws from the global generator in this process draws earlier than it would: with `num_workers=0` the
order of its draws against the others on the host changes.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Protocol

import torch
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils import send_to_device
from torch import Tensor

__all__ = ["Copies", "SideStream", "on_host", "prefetched", "refuse_prefetching"]

WITH_STREAMS = ("cuda", "xpu")
"""Device types whose copies can run beside the kernels."""


class Copies(Protocol):
    """Copying in two steps, so that others run between them."""

    def start(self, batch: Any) -> Any:
        """Queue the copy of a host batch; returns without waiting for it."""
        ...

    def finish(self, started: Any) -> Any:
        """The batch on the device, safe for what the caller queues next; the host does not wait."""
        ...


class SideStream:
    """Copies on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module = torch.get_device_module(device)
        self.stream = self.module.Stream(device=device)

    def start(self, batch: Any) -> tuple[Any, Any, Any]:
        """(batch on the device, batch on the host, event of its arrival). The host's must live until the copy is done."""
        with self.module.stream(self.stream):
            moved = send_to_device(batch, self.device, non_blocking=True)
            return moved, batch, self.stream.record_event()

    def finish(self, started: tuple[Any, Any, Any]) -> Any:
        """The batch on the device; the caller's stream waits for its arrival."""
        moved, _, arrived = started
        current = self.module.current_stream(self.device)
        current.wait_event(arrived)
        for tensor in _tensors(moved):
            # Its memory belongs to the side stream: without this it could be given to a later copy when the caller
            # drops the batch, while kernels that read it are still queued.
            if tensor.device.type == self.device.type:
                tensor.record_stream(current)
        return moved


def prefetched(batches: Iterable[Any], copies: Copies, ahead: int) -> Iterator[Any]:
    """The batches on the device, in order, each copied while the `ahead` batches before it are used.

    The next batch is read only when the caller comes back, so its kernels are queued before the loader is waited for.
    An error of the loader is raised after the batches before it.
    """
    source, started = iter(batches), deque()
    failure = _start(source, copies, started, ahead + 1)
    while started:
        yield copies.finish(started.popleft())
        if failure is None:
            failure = _start(source, copies, started, 1)
    if failure is not None:
        raise failure


def refuse_prefetching(trainer: Any) -> None:
    """Refuse where copying ahead has no effect.

    Raises:
        ValueError: naming the setting and what to do instead.
    """
    ahead, args = trainer.lean_options.prefetch_batches, trainer.args
    if not ahead:
        return
    if args.device.type not in WITH_STREAMS:
        raise ValueError(
            f"prefetch_batches={ahead}: on device {args.device} batches are used where they are or copied in order; "
            "set it to 0, or train on one of " + ", ".join(WITH_STREAMS)
        )
    if not args.dataloader_pin_memory:
        raise ValueError(
            f"prefetch_batches={ahead}: with dataloader_pin_memory=False the host waits for each copy; set it to True"
        )


def on_host(trainer: Any, loader: Any) -> Any:
    """The loader that accelerate prepared, told to leave its batches on the host.

    Raises:
        ValueError: it reads on one process and sends to the others, for which batches must be on the device.
    """
    if isinstance(loader, DataLoaderDispatcher):
        raise ValueError(
            f"prefetch_batches={trainer.lean_options.prefetch_batches}: this loader sends batches from process 0; set "
            "accelerator_config={'dispatch_batches': False}, or prefetch_batches to 0"
        )
    if getattr(loader, "device", None) is not None:
        loader.device = None
    return loader


def _start(source: Iterator[Any], copies: Copies, started: deque[Any], count: int) -> Exception | None:
    """Start the copies of the next `count` batches, or of as many as there are; the loader's error, if it has one."""
    try:
        for batch in islice(source, count):
            started.append(copies.start(batch))
    except Exception as error:
        return error
    return None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _tensors(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _tensors(entry)
