"""With `stateful_loader` a resumed run is the run that was not stopped, to the bit, and reads no sample again."""

import functools
import logging
import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import transformers
from forked import two_ranks
from small_runs import Lines, Outcome, Stream, differences, mask, outcome, rows, stack, trainer

from bareloop.trainer.checkpoint_error import CheckpointError

pytestmark = pytest.mark.usefixtures("frozen_heap")

STATEFUL = {"stateful_loader": True}
BATCHES_PER_STEP, BATCH_SIZE = 2, 2


def run(folder: Path, resume: Path | None = None, **settings: Any) -> Any:
    """Logs at other steps than it saves, and masks at random where the batch is made."""
    settings = {"options": STATEFUL, "logging_steps": 2, "collate": mask} | settings
    made = trainer(folder, **settings)
    made.train(resume_from_checkpoint=None if resume is None else str(resume))
    return made


def not_stopped_and_resumed(folder: Path, step: int, data: Any, **settings: Any) -> tuple[Outcome, Outcome]:
    """`data()` makes the data set anew."""
    whole = outcome(run(folder / "whole", data=data(), **settings))
    return whole, outcome(run(folder / "resumed", folder / "whole" / f"checkpoint-{step}", data=data(), **settings))


def read(log: Path) -> list[int]:
    return [int(line) for line in log.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("step", [3, 6, 9], ids=["mid_epoch", "end_of_epoch", "second_epoch"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"accelerator_config": {"use_seedable_sampler": False}},
        {"train_sampling_strategy": "group_by_length"},
        {"logging_steps": 1, "max_grad_norm": 0.0, "bf16": True},
    ],
    ids=["seedable", "own_generator", "by_length", "bf16"],
)
def test_the_order_and_the_random_numbers_are_those_of_the_run_not_stopped(
    tmp_path: Path, step: int, settings: dict[str, Any]
) -> None:
    whole, resumed = not_stopped_and_resumed(tmp_path, step, functools.partial(Lines, 24), **settings)
    assert differences(whole, resumed) == []


def test_the_stock_trainer_draws_other_numbers_after_resuming(tmp_path: Path) -> None:
    """What the option is for. Where this fails, the stock trainer has learnt it."""
    settings = {"cls": transformers.Trainer, "options": None, "logging_steps": 1}
    whole, resumed = not_stopped_and_resumed(tmp_path, 3, functools.partial(Lines, 24), **settings)
    assert differences(whole, resumed)


def test_the_option_changes_no_result(tmp_path: Path) -> None:
    stock = run(tmp_path / "stock", cls=transformers.Trainer, options=None)
    assert differences(outcome(stock), outcome(run(tmp_path / "lean"))) == []


def test_the_stock_loop_resumes_from_the_state_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bareloop.trainer.hf._why_stock", lambda trainer: (SimpleNamespace(reason="it is asked"),))
    skips = transformers.trainer.skip_first_batches
    whole, resumed = not_stopped_and_resumed(tmp_path, 9, functools.partial(Lines, 24))
    assert differences(whole, resumed) == []
    assert transformers.trainer.skip_first_batches is skips


def test_no_sample_is_read_again(tmp_path: Path) -> None:
    for data in (Lines, Stream):
        folder, logs = (
            tmp_path / data.__name__,
            (tmp_path / f"whole_{data.__name__}", tmp_path / f"own_{data.__name__}"),
        )
        run(folder / "whole", data=data(24, logs[0]), max_steps=6)
        run(folder / "resumed", folder / "whole" / "checkpoint-3", data=data(24, logs[1]), max_steps=6)
        assert read(logs[1]) == read(logs[0])[3 * BATCHES_PER_STEP * BATCH_SIZE :]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("data", [Lines, Stream])
def test_workers_go_on_with_their_own_random_numbers(tmp_path: Path, workers: int, data: type) -> None:
    log = tmp_path / "log"
    settings = {"dataloader_num_workers": workers, "max_steps": 6}
    whole = outcome(run(tmp_path / "whole", data=data(24), **settings))
    resumed = run(tmp_path / "resumed", tmp_path / "whole" / "checkpoint-3", data=data(24, log), **settings)
    assert differences(whole, outcome(resumed)) == []
    assert len(read(log)) == len(set(read(log))) == 24 - 3 * BATCHES_PER_STEP * BATCH_SIZE


def test_workers_that_stay_for_the_next_epoch(tmp_path: Path) -> None:
    settings = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    whole = run(tmp_path / "whole", **settings)
    resumed = run(tmp_path / "resumed", tmp_path / "whole" / "checkpoint-3", **settings)
    assert differences(outcome(whole), outcome(resumed)) == []
    for each in (whole, resumed):  # else the garbage collector waits 5 s for each worker, as with torch's own loader
        each.callback_handler.train_dataloader.base_dataloader._iterator._shutdown_workers()


def test_workers_of_a_pass_that_is_left_end_with_it(tmp_path: Path) -> None:
    run(tmp_path, dataloader_num_workers=2, max_steps=2)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    ("workers", "collate"), [(0, stack), (2, mask)], ids=["in_the_process_without_chance", "in_workers"]
)
def test_an_iterable_without_a_state_is_read_again_and_goes_on_the_same(
    tmp_path: Path, workers: int, collate: Any
) -> None:
    settings = {"dataloader_num_workers": workers, "collate": collate}
    data = functools.partial(Stream, 24, forgets=True)
    whole, resumed = not_stopped_and_resumed(tmp_path, 3, data, **settings)
    assert differences(whole, resumed) == []


@pytest.mark.parametrize("step", [3, 9, 12])
def test_an_iterable_that_is_read_more_than_once(tmp_path: Path, step: int) -> None:
    """Nobody knows its length: 6 steps, so step 9 is in the second pass, and 12 at its end."""
    whole, resumed = not_stopped_and_resumed(tmp_path, step, functools.partial(Stream, 24), max_steps=15)
    assert differences(whole, resumed) == []


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("buffer", [None, 8], ids=["in_order", "shuffle_buffer"])
def test_streams_of_datasets(tmp_path: Path, workers: int, buffer: int | None) -> None:
    def data() -> Any:
        made = datasets.Dataset.from_dict({"input_ids": [row.tolist() for row in rows(24)]}).with_format("torch")
        stream = made.to_iterable_dataset(num_shards=4)
        return stream if buffer is None else stream.shuffle(seed=5, buffer_size=buffer)

    collate = mask if buffer is None else stack
    settings = {"dataloader_num_workers": workers, "collate": collate, "max_steps": 9}
    whole, resumed = not_stopped_and_resumed(tmp_path, 3, data, **settings)
    assert differences(whole, resumed) == []


def test_a_state_saved_otherwise_is_refused_or_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path / "whole", max_steps=3)
    folder = tmp_path / "whole" / "checkpoint-3"
    with pytest.raises(CheckpointError, match=r"dataloader_num_workers=0, and here it is 1: resume with 0"):
        run(tmp_path / "other", folder, dataloader_num_workers=1)
    with pytest.raises(CheckpointError, match=r"batch_size=2, and here it is 4"):
        run(tmp_path / "other", folder, per_device_train_batch_size=4)
    content = (folder / "loader_state.pt").read_bytes()
    (folder / "loader_state.pt").write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"not a whole checkpoint: loader_state\.pt is cut short"):
        run(tmp_path / "other", folder)
    (folder / "loader_state.pt").unlink()
    with caplog.at_level(logging.WARNING, "bareloop"):
        resumed = run(tmp_path / "other", folder, max_steps=6)
    assert "has no loader_state.pt" in caplog.text
    assert resumed.state.global_step == 6


def test_what_cannot_be_honoured_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="ignore_data_skip=True"):
        trainer(tmp_path, options=STATEFUL, ignore_data_skip=True)
    with pytest.raises(ValueError, match="set dataloader_in_order=True"):
        trainer(tmp_path, options=STATEFUL, dataloader_in_order=False, dataloader_num_workers=1)
    made = trainer(tmp_path, options=STATEFUL)
    monkeypatch.setattr(made.accelerator, "prepare", lambda loader: loader)
    with pytest.raises(
        ValueError, match=r"get_train_dataloader\(\) gives a DataLoader, not .*set stateful_loader=False"
    ):
        made.train()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs torchdata: pip install"):
        trainer(tmp_path, options=STATEFUL)


def test_two_processes_go_on_each_where_it_was(tmp_path: Path) -> None:
    two_ranks(functools.partial(_as_two, tmp_path), tmp_path)


def _as_two(folder: Path) -> None:
    for name, data, step, collate in (
        ("lines", functools.partial(Lines, 48), 3, mask),
        ("generator", functools.partial(Lines, 48), 6, mask),
        ("dispatched", functools.partial(Stream, 48), 3, mask),
        ("dispatched_twice", functools.partial(Stream, 48), 9, mask),
        ("sharded", functools.partial(Stream, 48, forgets=True), 3, stack),
    ):
        settings: dict[str, Any] = {"collate": collate, "ddp_find_unused_parameters": False}
        settings["accelerator_config"] = {
            "generator": {"use_seedable_sampler": False},
            "sharded": {"dispatch_batches": False},
        }.get(name)
        whole, resumed = not_stopped_and_resumed(folder / name, step, data, **settings)
        assert differences(whole, resumed) == [], name
