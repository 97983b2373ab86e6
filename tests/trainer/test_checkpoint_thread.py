"""A checkpoint that a thread writes is of the step that saved it, and training neither waits for it nor cuts it short."""

import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from small_runs import At, run

from bareloop.trainer import checkpoint
from bareloop.trainer.checkpoint_files import faults
from bareloop.trainer.checkpoint_thread import on_host
from bareloop.trainer.hf import lean

pytestmark = pytest.mark.usefixtures("frozen_heap")

IN_A_THREAD = {"async_checkpoints": True}


def writing() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "bareloop-checkpoint"]


def test_training_goes_on_while_a_thread_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write, names = threading.Event(), []

    def rename(place: Any, stock: Any = checkpoint._rename) -> None:
        assert may_write.wait(20), "training did not come to step 5"
        names.append((Path(place.folder).name, threading.current_thread() is threading.main_thread()))
        stock(place)

    monkeypatch.setattr(checkpoint, "_rename", rename)
    made = run(tmp_path, At(5, may_write.set), options=IN_A_THREAD)
    assert names == [(f"checkpoint-{step}", False) for step in (3, 6, 9, 10)]
    assert made._checkpoint_thread is None
    assert writing() == []


def test_a_save_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def rename(place: Any, stock: Any = checkpoint._rename) -> None:
        time.sleep(0.2)
        stock(place)

    def prepare(trainer: Any, place: Any, stock: Any = checkpoint._prepare) -> None:
        found.append(sorted(os.listdir(tmp_path)))
        stock(trainer, place)

    monkeypatch.setattr(checkpoint, "_rename", rename)
    monkeypatch.setattr(checkpoint, "_prepare", prepare)
    run(tmp_path, options=IN_A_THREAD, max_steps=6)
    assert found == [[], ["checkpoint-3"]]


def test_an_error_of_training_does_not_cut_a_save_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(Exception):
        pass

    def rename(place: Any, stock: Any = checkpoint._rename) -> None:
        time.sleep(0.2)
        stock(place)

    def stop() -> None:
        raise Stopped

    monkeypatch.setattr(checkpoint, "_rename", rename)
    with pytest.raises(Stopped):
        run(tmp_path, At(4, stop), options=IN_A_THREAD)
    (thread,) = writing()
    assert not thread.daemon  # so an interpreter that exits waits for it
    thread.join()
    assert os.listdir(tmp_path) == ["checkpoint-3"]
    assert faults(str(tmp_path / "checkpoint-3")) == []


def test_a_method_of_the_users_writes_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Reading(transformers.Trainer):
        def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
            super()._save(output_dir, state_dict)
            Path(output_dir, "size").write_text(str(Path(output_dir, "model.safetensors").stat().st_size))

    with caplog.at_level(logging.WARNING, "bareloop"):
        run(tmp_path, cls=lean(Reading), options=IN_A_THREAD)
    assert caplog.text.count("writes what") == 1
    assert "Reading._save writes at once" in caplog.text
    folder = tmp_path / "checkpoint-10"
    assert int((folder / "size").read_text()) == (folder / "model.safetensors").stat().st_size


def test_what_a_thread_writes_is_a_copy() -> None:
    shared = torch.arange(6.0)
    content = {
        "view": shared[1:5],
        "other": [shared.view(2, 3).t(), torch.nn.Parameter(shared)],
        "odd": (torch.tensor(2.5, dtype=torch.bfloat16), None, {"lr": 0.1}),
    }
    content["twice"] = content["odd"]
    kept = on_host(content)
    shared.zero_()
    content["odd"][2]["lr"] = 7
    assert kept["view"].tolist() == [1, 2, 3, 4]
    assert kept["other"][0].stride() == (1, 3)
    assert isinstance(kept["other"][1], torch.nn.Parameter)
    assert kept["view"].untyped_storage().data_ptr() == kept["other"][1].untyped_storage().data_ptr()
    assert kept["twice"] is kept["odd"]
    assert kept["odd"][2] == {"lr": 0.1}
