"""Killed at any moment, also in a save, a run goes on from its last checkpoint as if it had not been."""

import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import tqdm
from forked import fork, kill_at_event, outcome_of
from small_runs import Outcome, differences, hashes, mask, outcome, run
from transformers.trainer_utils import get_last_checkpoint

from bareloop.trainer.checkpoint_files import faults

pytestmark = pytest.mark.usefixtures("frozen_heap")

IN_A_THREAD = {"async_checkpoints": True}
KILLED = {
    "at_once": {},
    "in_a_thread": {"options": IN_A_THREAD},
    "keeping_one": {"save_total_limit": 1, "save_steps": 2},
    # Logs at other steps than it saves: the loss of a step that was not logged yet is saved too.
    "exactly": {"options": IN_A_THREAD | {"stateful_loader": True}, "logging_steps": 2, "collate": mask},
}
MOMENTS = 5


@pytest.mark.parametrize("how", KILLED)
def test_a_run_killed_at_random_moments_goes_on_as_if_it_had_not_been(tmp_path: Path, how: str) -> None:
    settings, chance = KILLED[how], random.Random(how)
    counted, seconds = tmp_path / "counted", time.monotonic()
    never_killed = outcome(run(tmp_path / "whole", **settings))
    seconds = time.monotonic() - seconds

    def count() -> None:
        left = kill_at_event(counted, 10**9)
        run(counted, **settings)
        (tmp_path / "events").write_text(str(10**9 - left[0]))

    assert outcome_of(fork(count, tmp_path / "errors"), tmp_path / "errors") == 0
    events = int((tmp_path / "events").read_text())
    assert events > 50
    resumed_from = []
    for moment in range(MOMENTS):
        folder = tmp_path / str(moment)
        if moment < MOMENTS - 2:
            kill_in_a_save(folder, chance.randint(1, events), settings)
        else:
            kill_after(folder, chance.uniform(0.2, 1) * seconds, settings)
        resumed_from.append(assert_goes_on(folder, settings, never_killed, tmp_path / "whole"))
    assert len(set(resumed_from)) > 1, resumed_from


def kill_in_a_save(folder: Path, event: int, settings: dict[str, Any]) -> None:
    def child() -> None:
        kill_at_event(folder, event)
        run(folder, **settings)

    errors = folder.with_suffix(".errors")
    assert outcome_of(fork(child, errors), errors) == -signal.SIGKILL


def kill_after(folder: Path, seconds: float, settings: dict[str, Any]) -> None:
    """Kill a run that is `seconds` old; one that is over by then is run again, and killed sooner."""
    errors = folder.with_suffix(".errors")
    code = 0
    while code != -signal.SIGKILL:
        shutil.rmtree(folder, ignore_errors=True)
        child = fork(lambda: run(folder, **settings), errors)
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        code = outcome_of(child, errors)
        seconds *= 0.8


def assert_goes_on(folder: Path, settings: dict[str, Any], never_killed: Outcome, whole: Path) -> str:
    """Name of the checkpoint that the run was resumed from; "" where it was killed before there was one."""
    last = get_last_checkpoint(folder) if folder.is_dir() else None
    for checkpoint_folder in folder.glob("checkpoint-*"):
        assert faults(str(checkpoint_folder)) == []
    if last is not None and last.endswith("-10"):
        # It was over. (The stock trainer, resumed from its last checkpoint, trains for a step too many.)
        same = ("model.safetensors", "optimizer.pt", "rng_state.pth")
        ends = [{name: hashes(run / "checkpoint-10")[name] for name in same} for run in (folder, whole)]
        assert ends[0] == ends[1]
        return "checkpoint-10"
    resumed = run(folder, resume=last, **settings)
    assert differences(never_killed, outcome(resumed)) == []
    assert not [left for left in os.listdir(folder) if left.startswith("_")]
    return "" if last is None else Path(last).name


def test_killed_between_the_two_renames_of_a_step_that_is_saved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, save_steps=5)
    before = hashes(tmp_path / "checkpoint-10")

    def child() -> None:
        stock, renamed = os.rename, []

        def rename(source: Any, target: Any) -> None:
            stock(source, target)
            renamed.append(target)
            os.kill(os.getpid(), signal.SIGKILL)

        os.rename = rename
        run(tmp_path, save_steps=5, resume=str(tmp_path / "checkpoint-5"))

    assert outcome_of(fork(child, tmp_path / "errors"), tmp_path / "errors") == -signal.SIGKILL
    assert get_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-5")
    assert hashes(tmp_path / "_replaced-checkpoint-10") == before
    run(tmp_path, save_steps=5, resume=True)
    assert hashes(tmp_path / "checkpoint-10") == before


def test_a_child_killed_in_a_progress_bar_does_not_hold_up_its_parent(tmp_path: Path) -> None:
    def child() -> None:
        tqdm.tqdm.get_lock().acquire()
        os.kill(os.getpid(), signal.SIGKILL)

    lock = tqdm.tqdm.get_lock()
    assert outcome_of(fork(child, tmp_path / "errors"), tmp_path / "errors") == -signal.SIGKILL
    (shared, _) = lock.locks
    assert shared.acquire(timeout=5)
    shared.release()
