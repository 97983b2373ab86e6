"""A stream of packed rows: dealt out to workers, other rows each epoch, and resumed anywhere as if never stopped."""

import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from bareloop.data.packing import Packing
from bareloop.data.stream import PackedStream

LENGTH = 32
OF_TORCHDATA = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
"""torchdata 0.11 calls what torch 2.13 has deprecated."""


def documents(count: int = 300) -> list[dict[str, list[int]]]:
    """Texts whose tokens occur nowhere else, so that a lost or doubled one is seen."""
    chance = random.Random(0)
    found, token = [], 0
    for _ in range(count):
        size = chance.randint(1, LENGTH)
        found.append({"input_ids": list(range(token, token + size))})
        token += size
    return found


def unpacked(rows: Sequence[dict[str, list[int]]]) -> list[list[int]]:
    """The documents in `rows`, told apart by their positions."""
    found: list[list[int]] = []
    for row in rows:
        for token, position in zip(row["input_ids"], row["position_ids"], strict=True):
            if position == 0:
                found.append([])
            found[-1].append(token)
    return found


def test_each_epoch_of_a_stream_has_its_order_and_the_documents_hear_of_it() -> None:
    class Source:
        epoch = -1

        def __iter__(self) -> Iterator[dict[str, list[int]]]:
            return iter(documents())

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    stream = PackedStream(Source(), Packing(length=LENGTH))
    first = list(stream)
    stream.set_epoch(1)
    assert stream.documents.epoch == 1  # pyright: ignore[reportAttributeAccessIssue]
    second = list(stream)
    assert first != second and sorted(unpacked(first)) == sorted(unpacked(second))
    stream.set_epoch(0)
    assert list(stream) == first


def test_two_loader_workers_share_the_documents_of_an_indexable_source() -> None:
    given = documents(count=100)
    loader = DataLoader(PackedStream(given, Packing(length=LENGTH)), batch_size=None, num_workers=2)
    assert sorted(unpacked(list(loader))) == [document["input_ids"] for document in given]


def test_two_loader_workers_on_a_source_that_cannot_be_dealt_out_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Source:
        def __iter__(self) -> Iterator[dict[str, list[int]]]:
            return iter(documents(count=3))

    stream = PackedStream(Source(), Packing(length=LENGTH))
    assert len(unpacked(list(stream))) == 3
    # Not in real workers: after an error in them torch takes 10 s to end.
    monkeypatch.setattr("bareloop.data.stream.get_worker_info", lambda: SimpleNamespace(id=0, num_workers=2))
    with pytest.raises(ValueError, match="num_workers=2: each worker would read all of a Source"):
        list(stream)


def test_a_source_that_ends_after_one_pass_is_refused() -> None:
    with pytest.raises(ValueError, match="documents is a list_iterator that ends after one pass"):
        PackedStream(iter(documents()), Packing(length=LENGTH))


class Dealing(IterableDataset):
    """A stream of torch's without a length or a state; counts what is read of it."""

    def __init__(self, count: int) -> None:
        self.count, self.read = count, 0

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        for document in documents(self.count):
            self.read += 1
            yield document


def source(kind: str, count: int = 60) -> Any:
    """The same documents in different clothes."""
    if kind == "list":
        return documents(count)
    if kind == "datasets stream":
        return datasets.Dataset.from_list(documents(count)).to_iterable_dataset(num_shards=2)
    return Dealing(count)


def loader(kind: str, packing: Packing, workers: int) -> StatefulDataLoader:
    """Batches of two rows as they are."""
    return StatefulDataLoader(
        PackedStream(source(kind), packing), batch_size=2, num_workers=workers, collate_fn=lambda rows: rows
    )


@OF_TORCHDATA
@pytest.mark.parametrize("strategy", ["first_fit", "concatenate"])
@pytest.mark.parametrize("kind", ["list", "datasets stream", "torch stream"])
def test_a_pass_interrupted_after_any_batch_goes_on_as_if_it_had_not_been(kind: str, strategy: Any) -> None:
    packing = Packing(length=LENGTH, strategy=strategy, buffer=17, seed=2)
    whole = list(loader(kind, packing, 0))
    assert len(whole) > 10
    for stop in range(len(whole)):
        first = loader(kind, packing, 0)
        batches = iter(first)
        before = [next(batches) for _ in range(stop)]
        state = first.state_dict()
        second = loader(kind, packing, 0)
        second.load_state_dict(state)
        assert before + list(second) == whole, stop
        assert list(second) == whole, "the pass after the interrupted one is whole"


@OF_TORCHDATA
@pytest.mark.parametrize("kind", ["list", "datasets stream"])
def test_two_workers_resume_where_they_were(kind: str) -> None:
    packing = Packing(length=LENGTH, buffer=7)
    whole = list(loader(kind, packing, 2))
    assert sorted(unpacked([row for batch in whole for row in batch])) == [text["input_ids"] for text in documents(60)]
    first = loader(kind, packing, 2)
    batches = iter(first)
    before = [next(batches) for _ in range(7)]
    second = loader(kind, packing, 2)
    second.load_state_dict(first.state_dict())
    assert before + list(second) == whole


def test_resuming_reads_no_document_of_an_indexable_source_again() -> None:
    class Counting(list):
        read = 0

        def __getitem__(self, index: Any) -> Any:
            self.read += 1
            return super().__getitem__(index)

    packing = Packing(length=LENGTH, buffer=10)
    stream = PackedStream(Counting(documents(200)), packing)
    rows = iter(stream)
    before = [next(rows) for _ in range(60)]
    resumed = PackedStream(Counting(documents(200)), packing)
    resumed.load_state_dict(stream.state_dict())
    after = list(resumed)
    assert before + after == list(PackedStream(documents(200), packing))
    assert resumed.documents.read <= 200 - stream.documents.read + packing.buffer


def test_the_epoch_is_part_of_the_state() -> None:
    packing = Packing(length=LENGTH, buffer=20)
    stream = PackedStream(documents(), packing)
    stream.set_epoch(4)
    whole = list(stream)
    rows = iter(stream)
    before = [next(rows) for _ in range(9)]
    resumed = PackedStream(documents(), packing)
    resumed.load_state_dict(stream.state_dict())
    assert before + list(resumed) == whole
