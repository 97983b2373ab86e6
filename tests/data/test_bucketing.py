"""Every index once, like lengths together, the same order wherever it is asked for: accelerate and the Trainer included."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from bareloop.data.bucketing import BucketSampler, bucket_batches, length_buckets

LENGTHS = [random.Random(index).randint(1, 200) for index in range(1003)]


def padded(batches: Sequence[Sequence[int]]) -> float:
    """Share of the tokens that is padding when each batch is padded to its longest row."""
    tokens = sum(len(batch) * max(LENGTHS[index] for index in batch) for batch in batches)
    return 1 - sum(LENGTHS) / tokens


@pytest.mark.parametrize(
    ("count", "batch_size", "window"), [(0, 4, 2), (1, 4, 2), (8, 4, 1), (1003, 8, 50), (1003, 7, 3)]
)
def test_every_index_comes_once_and_a_small_batch_comes_last(count: int, batch_size: int, window: int) -> None:
    batches = length_buckets(LENGTHS[:count], batch_size, window=window)
    assert sorted(index for batch in batches for index in batch) == list(range(count))
    assert [len(batch) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)
    sampler = BucketSampler(LENGTHS[:count], batch_size, window=window)
    assert list(sampler) == [index for batch in batches for index in batch]
    assert len(sampler) == count


def test_padding_shrinks_with_the_window() -> None:
    shares = [padded(length_buckets(LENGTHS, 8, window=window)) for window in (1, 4, 50)]
    assert shares[0] > 0.3 > shares[1] > shares[2]
    assert shares[2] < 0.03


def test_the_order_is_that_of_seed_and_epoch_and_leaves_torchs_generator_alone() -> None:
    before = torch.get_rng_state()
    random.seed(1)
    python = random.getstate()
    orders = [length_buckets(LENGTHS, 8, seed=seed, epoch=epoch) for seed, epoch in ((0, 0), (0, 0), (0, 1), (1, 0))]
    assert orders[0] == orders[1]
    assert len({repr(order) for order in orders}) == 3
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == python


def test_batches_are_shuffled_rather_than_sorted() -> None:
    longest = [max(LENGTHS[index] for index in batch) for batch in length_buckets(LENGTHS, 8)]
    assert longest != sorted(longest) and longest != sorted(longest, reverse=True)


def test_a_loader_takes_the_batches_and_drop_last() -> None:
    batches = bucket_batches(LENGTHS, 8, seed=5)
    assert [batch.tolist() for batch in DataLoader(range(1003), batch_sampler=batches)] == length_buckets(
        LENGTHS, 8, seed=5
    )
    dropping = bucket_batches(LENGTHS, 8, seed=5, drop_last=True)
    assert list(dropping) == length_buckets(LENGTHS, 8, seed=5)[:-1]


@pytest.mark.parametrize("form", ["sampler", "batch_sampler"])
def test_accelerate_deals_the_batches_out_to_two_ranks_in_the_same_order(form: str) -> None:
    count = 1000
    ranks = []
    for rank in range(2):
        options: dict[str, Any] = (
            {"batch_size": 8, "sampler": BucketSampler(LENGTHS[:count], 8)}
            if form == "sampler"
            else {"batch_sampler": bucket_batches(LENGTHS[:count], 8)}
        )
        loader = DataLoader(range(count), **options)
        prepared = prepare_data_loader(loader, num_processes=2, process_index=rank, put_on_device=False)
        prepared.set_epoch(3)
        ranks.append([batch.tolist() for batch in prepared])
    expected = length_buckets(LENGTHS[:count], 8, epoch=3)
    assert len(expected) == 125
    assert ranks[0] == expected[0::2]
    # 125 batches are one short for two ranks: accelerate repeats the first one.
    assert ranks[1][:-1] == expected[1::2] and ranks[1][-1] == expected[0]


def test_the_trainer_takes_the_sampler_and_sets_its_epoch(tmp_path: Path) -> None:
    seen: list[list[int]] = []

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))

        def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
            seen.append(rows.tolist())
            return {"loss": self.weight.square()}

    class Bucketed(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> BucketSampler:
            return BucketSampler(LENGTHS[:20], self.args.train_batch_size, window=2)

    args = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=8, num_train_epochs=2, report_to="none", use_cpu=True,
        save_strategy="no", disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    Bucketed(
        model=Model(), args=args, train_dataset=list(range(20)), data_collator=lambda rows: {"rows": torch.tensor(rows)}
    ).train()
    assert seen == [batch for epoch in (0, 1) for batch in length_buckets(LENGTHS[:20], 8, window=2, epoch=epoch)]


@pytest.mark.parametrize(("batch_size", "window", "message"), [(0, 1, "batch_size=0"), (1, 0, "window=0")])
def test_sizes_below_one_are_refused_when_the_sampler_is_made(batch_size: int, window: int, message: str) -> None:
    for make in (BucketSampler, bucket_batches, length_buckets):
        with pytest.raises(ValueError, match=message):
            make(LENGTHS, batch_size, window=window)
