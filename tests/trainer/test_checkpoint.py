"""A save is the stock save's files, whole or not there, and training goes on from the checkpoint before."""

import errno
import functools
import json
import logging
import os
import resource
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from forked import two_ranks
from small_runs import At, differences, gpt2, hashes, outcome, run, trainer
from transformers import TrainerCallback

from bareloop.trainer import checkpoint
from bareloop.trainer.checkpoint_error import CheckpointError
from bareloop.trainer.checkpoint_files import faults
from bareloop.trainer.hf import Trainer, lean

pytestmark = pytest.mark.usefixtures("frozen_heap")

IN_A_THREAD = {"async_checkpoints": True}
HOW = pytest.mark.parametrize("options", [None, IN_A_THREAD], ids=["at_once", "in_a_thread"])


class Seen(TrainerCallback):
    """Notes the folders at each save."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(sorted(os.listdir(args.output_dir)))


class Watching(Seen):
    """Leaves a file in the newest of them, and saves again when an epoch ends."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_save(args, state, control, **kwargs)
        Path(args.output_dir, f"checkpoint-{state.global_step}", f"left_{len(self.seen)}").touch()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = True


BEST = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True, "metric_for_best_model": "loss"}
EARLY = BEST | {"save_total_limit": 1, "greater_is_better": True}
"""The first checkpoint is the best."""


@HOW
@pytest.mark.parametrize(
    "settings",
    [{}, {"save_total_limit": 2}, {"save_only_model": True, "save_strategy": "epoch"}, BEST, EARLY],
    ids=["plain", "limit", "only_model", "best", "best_is_early"],
)
def test_files_are_those_of_the_stock_trainer(tmp_path: Path, options: Any, settings: dict[str, Any]) -> None:
    # In one folder after the other: training_args.bin and the best checkpoint name it.
    folder, found, outcomes = tmp_path / "run", [], []
    for cls in (transformers.Trainer, Trainer):
        made = trainer(folder, cls=cls, options=options if cls is Trainer else None, **settings)
        if "eval_steps" in settings:
            made.add_callback(transformers.EarlyStoppingCallback(3))
        made.train()
        found.append({name: _without_clock(folder / name, value) for name, value in hashes(folder).items()})
        outcomes.append(outcome(made))
        shutil.rmtree(folder)
    assert found[0] == found[1]
    assert differences(*outcomes) == []


def _without_clock(path: Path, digest: str) -> Any:
    if path.name != "trainer_state.json":
        return digest
    state = json.loads(path.read_text(encoding="utf-8"))
    for line in state["log_history"]:
        for name in [name for name in line if name.endswith(("_runtime", "_per_second"))]:
            del line[name]
    return state


@HOW
def test_callbacks_see_the_checkpoint_whole_and_what_they_leave_in_it_stays(tmp_path: Path, options: Any) -> None:
    seen, found = [], []
    for cls in (transformers.Trainer, Trainer):
        watching = Watching()  # saves step 6 twice
        run(tmp_path / "run", watching, cls=cls, options=options if cls is Trainer else None)
        seen.append(watching.seen)
        found.append(hashes(tmp_path / "run"))
        shutil.rmtree(tmp_path / "run")
    assert seen[0] == seen[1]
    assert found[0] == found[1]
    assert found[1].keys() >= {"checkpoint-6/left_2", "checkpoint-6/left_3"}


@contextmanager
def no_room_for(size: int) -> Iterator[None]:
    """Files cannot become larger than `size` bytes: the system's own error, as from a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@HOW
@pytest.mark.parametrize("cls", [Trainer, "stock loop"], ids=["lean_loop", "stock_loop"])
def test_a_full_disk_is_one_error_and_training_goes_on_from_the_checkpoint_before(
    tmp_path: Path, options: Any, cls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cls != Trainer:
        monkeypatch.setattr("bareloop.trainer.hf._why_stock", lambda trainer: (SimpleNamespace(reason="it is asked"),))
    whole = run(tmp_path / "whole", model=gpt2(width=64), options=options)
    made = trainer(tmp_path / "run", model=gpt2(width=64), options=options)
    limits = no_room_for(100_000)

    def fill() -> None:
        checkpoint.finish(made)  # the save of step 3
        limits.__enter__()

    made.add_callback(At(4, fill))
    with pytest.raises(CheckpointError) as caught:
        try:
            made.train()
        finally:
            limits.__exit__(None, None, None)
    message = str(caught.value)
    assert "checkpoint-6 could not be written" in message
    assert f"the last whole checkpoint is {tmp_path / 'run' / 'checkpoint-3'}" in message
    assert os.listdir(tmp_path / "run") == ["checkpoint-3"]
    assert faults(str(tmp_path / "run" / "checkpoint-3")) == []
    # In a thread it may take until the end of a later step, but not until the end of training.
    assert made.state.global_step in ((6,) if options is None else range(6, 10))
    assert "bareloop-checkpoint" not in [thread.name for thread in threading.enumerate()]
    resumed = run(tmp_path / "run", resume=True, model=gpt2(width=64), options=options)
    assert differences(outcome(whole), outcome(resumed)) == []


def test_a_disk_that_is_full_at_the_last_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CheckpointError, match=r"checkpoint-3 could not be written: .*No space left.*no earlier"):
        run(tmp_path, At(2, lambda: monkeypatch.setattr(os, "fsync", fsync)))
    assert os.listdir(tmp_path) == []


def test_an_overridden_save_is_called_and_reaches_the_atomic_one(tmp_path: Path) -> None:
    class Card(transformers.Trainer):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            super()._save_checkpoint(model, trial)
            self.listed = sorted(os.listdir(self.args.output_dir))

    made = run(tmp_path, cls=lean(Card), options=IN_A_THREAD)
    assert made.listed[-1] in ("checkpoint-9", "checkpoint-10")
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-10", "checkpoint-3", "checkpoint-6", "checkpoint-9"]


def test_another_version_saves_as_the_stock_trainer_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checkpoint, "_TESTED_SAVE", "of another version")
    with caplog.at_level(logging.WARNING, "bareloop"):
        run(tmp_path)
    assert caplog.text.count("not atomic, since transformers.Trainer._save_checkpoint is not the tested one") == 1
    assert faults(str(tmp_path / "checkpoint-10")) == []
    with pytest.raises(ValueError, match=r"async_checkpoints=True: the stock save has to run, since .*set it to False"):
        trainer(tmp_path, options=IN_A_THREAD)


def test_a_checkpoint_is_not_pushed_before_it_is_whole(tmp_path: Path) -> None:
    made = trainer(tmp_path, options=IN_A_THREAD)
    made.args.push_to_hub, made.args.hub_strategy = True, transformers.trainer_utils.HubStrategy.EVERY_SAVE
    with pytest.raises(ValueError, match=r"hub_strategy='every_save'.*set hub_strategy='end'"):
        checkpoint.refuse_async(made)
    made.args.hub_strategy = transformers.trainer_utils.HubStrategy.END
    checkpoint.refuse_async(made)


def test_two_processes_save_as_the_stock_trainer_and_fail_together(tmp_path: Path) -> None:
    two_ranks(functools.partial(_as_two, tmp_path), tmp_path)
    stock = {name: value for name, value in hashes(tmp_path / "stock").items() if _same_in_each_folder(name)}
    assert "checkpoint-10/rng_state_1.pth" in stock
    for how in ("at_once", "in_a_thread"):
        assert {name: value for name, value in hashes(tmp_path / how).items() if _same_in_each_folder(name)} == stock


def _same_in_each_folder(name: str) -> bool:
    return not name.endswith(("training_args.bin", "trainer_state.json"))


def _as_two(folder: Path) -> None:
    settings: dict[str, Any] = {"save_total_limit": 2, "ddp_find_unused_parameters": False}
    run(folder / "stock", cls=transformers.Trainer, **settings)
    run(folder / "at_once", **settings)
    # A callback that one process has makes both wait, and none wait for ever.
    callback = Seen() if torch.distributed.get_rank() == 0 else None
    made = run(folder / "in_a_thread", callback, options=IN_A_THREAD, **settings)
    if callback is not None:
        assert [name for names in callback.seen for name in names if name.startswith("_")] == []
    failing = trainer(folder / "full", model=gpt2(width=64), **settings)
    if made.args.process_index == 0:
        failing.add_callback(At(3, no_room_for(100_000).__enter__))
    with pytest.raises(
        CheckpointError, match=["checkpoint-3 could not be written: ", "by another process"][made.args.process_index]
    ):
        failing.train()
    torch.distributed.barrier()
    assert os.listdir(folder / "full") == []
