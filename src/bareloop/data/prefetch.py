"""Batches made by a thread while the step runs.

For loaders that work in the process of the training loop (`num_workers=0`, generators, streams): the thread reads and
collates while the main thread waits for the device. It takes the interpreter from the loop while it runs Python, so
worker processes are better where the collating itself is heavy Python.

Order, number and values of the batches are the source's. What is drawn from torch's or Python's global generator while
a batch is made (random augmentation with `num_workers=0`) is drawn earlier than without, hence in another order against
dropout; a loader that only shuffles draws before the first batch and gives the same run to the bit.
"""

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

__all__ = ["prefetch"]

_Batch = TypeVar("_Batch")


@dataclass(frozen=True, kw_only=True, slots=True)
class _End:
    """The source ended, or failed with `error`."""

    error: BaseException | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Exchange(Generic[_Batch]):
    """What the two threads share."""

    ready: SimpleQueue[_Batch | _End]
    room: threading.Semaphore
    """Counts the batches that may still be read ahead."""
    left: threading.Event
    """Nobody takes batches any more."""


def prefetch(batches: Iterable[_Batch], *, depth: int = 2) -> Iterator[_Batch]:
    """The batches of `batches`, up to `depth` of them made ahead of the one in use.

    The thread starts with the first batch and ends with the last, after an error, on `break` (as soon as nobody holds
    the iterator) and on `close()`; ending waits for the batch that is being made. An error of the source is raised
    where its batch would have come, with the source's traceback.

    Args:
        batches: iterated once per call, its iterator made in the calling thread.
        depth: batches that may wait, at least 1.

    Raises:
        ValueError: `depth` below 1, or a loader that accelerate has prepared: it marks the end of the data when the last
            batch is read, so the steps before it would be taken for the last.
    """
    if depth < 1:
        raise ValueError(
            f"depth={depth}: must be at least 1 batch; without prefetch iterate over the batches themselves"
        )
    if hasattr(batches, "gradient_state"):
        raise ValueError(
            f"batches is a {type(batches).__name__} prepared by accelerate, which marks the end of the data when the last "
            "batch is read: pass num_workers and prefetch_factor to the DataLoader instead"
        )
    return _prefetched(batches, depth)


def _prefetched(batches: Iterable[_Batch], depth: int) -> Iterator[_Batch]:
    exchange: _Exchange[_Batch] = _Exchange(
        ready=SimpleQueue(), room=threading.Semaphore(depth), left=threading.Event()
    )
    # Here and not in the thread: a DataLoader's iterator starts worker processes and draws its seed.
    source = iter(batches)
    thread = threading.Thread(target=_fill, args=(source, exchange), name="bareloop-prefetch", daemon=True)
    thread.start()
    try:
        while not isinstance(found := exchange.ready.get(), _End):
            exchange.room.release()
            yield found
        if found.error is not None:
            raise found.error
    finally:
        exchange.left.set()
        exchange.room.release()
        thread.join()


def _fill(source: Iterator[Any], exchange: _Exchange[Any]) -> None:
    end = _End()
    try:
        while exchange.room.acquire() and not exchange.left.is_set():
            exchange.ready.put(next(source))
    except StopIteration:
        pass
    except BaseException as error:  # Raised again in the thread that asks for the batch.
        end = _End(error=error)
    exchange.ready.put(end)
