"""Data sets and samplers that know where they are, for torchdata's StatefulDataLoader.

torchdata keeps the state of data and samplers that have `state_dict` and `load_state_dict`, one for each worker. What
most data does not have is the state of the random generators, without which a resumed loader augments and masks
otherwise than the one that was not stopped. Here each data set, iterator and sampler is wrapped in one that has it:

* a sampler remembers the random state that it drew its order from, and draws the same order again;
* data restores the random state before the first sample that is read again, in the worker that reads it;
* an iterable continues from its own state where it has one, and where it has none is read again up to there. datasets'
  shuffle buffer is not part of the state of its data set, so such data is read again too: it would go on in another
  order.
"""

import copy
import random
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import Dataset, IterableDataset

__all__ = [
    "TrackedBatches",
    "TrackedDataset",
    "TrackedIterable",
    "generators_of",
    "random_state",
    "restore_random_state",
]

_STATE_METHODS = ("state_dict", "load_state_dict")


def random_state() -> tuple[Any, ...]:
    """The states of the global generators of torch (CPU), random and numpy, in bytes and numbers that compare."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return (
        torch.get_rng_state().numpy().tobytes(),
        (version, array("I", words).tobytes(), gauss),
        (name, np.asarray(keys).tobytes(), position, has_gauss, cached),
    )


def restore_random_state(state: tuple[Any, ...]) -> None:
    """Set the generators to what `random_state` returned."""
    of_torch, (version, words, gauss), (name, keys, position, has_gauss, cached) = state
    torch.set_rng_state(torch.frombuffer(bytearray(of_torch), dtype=torch.uint8))
    random.setstate((version, tuple(array("I", words)), gauss))
    np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), position, has_gauss, cached))


class _Wrapper:
    """Has the attributes of what it wraps, but not its state methods: those are the wrapper's own or none."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        if name in _STATE_METHODS or name == "_wrapped":
            raise AttributeError(name)
        return getattr(self._wrapped, name)

    def __len__(self) -> int:
        return len(self._wrapped)


class TrackedDataset(_Wrapper, Dataset):
    """A map-style data set whose state is that of the generators, and its own if it has one."""

    def __getitem__(self, index: Any) -> Any:
        return self._wrapped[index]

    def state_dict(self) -> dict[str, Any]:
        """As of now: what the next sample is read with."""
        return {"own": (_own_state(self._wrapped),), "random": random_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to what `state_dict` returned."""
        (own,) = state["own"]
        if own is not None:
            self._wrapped.load_state_dict(own)
        restore_random_state(state["random"])


class TrackedIterable(_Wrapper, IterableDataset):
    """An iterable data set whose iterators have a state."""

    def __iter__(self) -> Iterator[Any]:
        return _TrackedIterator(self._wrapped)


class _TrackedIterator:
    """An iterator over a data set; its state is that of the data, or how much was taken, and of the generators."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._items = iter(dataset)
        self._taken = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        item = next(self._items)
        self._taken += 1
        return item

    def state_dict(self) -> dict[str, Any]:
        """As of now: what the next sample is read with. The tuple keeps torchdata from taking a state apart."""
        own = None
        if self._taken > 0 and not _has_shuffle_buffer(self._dataset):
            own = _own_state(self._items if _has_state(self._items) else self._dataset)
        return {"own": (own,), "taken": self._taken, "random": random_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to what `state_dict` returned."""
        (own,), self._taken = state["own"], state["taken"]
        if own is None:
            for _ in range(self._taken):
                next(self._items)
        elif _has_state(self._items):
            self._items.load_state_dict(own)  # type: ignore[attr-defined]
        else:
            self._dataset.load_state_dict(own)
            self._items = iter(self._dataset)
        restore_random_state(state["random"])


class TrackedBatches(_Wrapper):
    """A batch sampler (or sampler) that can be set to go on in the order that it began with."""

    def __iter__(self) -> Iterator[Any]:
        return _TrackedOrder(self._wrapped)


class _TrackedOrder:
    """One pass of a sampler; its state is what its order was drawn from, and how much of it was given out."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self._order: Iterator[Any] | None = None
        self._drawn_from: tuple[Any, ...] | None = None
        self._given = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._order is None:
            own = tuple(generator.get_state().numpy().tobytes() for generator in generators_of(self._batches))
            self._drawn_from = (random_state(), own)
            self._order = iter(self._batches)
        indices = next(self._order)
        self._given += 1
        return indices

    def state_dict(self) -> dict[str, Any]:
        """As of now."""
        return {"drawn_from": (self._drawn_from,), "given": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Draw the order again and go to where it was. The generators of the process are left as they are."""
        (drawn_from,) = state["drawn_from"]
        if drawn_from is None:
            return
        now, (then, own) = random_state(), drawn_from
        for generator, was in zip(generators_of(self._batches), own, strict=True):
            generator.set_state(torch.frombuffer(bytearray(was), dtype=torch.uint8))
        restore_random_state(then)
        for _ in range(state["given"]):
            next(self)
        restore_random_state(now)


def generators_of(sampler: Any) -> list[torch.Generator]:
    """The random generators that a batch sampler, and the samplers inside it, go on with from epoch to epoch."""
    found: list[torch.Generator] = []
    while sampler is not None:
        own = getattr(sampler, "generator", None)
        # accelerate's seedable sampler makes its own, and seeds it anew for each epoch.
        if isinstance(own, torch.Generator) and not isinstance(sampler, SeedableRandomSampler):
            found.append(own)
        sampler = getattr(sampler, "batch_sampler", getattr(sampler, "sampler", None))
    return found


def _has_shuffle_buffer(dataset: Any) -> bool:
    """Whether `dataset` is one of datasets' that shuffles in a buffer, anywhere in the chain that it reads from."""
    waiting = [getattr(dataset, "_ex_iterable", None)]
    while waiting:
        each = waiting.pop()
        if each is None:
            continue
        if type(each).__name__ == "BufferShuffledExamplesIterable":
            return True
        waiting += [getattr(each, "ex_iterable", None), *getattr(each, "ex_iterables", ())]
    return False


def _has_state(thing: Any) -> bool:
    return all(hasattr(thing, method) for method in _STATE_METHODS)


def _own_state(thing: Any) -> Any:
    """A copy: torchdata compares states, and one that changes in place would always be equal to itself."""
    return copy.deepcopy(thing.state_dict()) if _has_state(thing) else None
