"""Rows and collators of the matrix: text of the standard library as 64 tokens, scikit-learn's digits as images."""

import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import torch
from sklearn.datasets import load_digits
from transformers import BatchEncoding

__all__ = [
    "VOCABULARY",
    "Endless",
    "Once",
    "Stream",
    "StreamOfKnownLength",
    "digits",
    "encode",
    "held_out",
    "padded",
    "padded_as_encoding",
    "padded_with_extras",
    "padded_without_labels",
    "sentences",
    "table",
    "translations",
    "uniform",
    "words",
]

VOCABULARY = 64
PAD, IGNORED = 0, -100
SPECIAL = 2
"""Tokens 0 (padding) and 1 (end) come before those of the text."""


@cache
def source() -> str:
    """Text of a module of the standard library."""
    return Path(sysconfig.get_path("stdlib"), "textwrap.py").read_text(encoding="utf-8")


def encode(text: str) -> list[int]:
    return [SPECIAL + ord(letter) % (VOCABULARY - SPECIAL) for letter in text]


def words(count: int = 10, start: int = 0) -> list[dict[str, Any]]:
    """`count` rows of 5 to 12 tokens; the first 0 to 3 labels of a row do not count."""
    rows = []
    for index in range(start, start + count):
        tokens = encode(source()[20 * index : 20 * index + 5 + 7 * index % 8])
        ignored = index % 4
        rows.append({"input_ids": tokens, "labels": [IGNORED] * ignored + tokens[ignored:]})
    return rows


def held_out(count: int = 6) -> list[dict[str, Any]]:
    return words(count, start=100)


def uniform(count: int = 10) -> list[dict[str, Any]]:
    """Rows of 8 tokens."""
    rows = [encode(source()[20 * index : 20 * index + 8]) for index in range(count)]
    return [{"input_ids": tokens, "labels": tokens} for tokens in rows]


def table(count: int = 10) -> datasets.Dataset:
    """`words` as a table with the length of each row in a column of its own."""
    rows = words(count)
    return datasets.Dataset.from_list([{**row, "length": len(row["input_ids"])} for row in rows])


def sentences(count: int = 10) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": [source()[30 * index : 30 * index + 12] for index in range(count)]})


def translations(count: int = 8) -> list[dict[str, Any]]:
    """Rows for an encoder and decoder: some text, and its first tokens as labels."""
    return [{"input_ids": row["input_ids"], "labels": row["input_ids"][:4]} for row in words(count)]


def digits(count: int = 12) -> list[dict[str, Any]]:
    """Images of 64 grey values and their classes."""
    images, classes = load_digits(return_X_y=True)
    return [
        {"pixels": torch.tensor(image / 16, dtype=torch.float32), "labels": int(label)}
        for image, label in zip(images[:count], classes[:count], strict=True)
    ]


def padded(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Rows padded to the longest of the batch: input_ids[B, T], attention_mask[B, T] and labels[B, T]."""
    width = max(len(row["input_ids"]) for row in rows)
    tall = max(len(row["labels"]) for row in rows)

    def filled(tokens: list[int], to: int, value: int) -> list[int]:
        return tokens + [value] * (to - len(tokens))

    return {
        "input_ids": torch.tensor([filled(row["input_ids"], width, PAD) for row in rows]),
        "attention_mask": torch.tensor([filled([1] * len(row["input_ids"]), width, 0) for row in rows]),
        "labels": torch.tensor([filled(row["labels"], tall, IGNORED) for row in rows]),
    }


def padded_as_encoding(rows: list[dict[str, Any]]) -> BatchEncoding:
    """`padded` in the type that tokenizers give."""
    return BatchEncoding(padded(rows))


def padded_without_labels(rows: list[dict[str, Any]]) -> dict[str, Any]:
    batch = padded(rows)
    batch["targets"] = batch.pop("labels")
    return batch


def padded_with_extras(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch that holds more than tensors: text, a number, and tensors in a tuple in a mapping."""
    batch = padded(rows)
    return {**batch, "extras": {"name": "batch", "pair": (batch["labels"].ne(IGNORED), 2.5)}}


class Stream(torch.utils.data.IterableDataset):
    """Rows one after the other; no length."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


class StreamOfKnownLength(Stream):
    def __len__(self) -> int:
        return len(self.rows)


class Once(Stream):
    """Rows that can be read once, like those of a generator."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = iter(rows)


class Endless(Stream):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            yield from self.rows
