"""Documents to rows of full width: many short texts in one row, so that the model computes tokens and not padding.

Two ways. First fit keeps every document whole: documents are read into a buffer, sorted by length, and each goes into
the first row that has room; rows come out almost full (fill 0.99 and more on short texts) and the buffer bounds the
memory. Concatenation lays the documents end to end and cuts at the row's end: every row but the last is full and
nothing is buffered, but a document that straddles two rows becomes two, the second of which does not see the first.

Nothing is dropped: each token is in exactly one row. Documents do not see each other: `position_ids` restart at 0 with
each, which is how `bareloop.data.collators` and transformers know where one begins, and the first label of each is
-100, so that no document is asked to predict the next. A cut takes one token out of the loss: the first of a piece is
read but not predicted.

A batch counts packed rows, not documents: batch size 8 at length 512 are up to 4,096 real tokens an update, where 8
short texts padded to 512 were perhaps 500. `Packing.rows_per_batch` turns the tokens per batch that you want into rows;
`bareloop.data.collators.PackingCollator` keeps the documents of each update instead.
"""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from torch.utils.data import Dataset

__all__ = [
    "IGNORED",
    "PackedRows",
    "Packing",
    "Piece",
    "Round",
    "arranged",
    "as_document",
    "first_fit",
    "pack",
    "packed_row",
    "sized",
]

IGNORED = -100
"""A label that no loss counts; PyTorch's default."""
_REPLACED = ("attention_mask", "position_ids")

_Source = TypeVar("_Source")


class Piece(NamedTuple, Generic[_Source]):
    """Tokens `start` to `stop` of a document; the source is the document, or its place in the data set."""

    source: _Source
    start: int
    stop: int


_Read = tuple[list[list[Piece[_Source]]], int, Sequence[Piece[_Source]] | None]
"""Rows, documents read for them, and the pieces left over; None for these at the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Round(Generic[_Source]):
    """The rows of one buffer of documents, and what it takes to make them again without the rounds before."""

    rows: Sequence[Sequence[Piece[_Source]]]
    taken: int
    """Documents read before this round."""
    waiting: Sequence[Piece[_Source]]
    """Pieces read before this round and not given out in it: less than a row."""
    number: int
    """Rounds before this one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """How documents become rows.

    Raises:
        ValueError: a value out of range.
    """

    length: int
    """Tokens that a row holds at most."""

    strategy: Literal["first_fit", "concatenate"] = "first_fit"
    """Documents whole, or laid end to end and cut at the end of each row."""

    too_long: Literal["refuse", "split"] = "refuse"
    """First fit only: a document longer than a row is an error, or is cut into pieces that are packed like documents."""

    causal: bool = True
    """The labels are next tokens: made from `input_ids` where a row has none, and -100 at the start of each document.
    False leaves the labels as they are, for models that label each token in its place."""

    buffer: int = 1000
    """First fit only: documents that are sorted and fitted together. More fill rows better and hold more memory."""

    seed: int = 0
    """First fit only: order of the rows that come from one buffer, which would otherwise be by length."""

    def __post_init__(self) -> None:
        if self.length < 2:
            raise ValueError(f"length={self.length}: a row must hold at least 2 tokens, one to read and one to predict")
        if self.buffer < 1:
            raise ValueError(f"buffer={self.buffer}: must be at least 1 document")
        _one_of("strategy", self.strategy, ("first_fit", "concatenate"))
        _one_of("too_long", self.too_long, ("refuse", "split"))

    def rows_per_batch(self, tokens_per_batch: int) -> int:
        """The batch size, in packed rows, that makes `tokens_per_batch` tokens.

        Rows are a little short of full under first fit: `PackedRows.fill` is the share of these tokens that are real.

        Raises:
            ValueError: the tokens are not a whole number of rows.
        """
        rows, rest = divmod(tokens_per_batch, self.length)
        if rest or rows < 1:
            near = max(rows, 1) * self.length
            raise ValueError(
                f"tokens_per_batch={tokens_per_batch} is not a multiple of length={self.length}: "
                f"use {near} or {near + self.length}, or another length"
            )
        return rows


class PackedRows(Dataset[dict[str, list[Any]]]):
    """A data set of packed rows over a data set of documents, for any DataLoader or Trainer, sampler and worker count.

    Only which document goes where is decided ahead; a row is put together when it is asked for. The documents of a row
    stay together in every epoch, and the sampler shuffles the rows.

    Args:
        documents: has a length and gives a mapping for an index: `input_ids`, perhaps `labels`, and other columns that
            hold one value per token. With an `attention_mask` its zeros are cut away. Documents without tokens are
            passed over.
        packing: how.
        lengths: tokens of each document; counted (one pass over the data) when None.

    Raises:
        ValueError: a document that does not fit, or with columns of different lengths.
    """

    def __init__(self, documents: Any, packing: Packing, *, lengths: Sequence[int] | None = None) -> None:
        if lengths is None:
            lengths = [_count(documents[index], packing, index) for index in range(len(documents))]
        elif len(lengths) != len(documents):
            raise ValueError(f"lengths has {len(lengths)} entries for {len(documents)} documents")
        self.documents = documents
        self.packing = packing
        self.lengths = lengths
        self._rows = [row for part in arranged(enumerate(lengths), packing) for row in part.rows]

    @property
    def fill(self) -> float:
        """Real tokens over the tokens of full rows, 0..1."""
        return sum(self.lengths) / max(len(self._rows) * self.packing.length, 1)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, list[Any]]]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        """Row `index`: a mapping of column to list, with `position_ids`."""
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        return packed_row([self._piece(piece) for piece in self._rows[index]], causal=self.packing.causal)

    def _piece(self, piece: Piece[int]) -> Piece[dict[str, list[Any]]]:
        index = piece.source
        document = as_document(self.documents[index], causal=self.packing.causal, name=f"document {index}")
        found = len(document["input_ids"])
        if found != self.lengths[index]:
            raise ValueError(f"document {index} has {found} tokens, but lengths says {self.lengths[index]}")
        return Piece(document, piece.start, piece.stop)


def pack(documents: Iterable[Mapping[str, Any]], packing: Packing) -> Iterator[dict[str, list[Any]]]:
    """Packed rows of `documents`, one after the other; for loops of your own and `datasets.Dataset.from_generator`.

    Returns rows of equal columns: those of the documents and `position_ids`, lists of at most `packing.length` values.

    Raises:
        ValueError: while iterating, as `PackedRows`.
    """
    return (
        packed_row(pieces, causal=packing.causal)
        for part in arranged(sized(documents, packing), packing)
        for pieces in part.rows
    )


def sized(
    documents: Iterable[Mapping[str, Any]], packing: Packing, *, first: int = 0
) -> Iterator[tuple[dict[str, list[Any]], int]]:
    """Pairs (document, tokens) of rows that are counted from `first` in messages.

    Raises:
        ValueError: as `as_document`.
    """
    for number, row in enumerate(documents, start=first):
        document = as_document(row, causal=packing.causal, name=f"document {number}")
        yield document, len(document["input_ids"])


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of `lengths` in groups that sum up to `capacity` at most: longest first, each to the first with room.

    Never more than 11/9 of the fewest possible groups, and one more. A tree of the most room on either side finds the
    group, so 1,000 documents cost 1,000 x 10 comparisons whatever their size.

    Raises:
        ValueError: an entry above `capacity`.

    Source: Johnson (1973), Near-optimal bin packing algorithms; 11/9: Dosa (2007), ESCAPE.
    """
    leaves = 1 << max(len(lengths) - 1, 0).bit_length()
    room = [capacity] * (2 * leaves)
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if lengths[index] > capacity:
            raise ValueError(f"lengths[{index}]={lengths[index]} is above the capacity of {capacity}")
        node = 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= lengths[index] else 2 * node + 1
        if node - leaves == len(groups):
            groups.append([])
        groups[node - leaves].append(index)
        room[node] -= lengths[index]
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return groups


def as_document(row: Mapping[str, Any], *, causal: bool, name: str = "a document") -> dict[str, list[Any]]:
    """Columns of `row` as lists without padding: `input_ids`, `labels` where there are any or `causal` makes them.

    Raises:
        ValueError: no `input_ids`, or a column that does not hold one value per token.
    """
    if "input_ids" not in row:
        raise ValueError(f"{name} has no input_ids, only {sorted(row)}: tokenize first")
    columns = {key: _as_list(values) for key, values in row.items()}
    count = len(columns["input_ids"])
    for key, values in columns.items():
        if not isinstance(values, list) or len(values) != count:
            raise ValueError(
                f"{name}: column {key!r} does not hold one value for each of the {count} tokens; "
                f'leave it out, e.g. with dataset.remove_columns("{key}")'
            )
    mask = columns.get("attention_mask")
    kept = {key: values for key, values in columns.items() if key not in _REPLACED}
    if mask is not None and not all(mask):
        kept = {key: [value for value, real in zip(values, mask, strict=True) if real] for key, values in kept.items()}
    if causal and "labels" not in kept:
        kept["labels"] = kept["input_ids"]
    return kept


def packed_row(pieces: Sequence[Piece[dict[str, list[Any]]]], *, causal: bool) -> dict[str, list[Any]]:
    """One row: the columns of `pieces` end to end, and `position_ids` that restart with each.

    Raises:
        ValueError: the documents have different columns.
    """
    names = list(pieces[0].source)
    row: dict[str, list[Any]] = {name: [] for name in [*names, "position_ids"]}
    for document, start, stop in pieces:
        if document.keys() != pieces[0].source.keys():
            raise ValueError(
                f"documents have different columns, {sorted(names)} and {sorted(document)}: make them equal"
            )
        for name in names:
            row[name] += document[name][start:stop]
        if causal:
            row["labels"][start - stop] = IGNORED
        row["position_ids"] += range(stop - start)
    return row


def arranged(
    documents: Iterator[tuple[_Source, int]],
    packing: Packing,
    *,
    epoch: int = 0,
    taken: int = 0,
    waiting: Sequence[Piece[_Source]] = (),
    number: int = 0,
) -> Iterator[Round[_Source]]:
    """Rounds of rows from pairs (document, tokens), from the first round or from one that `Round` describes.

    Raises:
        ValueError: a document longer than a row that is not to be split.
    """
    read_round = _concatenated if packing.strategy == "concatenate" else _fitted
    more = True
    while more:
        rows, read, left = read_round(documents, waiting, packing, taken)
        # Of the round's own number, so that a round in the middle needs nothing of those before it.
        random.Random(f"{packing.seed} {epoch} {number}").shuffle(rows)
        yield Round(rows=rows, taken=taken, waiting=waiting, number=number)
        more = left is not None
        taken, waiting, number = taken + read, left or (), number + 1


def _concatenated(
    documents: Iterator[tuple[_Source, int]], waiting: Sequence[Piece[_Source]], packing: Packing, taken: int
) -> _Read[_Source]:
    """One row; what is left is the rest of its last document."""
    row: list[Piece[_Source]] = []
    room, read = packing.length, 0
    for source, start, end in chain(waiting, (Piece(document, 0, count) for document, count in documents)):
        read += start == 0
        stop = min(end, start + room)
        if stop > start:
            row.append(Piece(source, start, stop))
            room -= stop - start
        if room == 0:
            return [row], read, [Piece(source, stop, end)] if stop < end else []
    return [row] if row else [], read, None


def _fitted(
    documents: Iterator[tuple[_Source, int]], waiting: Sequence[Piece[_Source]], packing: Packing, taken: int
) -> _Read[_Source]:
    """Rows of one buffer; what is left is the emptiest, whose documents help to fill the rows of the next buffer."""
    read = list(islice(documents, packing.buffer))
    pieces = [*waiting]
    for number, (document, count) in enumerate(read, start=taken):
        if count > packing.length and packing.too_long == "refuse":
            raise ValueError(
                f"document {number} has {count} tokens, more than length={packing.length}: "
                'raise length, or pass too_long="split" to cut it into pieces that do not see each other'
            )
        pieces += [
            Piece(document, start, min(count, start + packing.length)) for start in range(0, count, packing.length)
        ]
    groups = first_fit([piece.stop - piece.start for piece in pieces], packing.length)
    rows = [[pieces[index] for index in sorted(group)] for group in groups]
    if len(read) < packing.buffer:
        return rows, len(read), None
    emptiest = min(range(len(rows)), key=lambda at: sum(piece.stop - piece.start for piece in rows[at]), default=None)
    return rows, len(read), [] if emptiest is None else rows.pop(emptiest)


def _count(row: Mapping[str, Any], packing: Packing, index: int) -> int:
    return len(as_document(row, causal=packing.causal, name=f"document {index}")["input_ids"])


def _as_list(values: Any) -> Any:
    """Lists of tensors, arrays and tuples; other things as they are."""
    if hasattr(values, "tolist"):
        return values.tolist()
    return list(values) if isinstance(values, tuple) else values


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, allowed))}")
