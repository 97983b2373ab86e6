"""Logging: when and what is logged, tokens and operations counted, memory, files of metrics, verbosity."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from behaviours.behaviour import in_area
from behaviours.tasks import (
    PretrainedLine,
    line_rows,
    logged,
    said,
    text_model,
    text_rows,
    tokenizer,
    trainer,
)

__all__ = ["BEHAVIOURS"]


def _ran(built: Any) -> Any:
    built.train()
    return built


def _steps(built: Any) -> list[int]:
    return [entry["step"] for entry in built.state.log_history if "loss" in entry]


def logs_come_when_asked_for(cls: type[Any]) -> None:
    """Losses are logged every logging_steps, also at the first step, after each epoch, or never."""
    assert _steps(_ran(trainer(cls, num_train_epochs=2, logging_steps=3))) == [3, 6]
    assert _steps(_ran(trainer(cls, num_train_epochs=2, logging_steps=3, logging_first_step=True))) == [1, 3, 6]
    assert _steps(_ran(trainer(cls, num_train_epochs=2, logging_strategy="epoch"))) == [4, 8]
    assert _steps(_ran(trainer(cls, num_train_epochs=2, logging_strategy="no"))) == []


def an_entry_has_loss_norm_rate_and_place(cls: type[Any]) -> None:
    """A log entry has loss, gradient norm, learning rate, epoch and step as plain numbers, in this order."""
    entry = _ran(trainer(cls, logging_steps=2)).state.log_history[0]
    assert list(entry) == ["loss", "grad_norm", "learning_rate", "epoch", "step"]
    assert [type(value) for value in entry.values()] == [float, float, float, float, int]


def the_last_entry_sums_up(cls: type[Any]) -> None:
    """The last entry has run time, rates, operations and the mean loss of the training."""
    last = _ran(trainer(cls)).state.log_history[-1]
    assert {"train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos", "train_loss"} <= set(
        last
    )


def the_last_logged_rate_is_the_one_used(cls: type[Any]) -> None:
    """The logged learning rate is the one of the step that was taken, not of the next one."""
    assert logged(_ran(trainer(cls, logging_steps=1)), "learning_rate") == pytest.approx([0.1, 0.075, 0.05, 0.025])


def log_can_be_overridden(cls: type[Any]) -> None:
    """An overridden log may add values, which reach history and callbacks."""

    class Adding(cls):
        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            logs["weight"] = self.model.slope.item()
            super().log(logs, start_time)

    built = _ran(trainer(Adding, logging_steps=2))
    assert len(logged(built, "weight")) == 3


def callbacks_may_change_an_entry(cls: type[Any]) -> None:
    """on_log gets the entry's values without the step."""
    entries: list[dict] = []

    def on_log(self: Any, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        entries.append(dict(logs))

    built = _ran(trainer(cls, logging_steps=2, callbacks=[type("Note", (TrainerCallback,), {"on_log": on_log})()]))
    assert [entry | {"step": step} for entry, step in zip(entries, (2, 4, 4), strict=True)] == built.state.log_history


def _text(cls: type[Any], rows: list[dict[str, Any]], **settings: Any) -> Any:
    return _ran(trainer(cls, text_model(), train_dataset=rows, per_device_train_batch_size=4, **settings))


def all_tokens_can_be_counted(cls: type[Any]) -> None:
    """include_num_input_tokens_seen="all", and True, count every input token and log the count."""
    for asked in ("all", True):
        built = _text(cls, text_rows(8, 12), include_num_input_tokens_seen=asked, logging_steps=1)
        assert built.state.num_input_tokens_seen == 96
        assert logged(built, "num_input_tokens_seen") == [48, 96, 96]
    assert _text(cls, text_rows(8, 12)).state.num_input_tokens_seen == 0


def padding_can_be_left_uncounted(cls: type[Any]) -> None:
    """ "non_padding" counts by the attention mask, or else by the tokenizer's padding token."""
    rows = [row | {"attention_mask": [1] * 7 + [0] * 5} for row in text_rows(8, 12)]
    settings = {"include_num_input_tokens_seen": "non_padding"}
    assert _text(cls, rows, **settings).state.num_input_tokens_seen == 56
    rows = [row | {"input_ids": row["input_ids"][:9] + [0] * 3} for row in text_rows(8, 12)]
    collator = trainer(cls, text_model()).data_collator
    built = _text(cls, rows, processing_class=tokenizer(), data_collator=collator, **settings)
    assert built.state.num_input_tokens_seen == 72


def padding_that_is_unknown_is_counted_with_a_warning(cls: type[Any]) -> None:
    """ "non_padding" without mask and padding token counts everything and says so."""
    with said() as heard:
        built = _text(cls, text_rows(8, 12), include_num_input_tokens_seen="non_padding")
    assert built.state.num_input_tokens_seen == 96
    assert any("non-padding" in message for message in heard)


def inputs_that_are_unknown_are_not_counted(cls: type[Any]) -> None:
    """Counting tokens of a model whose main input is not in the batch warns and counts nothing."""

    class Misnamed(PretrainedLine):
        main_input_name = "pixels"

    with said() as heard:
        built = _ran(trainer(cls, Misnamed(), include_num_input_tokens_seen="all"))
    assert built.state.num_input_tokens_seen == 0
    assert any("main_input_name" in message for message in heard)


def operations_are_counted(cls: type[Any]) -> None:
    """total_flos is six operations per parameter outside the embeddings and input token."""
    model = text_model()
    parameters = model.num_parameters(exclude_embeddings=True)
    built = _text(cls, text_rows(8, 12), logging_steps=1)
    assert built.state.total_flos == 6.0 * parameters * 96
    assert isinstance(built.state.total_flos, float)


def memory_is_measured_when_asked_for(cls: type[Any]) -> None:
    """skip_memory_metrics=False adds memory of building, training, evaluation and prediction to the metrics."""
    for skipped in (False, True):
        built = trainer(cls, skip_memory_metrics=skipped, eval_dataset=line_rows(8), max_steps=1)
        trained = built.train().metrics
        found = [
            "init_mem_cpu_alloc_delta" in trained,
            "train_mem_cpu_alloc_delta" in trained,
            "eval_mem_cpu_alloc_delta" in built.evaluate(),
            "test_mem_cpu_alloc_delta" in built.predict(line_rows(8)).metrics,
        ]
        assert found == [not skipped] * 4


def metrics_and_state_are_written(cls: type[Any]) -> None:
    """save_metrics, log_metrics and save_state write and print what they are given."""
    built = trainer(cls, logging_steps=2)
    metrics = built.train().metrics
    built.log_metrics("train", metrics)
    built.save_metrics("train", metrics)
    built.save_state()
    assert json.loads(Path("out/train_results.json").read_text())["train_loss"] == metrics["train_loss"]
    assert json.loads(Path("out/all_results.json").read_text())["epoch"] == 1.0
    assert json.loads(Path("out/trainer_state.json").read_text())["log_history"] == built.state.log_history


def verbosity_follows_the_arguments(cls: type[Any]) -> None:
    """log_level decides whether the plan of the training is logged."""
    heard_at = {}
    for level in ("info", "error"):
        heard: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record, heard=heard: heard.append(record.getMessage())
        logger = logging.getLogger("transformers")
        logger.addHandler(handler)
        try:
            _ran(trainer(cls, log_level=level, max_steps=1))
        finally:
            logger.removeHandler(handler)
        heard_at[level] = any("Running training" in message for message in heard)
    assert heard_at == {"info": True, "error": False}


def the_plan_is_logged(cls: type[Any]) -> None:
    """The plan names examples, epochs, batch size, accumulation, steps and parameters."""
    with said(logging.INFO) as heard:
        _ran(trainer(cls, gradient_accumulation_steps=2))
    plan = "\n".join(heard)
    for line in ("Num examples = 32", "Gradient Accumulation steps = 2", "Total optimization steps = 2"):
        assert line in plan, line


BEHAVIOURS = in_area(
    "logging",
    logs_come_when_asked_for,
    an_entry_has_loss_norm_rate_and_place,
    the_last_entry_sums_up,
    the_last_logged_rate_is_the_one_used,
    log_can_be_overridden,
    callbacks_may_change_an_entry,
    all_tokens_can_be_counted,
    padding_can_be_left_uncounted,
    padding_that_is_unknown_is_counted_with_a_warning,
    inputs_that_are_unknown_are_not_counted,
    operations_are_counted,
    memory_is_measured_when_asked_for,
    metrics_and_state_are_written,
    verbosity_follows_the_arguments,
    the_plan_is_logged,
)
