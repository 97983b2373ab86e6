"""Columns without a real token: counting and cutting them."""

import collections
import sys
import types

import pytest
import torch

from bareloop.diagnosis.causes.padding_to_maximum import CAUSE, trimmed
from bareloop.diagnosis.substitution import NothingToReplace
from bareloop.trace import StepFacts

PATCHES = "bareloop.profiler.probes.patches"


def step(beyond, tokens=512, width=64, longest=20):
    return StepFacts(index=1, tokens=tokens, padded_beyond_longest=beyond, width=width, longest=longest)


def test_a_tenth_of_the_tokens_is_reported(make_trace):
    evidence = CAUSE.detect(make_trace(steps=(step(352), step(320, longest=24)), padding_share=0.75))
    assert evidence is not None
    assert evidence.counts["padded_beyond_longest_share"] == pytest.approx(672 / 1024)
    assert (evidence.counts["width"], evidence.counts["longest"]) == (64, 24)
    assert evidence.counts["padding_share"] == 0.75


@pytest.mark.parametrize("steps", [(), (step(0),), (step(50),), (step(None),), (step(5, tokens=None),)])
def test_less_is_not(make_trace, steps):
    assert CAUSE.detect(make_trace(steps=steps)) is None


def test_the_fix_names_the_argument_of_the_version(make_trace):
    def fix(version):
        trace = make_trace(framework="transformers", packages={"transformers": version}, steps=(step(400),))
        return CAUSE.fix(trace, CAUSE.detect(trace))

    assert "group_by_length=True" in fix("4.52.4")
    assert 'train_sampling_strategy="group_by_length"' in fix("5.24.0")


def padded(width=32, lengths=(5, 9)):
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.arange(1, length + 1)
    return ids


def test_a_dictionary_is_cut_behind_the_longest_row():
    ids = padded()
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.tensor([0, 1]), "name": "x"}
    result = trimmed(batch)
    assert result["input_ids"].tolist() == ids[:, :10].tolist()
    assert result["attention_mask"].shape == (2, 10)
    assert result["labels"] is batch["labels"] and result["name"] == "x"
    assert batch["input_ids"].shape == (2, 32), "the loader's own batch is left alone"


def test_labels_that_are_longer_than_the_input_are_kept():
    ids, labels = padded(), torch.full((2, 32), -100)
    labels[0, :20] = torch.arange(20)
    assert trimmed({"input_ids": ids, "labels": labels})["labels"].shape == (2, 21)


def test_left_padding_goes_by_the_mask():
    ids = padded().flip(1)
    result = trimmed({"input_ids": ids, "attention_mask": (ids != 0).long()})
    assert result["input_ids"].tolist() == ids[:, 23:].tolist()


def test_tuples_named_tuples_and_user_dictionaries():
    ids = padded()
    pair = collections.namedtuple("pair", ["ids", "target"])(ids, torch.tensor([1.0, 2.0]))
    assert trimmed(pair).ids.shape == (2, 10) and type(trimmed(pair)) is type(pair)
    assert trimmed([ids, torch.tensor([1, 2])])[0].shape == (2, 10)
    user = collections.UserDict(input_ids=ids)
    assert trimmed(user)["input_ids"].shape == (2, 10) and user["input_ids"].shape == (2, 32)


@pytest.mark.parametrize(
    "batch",
    [
        {"input_ids": padded(10, (10, 9))},
        (torch.randn(4, 8), torch.randn(4, 8)),
        torch.randn(4),
        {"input_ids": padded(), "mask": torch.ones(2, 1, 32, 32)},
        "text",
    ],
    ids=["no padding", "floats", "one dimension", "square mask", "no tensor"],
)
def test_other_batches_come_back_as_they_are(batch):
    assert trimmed(batch) is batch


def test_the_loaders_override_is_set_and_taken_back(monkeypatch):
    patches = types.ModuleType(PATCHES)
    patches.batch_override = None
    monkeypatch.setitem(sys.modules, PATCHES, patches)
    with CAUSE.ablate({}):
        assert patches.batch_override is trimmed
    assert patches.batch_override is None
    monkeypatch.delitem(sys.modules, PATCHES)
    with pytest.raises(NothingToReplace), CAUSE.ablate({}):
        pass
