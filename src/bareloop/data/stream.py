"""Packed rows of a stream of documents: bounded memory, any number of epochs, resumed in the middle of one.

At most one buffer and one row of documents are held. The state of an interrupted pass is small, since it names the
buffer and not what is in it: documents read before, the pieces carried over (less than a row), and rows given since.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from bareloop.data.packing import Packing, Piece, arranged, packed_row, sized

__all__ = ["PackedStream"]


class PackedStream(IterableDataset):
    """Packed rows of documents that come as a stream; `PackedRows` is for those that have a length.

    `set_epoch` changes the order of the rows and is passed on to the documents. In a DataLoader with workers an
    indexable source is dealt out among them, a torch or datasets stream deals itself out, and any other is refused.
    A torchdata `StatefulDataLoader` resumes in mid-epoch: at once for an indexable source and for one that has
    `state_dict` itself (datasets streams, whose own shuffle buffer is not in their state, so that what was in it is
    lost with an interrupted process), by reading the documents again otherwise.

    Under accelerate's dispatcher (its default for streams on several processes) batches must have one shape and hold
    tensors only: `PackedCollator(width=packing.length, pass_use_cache=False)`.

    Args:
        documents: an iterable of what `PackedRows` takes, that can be iterated again for the next epoch.
        packing: how.

    Raises:
        ValueError: the documents can be iterated once only. While iterating, as `PackedRows`.
    """

    def __init__(self, documents: Iterable[Mapping[str, Any]], packing: Packing) -> None:
        super().__init__()
        if isinstance(documents, Iterator):
            raise ValueError(
                f"documents is a {type(documents).__name__} that ends after one pass, so the second epoch would be "
                "empty: pass something that can be iterated again, e.g. a data set or a class with __iter__"
            )
        self.documents = documents
        self.packing = packing
        # Shared, so that workers which outlive an epoch see the next one.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self._state: dict[str, Any] | None = None
        self._resume: dict[str, Any] | None = None
        self._start = self._source_state()
        self._moved = False

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration that of `epoch`."""
        self._epoch.fill_(epoch)
        if hasattr(self.documents, "set_epoch"):
            self.documents.set_epoch(epoch)  # pyright: ignore[reportAttributeAccessIssue]

    def state_dict(self) -> dict[str, Any]:
        """Where the iteration that began last stands; of this process, so of one loader worker."""
        return dict(self._state or self._resume or self._fresh())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration go on from `state`."""
        self._resume, self._state = dict(state), None

    def __iter__(self) -> Iterator[dict[str, list[Any]]]:
        state, self._resume = self._resume or self._fresh(), None
        return self._rows(state)

    def _fresh(self) -> dict[str, Any]:
        return {"epoch": int(self._epoch), "taken": 0, "waiting": [], "number": 0, "given": 0, "source": None}

    def _rows(self, state: dict[str, Any]) -> Iterator[dict[str, list[Any]]]:
        self._state = state
        rounds = arranged(
            sized(self._documents_from(state), self.packing, first=state["taken"]),
            self.packing,
            epoch=state["epoch"],
            taken=state["taken"],
            waiting=[Piece(*piece) for piece in state["waiting"]],
            number=state["number"],
        )
        given, source = state["given"], state["source"]
        for part in rounds:
            self._state = {
                "epoch": state["epoch"],
                "taken": part.taken,
                "waiting": [tuple(piece) for piece in part.waiting],
                "number": part.number,
                "given": given,
                "source": source,
            }
            for pieces in part.rows[given:]:
                self._state["given"] += 1
                yield packed_row(pieces, causal=self.packing.causal)
            given, source = 0, self._source_state()
        self._state = None

    def _documents_from(self, state: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
        """The documents of this loader worker (all of them where there is none), without those taken before."""
        worker, documents = get_worker_info(), self.documents
        index, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        if hasattr(documents, "__getitem__") and hasattr(documents, "__len__"):
            indexed: Any = documents
            return (indexed[at] for at in range(index + count * state["taken"], len(indexed), count))
        if count > 1 and not isinstance(documents, IterableDataset):
            raise ValueError(
                f"num_workers={count}: each worker would read all of a {type(documents).__name__} and every document "
                "would come several times; use num_workers of 0 or 1, or an indexable or a torch IterableDataset"
            )
        if state["source"] is None and not self._moved:
            return islice(documents, state["taken"], None)
        # A datasets stream that was moved starts every pass of the same epoch there until it is moved back.
        self._moved = state["source"] is not None
        documents.load_state_dict(state["source"] or self._start)  # pyright: ignore[reportAttributeAccessIssue]
        return documents

    def _source_state(self) -> Any:
        """What the documents themselves need to go on from here; None where they have no state or no need of one."""
        documents: Any = self.documents
        return documents.state_dict() if hasattr(documents, "state_dict") else None
