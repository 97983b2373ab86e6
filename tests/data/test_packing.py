"""No token lost, rows within their length, documents told apart; the slow reference for first fit is a scan."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import datasets
import pytest

from bareloop.data.packing import IGNORED, PackedRows, Packing, first_fit, pack
from bareloop.data.stream import PackedStream

LENGTH = 32


def documents(count: int = 300, longest: int = LENGTH, seed: int = 0) -> list[dict[str, list[int]]]:
    """Texts whose tokens occur nowhere else, so that a lost or doubled one is seen."""
    chance = random.Random(seed)
    found, token = [], 0
    for _ in range(count):
        size = chance.randint(1, longest)
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
            assert len(found[-1]) == position
            found[-1].append(token)
    return found


def scanned(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """First fit, longest first, by looking at every group."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        for group in groups:
            if sum(lengths[other] for other in group) + lengths[index] <= capacity:
                group.append(index)
                break
        else:
            groups.append([index])
    return groups


@pytest.mark.parametrize("count", [0, 1, 2, 3, 17, 300])
def test_first_fit_equals_a_scan_over_all_groups(count: int) -> None:
    lengths = [random.Random(index).randint(1, LENGTH) for index in range(count)]
    assert first_fit(lengths, LENGTH) == scanned(lengths, LENGTH)


@pytest.mark.parametrize("buffer", [1, 7, 64, 10_000])
def test_first_fit_keeps_every_document_whole(buffer: int) -> None:
    given = documents()
    rows = list(pack(given, Packing(length=LENGTH, buffer=buffer)))
    assert all(len(row["input_ids"]) <= LENGTH for row in rows)
    assert sorted(unpacked(rows)) == [document["input_ids"] for document in given]


def test_concatenation_fills_every_row_but_the_last() -> None:
    given = documents(longest=3 * LENGTH)
    rows = list(pack(given, Packing(length=LENGTH, strategy="concatenate")))
    assert [len(row["input_ids"]) for row in rows[:-1]] == [LENGTH] * (len(rows) - 1)
    tokens = [token for row in rows for token in row["input_ids"]]
    assert tokens == [token for document in given for token in document["input_ids"]]
    whole = {tuple(document["input_ids"]) for document in given}
    cuts = sum(tuple(piece) not in whole for piece in unpacked(rows))
    assert 0 < cuts <= 2 * len(rows) + len(given)


def test_a_long_document_is_refused_or_split_into_pieces_that_keep_every_token() -> None:
    given = documents(longest=3 * LENGTH)
    with pytest.raises(ValueError, match=r"document \d+ has \d+ tokens, more than length=32.*too_long=.split."):
        list(pack(given, Packing(length=LENGTH)))
    rows = list(pack(given, Packing(length=LENGTH, too_long="split")))
    pieces = [
        document["input_ids"][start : start + LENGTH]
        for document in given
        for start in range(0, len(document["input_ids"]), LENGTH)
    ]
    assert sorted(unpacked(rows)) == sorted(pieces)


@pytest.mark.parametrize("strategy", ["first_fit", "concatenate"])
@pytest.mark.parametrize("buffer", [5, 1000])
def test_rows_stream_and_function_give_the_same_rows(strategy: Any, buffer: int) -> None:
    given = documents()
    packing = Packing(length=LENGTH, strategy=strategy, buffer=buffer, seed=3)
    rows = PackedRows(given, packing)
    assert list(rows) == list(PackedStream(given, packing)) == list(pack(iter(given), packing))
    assert rows[-1] == rows[len(rows) - 1] == rows[-1:][0]
    real = sum(len(row["input_ids"]) for row in rows)
    assert rows.fill == real / (len(rows) * LENGTH)


def test_short_documents_fill_rows_nearly_whole_and_a_buffer_costs_little() -> None:
    given = documents(count=2000, longest=LENGTH // 2)
    assert PackedRows(given, Packing(length=LENGTH, buffer=2000)).fill > 0.995
    assert PackedRows(given, Packing(length=LENGTH, buffer=200)).fill > 0.98


@pytest.mark.parametrize("longest", [1, LENGTH])
def test_a_stream_holds_one_buffer_and_one_row_of_documents(longest: int) -> None:
    given = documents(count=2000, longest=longest)
    read = 0

    def counted() -> Iterator[dict[str, list[int]]]:
        nonlocal read
        for document in given:
            read += 1
            yield document

    taken, ahead = 0, []
    for row in pack(counted(), Packing(length=LENGTH, buffer=50)):
        taken += row["position_ids"].count(0)
        ahead.append(read - taken)
    assert taken == len(given)
    assert max(ahead) <= 50 + LENGTH


def test_the_seed_gives_the_order_of_rows_and_nothing_else() -> None:
    given = documents()
    one, same, other = (list(pack(given, Packing(length=LENGTH, seed=seed))) for seed in (1, 1, 2))
    assert one == same != other
    assert sorted(map(repr, one)) == sorted(map(repr, other))


def test_labels_and_other_columns_go_with_their_tokens() -> None:
    given = [
        {"input_ids": [1, 2, 3], "labels": [IGNORED, 2, 3], "weights": [0.5, 1.0, 2.0]},
        {"input_ids": (4, 5), "labels": [4, 5], "weights": [3.0, 4.0]},
    ]
    (row,) = pack(given, Packing(length=8))
    assert row == {
        "input_ids": [1, 2, 3, 4, 5],
        "labels": [IGNORED, 2, 3, IGNORED, 5],
        "weights": [0.5, 1.0, 2.0, 3.0, 4.0],
        "position_ids": [0, 1, 2, 0, 1],
    }
    (row,) = pack(given, Packing(length=8, causal=False))
    assert row["labels"] == [IGNORED, 2, 3, 4, 5]
    assert given[1]["labels"] == [4, 5], "the user's rows stay as they were"


def test_next_token_labels_are_made_where_rows_have_none() -> None:
    (row,) = pack([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}], Packing(length=8))
    assert row["labels"] == [IGNORED, 2, 3, IGNORED, 5]
    (row,) = pack([{"input_ids": [1, 2, 3]}], Packing(length=8, causal=False))
    assert row.keys() == {"input_ids", "position_ids"}


def test_padding_is_cut_away_on_either_side() -> None:
    padded = [
        {"input_ids": [0, 7, 8, 0], "attention_mask": [0, 1, 1, 0], "labels": [IGNORED, 7, 8, IGNORED]},
        {"input_ids": [9, 0, 0, 0], "attention_mask": [1, 0, 0, 0], "labels": [9, IGNORED, IGNORED, IGNORED]},
        {"input_ids": [0, 0, 0, 0], "attention_mask": [0, 0, 0, 0], "labels": [IGNORED] * 4},
    ]
    rows = list(PackedRows(padded, Packing(length=4)))
    assert rows == [{"input_ids": [7, 8, 9], "labels": [IGNORED, 8, IGNORED], "position_ids": [0, 1, 0]}]


def test_a_datasets_dataset_and_stream_are_packed_alike() -> None:
    given = documents(count=40)
    table = datasets.Dataset.from_list(given)
    packing = Packing(length=LENGTH)
    assert list(PackedRows(table, packing)) == list(PackedStream(table.to_iterable_dataset(), packing))
    assert list(PackedRows(table.with_format("torch"), packing)) == list(pack(given, packing))
    made = datasets.Dataset.from_list(list(pack(given, packing)))
    assert made[0]["position_ids"][0] == 0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"labels": [1]}, r"document 0 has no input_ids, only \['labels'\]"),
        ({"input_ids": [1, 2], "text": "ab"}, r"document 0: column 'text' does not hold one value .*remove_columns"),
        ({"input_ids": [1, 2], "labels": [1]}, "document 0: column 'labels' does not hold one value"),
        ({"input_ids": [1, 2], "label": 1}, "document 0: column 'label' does not hold one value"),
    ],
)
def test_a_row_that_is_no_document_is_refused_by_name(row: dict[str, Any], message: str) -> None:
    packing = Packing(length=LENGTH)
    with pytest.raises(ValueError, match=message):
        list(pack([row], packing))
    with pytest.raises(ValueError, match=message):
        PackedRows([row], packing)


def test_documents_of_different_columns_and_wrong_lengths_are_refused() -> None:
    mixed = [{"input_ids": [1, 2], "weights": [1, 1]}, {"input_ids": [1, 2]}]
    with pytest.raises(ValueError, match="documents have different columns"):
        list(pack(mixed, Packing(length=LENGTH)))
    rows = PackedRows([{"input_ids": [1, 2]}], Packing(length=LENGTH), lengths=[3])
    with pytest.raises(ValueError, match="document 0 has 2 tokens, but lengths says 3"):
        rows[0]
    with pytest.raises(ValueError, match="lengths has 1 entries for 2 documents"):
        PackedRows(mixed, Packing(length=LENGTH), lengths=[3])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 1}, "length=1"),
        ({"length": 8, "buffer": 0}, "buffer=0"),
        ({"length": 8, "strategy": "best_fit"}, "strategy='best_fit': must be one of 'first_fit', 'concatenate'"),
        ({"length": 8, "too_long": "truncate"}, "too_long='truncate': must be one of 'refuse', 'split'"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Packing(**options)


def test_tokens_per_batch_become_rows_or_are_refused_with_the_nearest_multiples() -> None:
    packing = Packing(length=512)
    assert packing.rows_per_batch(4096) == 8
    with pytest.raises(ValueError, match=r"tokens_per_batch=4000 is not a multiple of length=512: use 3584 or 4096"):
        packing.rows_per_batch(4000)
    with pytest.raises(ValueError, match="use 512 or 1024"):
        packing.rows_per_batch(100)
