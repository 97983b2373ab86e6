"""What prefetching promises of order and errors, with copies that only write down when they ran; there is no device."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import TrainingArguments

from bareloop.trainer import transfer
from bareloop.trainer.hf import Trainer
from bareloop.trainer.options import LeanOptions


class Diary:
    """Copies that only say when they were started and finished."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def start(self, batch: int) -> int:
        self.lines.append(f"copy {batch}")
        return batch

    def finish(self, started: int) -> int:
        self.lines.append(f"hand out {started}")
        return started


def reading(diary: Diary, count: int, *, failing: bool = False) -> Iterator[int]:
    for batch in range(count):
        diary.lines.append(f"read {batch}")
        yield batch
    if failing:
        raise OSError("the disk is gone")


def used(diary: Diary, batches: Iterator[int]) -> list[int]:
    seen = []
    for batch in batches:
        diary.lines.append(f"use {batch}")
        seen.append(batch)
    return seen


@pytest.mark.parametrize("ahead", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
def test_every_batch_comes_once_in_order_and_is_copied_ahead_of_its_use(count: int, ahead: int) -> None:
    diary = Diary()
    assert used(diary, transfer.prefetched(reading(diary, count), diary, ahead)) == list(range(count))
    for batch in range(count):
        # The copy was started before the use of the batch `ahead` places before it.
        assert diary.lines.index(f"copy {batch}") < diary.lines.index(f"use {max(batch - ahead, 0)}")


def test_the_next_batch_is_read_only_after_the_work_on_this_one_was_queued() -> None:
    diary = Diary()
    used(diary, transfer.prefetched(reading(diary, 4), diary, 1))
    assert diary.lines.index("read 2") > diary.lines.index("use 0")
    assert diary.lines.index("read 3") > diary.lines.index("use 1")


def test_an_error_of_the_loader_comes_after_the_batches_before_it() -> None:
    diary, seen = Diary(), []
    with pytest.raises(OSError, match="the disk is gone"):
        for batch in transfer.prefetched(reading(diary, 3, failing=True), diary, 2):
            seen.append(batch)
    assert seen == [0, 1, 2]


def test_no_more_than_the_batches_asked_for_are_ahead() -> None:
    diary = Diary()
    batches = transfer.prefetched(reading(diary, 100), diary, 3)
    next(batches)
    assert [line for line in diary.lines if line.startswith("read")] == ["read 0", "read 1", "read 2", "read 3"]


def test_all_tensors_of_a_batch_are_found() -> None:
    first, second, third = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    batch: dict[str, Any] = {"a": first, "b": [{"c": second}, (third, "name", 3)], "d": None}
    assert [tensor.numel() for tensor in transfer._tensors(batch)] == [1, 2, 3]


def test_prefetching_without_an_accelerator_is_refused(tmp_path: Path) -> None:
    arguments = TrainingArguments(tmp_path, report_to=[], use_cpu=True)
    with pytest.raises(ValueError, match=r"prefetch_batches=2: on device cpu .* set it to 0"):
        Trainer(torch.nn.Linear(1, 1), arguments, lean_options=LeanOptions(prefetch_batches=2))


@pytest.mark.parametrize("value", [-1, 1.5, True])
def test_a_number_of_batches_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=f"prefetch_batches={value}"):
        LeanOptions(prefetch_batches=value)


def test_prefetching_excludes_the_loader_whose_state_it_would_outrun() -> None:
    with pytest.raises(ValueError, match=r"prefetch_batches=1 with stateful_loader=True: .* give one of the two"):
        LeanOptions(prefetch_batches=1, stateful_loader=True)


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            yield {"x": torch.zeros(1)}


def test_the_loader_is_told_to_leave_batches_on_the_host(tmp_path: Path) -> None:
    arguments = TrainingArguments(tmp_path, report_to=[], use_cpu=True, max_steps=1, dataloader_pin_memory=False)
    trainer = Trainer(torch.nn.Linear(1, 1), arguments, train_dataset=[{"x": torch.zeros(1)}] * 4)
    loader = transfer.on_host(trainer, trainer.get_train_dataloader())
    assert loader.device is None and len(loader) == 1


def test_a_loader_that_sends_batches_from_one_process_is_refused(tmp_path: Path) -> None:
    arguments = TrainingArguments(tmp_path, report_to=[], use_cpu=True, max_steps=1, dataloader_pin_memory=False)
    trainer = Trainer(torch.nn.Linear(1, 1), arguments, train_dataset=Endless())
    with pytest.raises(ValueError, match="dispatch_batches"):
        transfer.on_host(trainer, trainer.get_train_dataloader())
