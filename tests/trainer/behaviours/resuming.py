"""Resuming: a training that goes on from a checkpoint ends like one that was never stopped."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from behaviours.behaviour import in_area
from behaviours.reproducibility import Noisy
from behaviours.tasks import (
    Line,
    PretrainedLine,
    Stream,
    line_rows,
    logged,
    near,
    said,
    text_model,
    text_rows,
    trainer,
)

__all__ = ["BEHAVIOURS"]

LONG = {"num_train_epochs": 3, "save_steps": 1, "logging_steps": 1}
"""Twelve steps, four an epoch, a checkpoint at each."""


def _ran(built: Any, checkpoint: Any = None) -> Any:
    built.train(resume_from_checkpoint=checkpoint)
    return built


def _history(built: Any) -> list[dict]:
    return [{name: value for name, value in entry.items() if name in ("loss", "grad_norm", "learning_rate", "step")}
            for entry in built.state.log_history if "loss" in entry]  # fmt: skip


def _same(whole: Any, resumed: Any) -> None:
    assert near(resumed, whole, 0)
    assert _history(resumed) == _history(whole)
    assert resumed.state.global_step == whole.state.global_step
    assert resumed.state.epoch == whole.state.epoch


def resuming_inside_an_epoch_changes_nothing(cls: type[Any]) -> None:
    """Resumed from the first epoch, a later one, or between two, a training ends with equal weights, losses and
    state."""
    whole = _ran(trainer(cls, **LONG))
    for step in (2, 4, 7):
        _same(whole, _ran(trainer(cls, output_dir=f"again-{step}", **LONG), f"out/checkpoint-{step}"))


def resuming_works_for_a_plain_module(cls: type[Any]) -> None:
    """A module that is no pretrained model resumes alike."""
    whole = _ran(trainer(cls, Line(), **LONG))
    _same(whole, _ran(trainer(cls, Line(), output_dir="again", **LONG), "out/checkpoint-6"))


def resuming_restores_random_states(cls: type[Any]) -> None:
    """A model that draws random numbers goes on with the draws it would have made, inside and between epochs."""
    whole = _ran(trainer(cls, Noisy(), **LONG))
    for step in (3, 8):
        _same(whole, _ran(trainer(cls, Noisy(), output_dir=f"again-{step}", **LONG), f"out/checkpoint-{step}"))


def resuming_restores_the_optimizer(cls: type[Any]) -> None:
    """A resumed training's optimizer and scheduler end in the states of the whole training's."""
    whole = _ran(trainer(cls, **LONG))
    resumed = _ran(trainer(cls, output_dir="again", **LONG), "out/checkpoint-5")
    states = [built.optimizer.state_dict()["state"] for built in (whole, resumed)]
    for one, other in zip(*(state.values() for state in states), strict=True):
        assert all(torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name])) for name in one)
    assert resumed.lr_scheduler.state_dict() == whole.lr_scheduler.state_dict()


def resuming_keeps_the_order_of_the_data(cls: type[Any]) -> None:
    """The rows after the checkpoint are those that the whole training saw after it."""

    class Ordered(Line):
        def __init__(self) -> None:
            super().__init__()
            self.order: list[float] = []

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict:
            self.order += x.tolist()
            return super().forward(x, labels)

    whole = _ran(trainer(cls, Ordered(), **LONG))
    resumed = _ran(trainer(cls, Ordered(), output_dir="again", **LONG), "out/checkpoint-6")
    assert resumed.model.order == whole.model.order[6 * 8 :]


def resuming_keeps_windows_whole(cls: type[Any]) -> None:
    """With accumulation and a smaller last window a training resumes at a window's start."""
    settings = {"train_dataset": line_rows(40), "gradient_accumulation_steps": 2, "num_train_epochs": 2}
    whole = _ran(trainer(cls, save_steps=1, logging_steps=1, **settings))
    for step in (2, 4):
        again = trainer(cls, save_steps=1, logging_steps=1, output_dir=f"again-{step}", **settings)
        _same(whole, _ran(again, f"out/checkpoint-{step}"))


def resuming_keeps_parameters_frozen(cls: type[Any]) -> None:
    """Frozen parameters stay frozen and as they were."""

    def frozen() -> PretrainedLine:
        model = PretrainedLine(slope=1.5)
        model.slope.requires_grad_(False)
        return model

    whole = _ran(trainer(cls, frozen(), **LONG))
    resumed = _ran(trainer(cls, frozen(), output_dir="again", **LONG), "out/checkpoint-6")
    assert not resumed.model.slope.requires_grad
    _same(whole, resumed)


def resuming_reads_weights_in_parts(cls: type[Any]) -> None:
    """A checkpoint whose weights are split over files resumes alike."""
    whole = _ran(trainer(cls, **LONG))
    folder = Path("out/checkpoint-5")
    tensors = load_file(folder / "model.safetensors")
    files = {name: f"model-{at:05d}-of-00002.safetensors" for at, name in enumerate(tensors, 1)}
    for name, file in files.items():
        save_file({name: tensors[name]}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (folder / "model.safetensors").unlink()
    _same(whole, _ran(trainer(cls, output_dir="again", **LONG), str(folder)))


def resuming_takes_the_last_checkpoint(cls: type[Any]) -> None:
    """resume_from_checkpoint=True goes on from the last checkpoint of the output folder."""
    _ran(trainer(cls, save_steps=1, max_steps=3, logging_steps=1))
    resumed = _ran(trainer(cls, save_steps=1, max_steps=4, logging_steps=1), True)
    assert [entry["step"] for entry in resumed.state.log_history if "loss" in entry] == [1, 2, 3, 4]


def resuming_without_a_checkpoint_raises(cls: type[Any]) -> None:
    """resume_from_checkpoint=True raises where there is none, and a folder that is not there raises too."""
    with pytest.raises(ValueError, match="checkpoint"):
        _ran(trainer(cls), True)
    with pytest.raises((ValueError, OSError)):
        _ran(trainer(cls), "out/checkpoint-9")


def not_resuming_is_not_resuming(cls: type[Any]) -> None:
    """resume_from_checkpoint=False starts from the beginning, checkpoints or not."""
    whole = _ran(trainer(cls, **LONG))
    _same(whole, _ran(trainer(cls, output_dir="again", **LONG), False))


def a_finished_training_trains_no_further(cls: type[Any]) -> None:
    """Resuming from the last step takes no step more and keeps the weights."""
    whole = _ran(trainer(cls, save_steps=2))
    built = trainer(cls, save_steps=2)
    assert built.train(resume_from_checkpoint="out/checkpoint-4").global_step == 4
    assert near(built, whole, 0)


def a_longer_plan_goes_on(cls: type[Any]) -> None:
    """A training that max_steps ended goes on under a plan with more steps."""
    constant = {"lr_scheduler_type": "constant", "save_steps": 2, "logging_steps": 1, "gradient_accumulation_steps": 2}
    whole = _ran(trainer(cls, num_train_epochs=2, **constant))
    _ran(trainer(cls, max_steps=2, output_dir="short", **constant))
    _same(whole, _ran(trainer(cls, num_train_epochs=2, output_dir="again", **constant), "short/checkpoint-2"))


def other_arguments_are_warned_about(cls: type[Any]) -> None:
    """Resuming with other intervals and batch size names each with both values, and takes the new batch size."""
    _ran(trainer(cls, save_steps=2, per_device_train_batch_size=4))
    built = trainer(cls, save_steps=3, per_device_train_batch_size=8, num_train_epochs=4)
    with said() as heard:
        _ran(built, "out/checkpoint-2")
    warning = "\n".join(heard)
    assert "save_steps: 3 (from args) != 2" in warning
    assert "per_device_train_batch_size: 8 (from args) != 4" in warning
    assert built._train_batch_size == 8


def data_can_be_left_unskipped(cls: type[Any]) -> None:
    """ignore_data_skip starts the epoch's data from its beginning."""

    class Counting(Line):
        def __init__(self) -> None:
            super().__init__()
            self.batches = 0

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict:
            self.batches += 1
            return super().forward(x, labels)

    _ran(trainer(cls, Counting(), **LONG))
    resumed = _ran(trainer(cls, Counting(), output_dir="again", ignore_data_skip=True, **LONG), "out/checkpoint-6")
    assert resumed.state.global_step == 12
    assert resumed.model.batches == 6


def history_and_counts_go_on(cls: type[Any]) -> None:
    """History, operations and tokens go on from the checkpoint's; the mean loss is of the resumed steps alone."""
    settings = {
        "train_dataset": text_rows(16),
        "include_num_input_tokens_seen": "all",
        "per_device_train_batch_size": 4,
    }
    whole = _ran(trainer(cls, text_model(), save_steps=1, logging_steps=1, **settings))
    resumed = _ran(trainer(cls, text_model(), save_steps=1, logging_steps=1, output_dir="again", **settings),
                   "out/checkpoint-2")  # fmt: skip
    assert resumed.state.total_flos == whole.state.total_flos
    assert resumed.state.num_input_tokens_seen == whole.state.num_input_tokens_seen == 16 * 12
    steps = logged(resumed, "loss")
    assert logged(resumed, "train_loss")[-1] == pytest.approx(sum(steps[2:]) / 2, rel=1e-5)


def the_best_metric_is_kept(cls: type[Any]) -> None:
    """The best metric of before the checkpoint stays the best until a better one comes."""
    settings = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "eval_dataset": line_rows(8),
        "metric_for_best_model": "loss",
    }
    whole = _ran(trainer(cls, save_steps=1, **settings))
    again = trainer(cls, save_steps=1, num_train_epochs=2, **settings)
    again.train(resume_from_checkpoint="out/checkpoint-4")
    assert len(logged(again, "eval_loss")) == 8
    assert again.state.best_metric == min(logged(again, "eval_loss"))
    assert logged(again, "eval_loss")[:4] == logged(whole, "eval_loss")


def a_stream_is_resumed_by_reading_on(cls: type[Any]) -> None:
    """A stream resumes behind the rows that were trained on."""
    settings = {"train_dataset": Stream(line_rows(80)), "max_steps": 8, "save_steps": 2, "logging_steps": 1}
    whole = _ran(trainer(cls, **settings))
    _same(whole, _ran(trainer(cls, output_dir="again", **settings), "out/checkpoint-4"))


def a_gradient_scaler_is_resumed(cls: type[Any]) -> None:
    """The scale of fp16 training is saved and restored."""

    def scaled(output: str) -> Any:
        built = trainer(cls, fp16=True, output_dir=output, **LONG)
        built.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=4)
        built.accelerator.native_amp = True
        return built

    whole = _ran(scaled("out"))
    assert os.path.isfile("out/checkpoint-5/scaler.pt")
    resumed = _ran(scaled("again"), "out/checkpoint-5")
    assert resumed.accelerator.scaler.state_dict() == whole.accelerator.scaler.state_dict()
    _same(whole, resumed)


def dropout_is_resumed(cls: type[Any]) -> None:
    """A model with dropout resumes to equal losses."""
    settings = {"train_dataset": text_rows(16), "per_device_train_batch_size": 2, "save_steps": 2, "logging_steps": 1}
    whole = _ran(trainer(cls, text_model(), **settings))
    _same(whole, _ran(trainer(cls, text_model(), output_dir="again", **settings), "out/checkpoint-4"))


BEHAVIOURS = in_area(
    "resuming",
    resuming_inside_an_epoch_changes_nothing,
    resuming_works_for_a_plain_module,
    resuming_restores_random_states,
    resuming_restores_the_optimizer,
    resuming_keeps_the_order_of_the_data,
    resuming_keeps_windows_whole,
    resuming_keeps_parameters_frozen,
    resuming_reads_weights_in_parts,
    resuming_takes_the_last_checkpoint,
    resuming_without_a_checkpoint_raises,
    not_resuming_is_not_resuming,
    a_finished_training_trains_no_further,
    a_longer_plan_goes_on,
    other_arguments_are_warned_about,
    data_can_be_left_unskipped,
    history_and_counts_go_on,
    the_best_metric_is_kept,
    a_stream_is_resumed_by_reading_on,
    a_gradient_scaler_is_resumed,
    dropout_is_resumed,
)
