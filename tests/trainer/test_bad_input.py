"""Bad input: one clear error that names the thing and the way out, and what was trained before it is still there."""

import copy
import gc
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainingArguments
from transformers.utils import ModelOutput

from bareloop.trainer.hf import Trainer
from bareloop.trainer.loop import steps
from bareloop.trainer.options import LeanOptions

gc.collect()
gc.freeze()  # accelerate collects garbage in every `train()`, which takes 0.4 s over what is imported

ROWS = [{"x": torch.linspace(-1, 1, 3) * row, "labels": torch.tensor([float(row % 2)])} for row in range(16)]


class Line(nn.Module):
    """A regression that goes wrong at a micro-step of choice."""

    def __init__(self, *, wrong_from: int = 10**9, how: str = "nan") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line, self.wrong_from, self.how, self.calls = nn.Linear(3, 1), wrong_from, how, 0

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        self.calls += 1
        predicted = self.line(x)
        wrong = self.calls >= self.wrong_from
        if labels is None or (wrong and self.how == "no loss"):
            return ModelOutput(logits=predicted)
        loss = (predicted - labels).pow(2).mean()
        return ModelOutput(loss=loss * float("nan") if wrong else loss, logits=predicted)


class Rows(IterableDataset):
    """Rows without a length."""

    def __init__(self, rows: Iterable[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def trainer(folder: Path, model: nn.Module, data: Any, cls: type = Trainer, **changed: Any) -> Any:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 2,
        "per_device_train_batch_size": 4,
        "num_train_epochs": 1,
        "dataloader_pin_memory": False,
        "learning_rate": 0.01,
    }
    return cls(model, TrainingArguments(**settings | changed), train_dataset=data)


def squared_error(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    return (model.line(batch["x"]) - batch["labels"]).pow(2).sum(), len(batch["x"])


def after(optimizer_steps: int) -> dict[str, Tensor]:
    """The parameters after that many steps of `steps` without anything wrong."""
    model = Line()
    for step in steps(model, torch.optim.SGD(model.parameters(), 0.01), DataLoader(ROWS, 4), squared_error):
        if step.index + 1 == optimizer_steps:
            break
    return model.state_dict()


def test_a_model_without_a_loss_is_named_with_what_it_returns(tmp_path: Path) -> None:
    rows = [{"x": row["x"]} for row in ROWS]
    with pytest.raises(
        ValueError, match=r"returned no loss, only logits, for the inputs x: give the batches the labels"
    ):
        trainer(tmp_path, Line(), rows).train()


def test_a_model_that_returns_only_predictions_is_told_what_a_loss_is(tmp_path: Path) -> None:
    class Predicts(Line):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            return (self.line(x), labels)

    with pytest.raises(
        ValueError, match=r"The loss has the shape \[4, 1\]: the model or compute_loss is to return one"
    ):
        trainer(tmp_path, Predicts(), ROWS).train()


def test_what_was_trained_before_a_loss_failed_to_come_is_kept(tmp_path: Path) -> None:
    model, good = Line(wrong_from=3, how="no loss"), Line()
    made = trainer(tmp_path, model, ROWS)
    with pytest.raises(ValueError, match="returned no loss"):
        made.train()
    assert made.state.global_step == 2
    stopped = trainer(tmp_path, good, ROWS, transformers.Trainer)
    stopped.add_callback(StopAt(2))
    stopped.train()
    assert torch.equal(model.line.weight, good.line.weight)


class StopAt(transformers.TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **ignored: Any) -> None:
        control.should_training_stop = state.global_step == self.step


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (lambda loss, count: None, r"loss_fn returned None"),
        (lambda loss, count: (loss, count, 1), r"loss_fn returned .*it must return \(loss_sum, count\)"),
        (lambda loss, count: loss.item(), r"loss_fn returned .*it must return \(loss_sum, count\)"),
        (lambda loss, count: (loss.detach(), count), r"no gradient flows from"),
    ],
)
def test_a_loss_function_of_steps_that_returns_no_loss_is_told_so_and_nothing_is_lost(returned: Any, says: str) -> None:
    model, calls = Line(), []

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        calls.append(batch)
        return squared_error(model, batch) if len(calls) < 3 else returned(*squared_error(model, batch))

    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with pytest.raises(ValueError, match=says):
        for _ in steps(model, optimizer, DataLoader(ROWS, 4), loss_fn):
            pass
    for name, value in after(2).items():
        assert torch.equal(model.state_dict()[name], value)
    assert all(parameter.grad is None for parameter in model.parameters())
    going_on = [step.index for step in steps(model, optimizer, DataLoader(ROWS, 4), squared_error)]
    assert going_on == [0, 1, 2, 3]


def test_no_rows_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="train_dataset is empty: give at least one row"):
        trainer(tmp_path, Line(), []).train()


def test_an_iterable_without_rows_stops_with_a_word_and_trains_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Line()
    before = copy.deepcopy(model.state_dict())
    with caplog.at_level(logging.WARNING, logger="bareloop"):
        made = trainer(tmp_path, model, Rows([]), max_steps=5, accelerator_config={"dispatch_batches": False})
        made.train()
    assert made.state.global_step == 0
    assert any("no batch" in record.getMessage() and "empty" in record.getMessage() for record in caplog.records)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_an_iterable_without_rows_that_one_process_reads_for_all_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="train_dataset gave no row at all: is it empty"):
        trainer(tmp_path, Line(), Rows([]), max_steps=5).train()


def test_steps_without_a_batch_say_so() -> None:
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    spent = iter(DataLoader(ROWS, 4))
    list(spent)
    for batches in (spent, []):
        with pytest.raises(ValueError, match="batches has no batch"):
            list(steps(model, optimizer, batches, squared_error))


def test_epochs_of_data_of_unknown_length_are_refused_before_training(tmp_path: Path) -> None:
    for cls in (Trainer, transformers.Trainer):
        with pytest.raises(ValueError, match="max_steps"):
            trainer(tmp_path, Line(), Rows(ROWS), cls).train()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_nan_from_the_first_step_is_counted_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, accumulate: int
) -> None:
    with caplog.at_level(logging.WARNING, logger="bareloop"):
        made = trainer(tmp_path, Line(wrong_from=1), ROWS, gradient_accumulation_steps=accumulate)
        made.train()
    stock = trainer(tmp_path, Line(wrong_from=1), ROWS, transformers.Trainer, gradient_accumulation_steps=accumulate)
    stock.train()
    assert made.lean_report.non_finite_losses == 4
    assert any("4 micro-steps had a loss of NaN" in record.getMessage() for record in caplog.records)
    # What stock logs is unchanged: a loss of 0, as if nothing had happened.
    assert [line["loss"] for line in made.state.log_history[:-1]] == [0.0] * (2 // accumulate)
    assert [line["loss"] for line in stock.state.log_history[:-1]] == [0.0] * (2 // accumulate)


def test_nan_is_in_the_log_without_the_filter(tmp_path: Path) -> None:
    made = trainer(tmp_path, Line(wrong_from=3), ROWS, logging_nan_inf_filter=False)
    made.train()
    first, second = (line["loss"] for line in made.state.log_history[:-1])
    assert first == first and second != second
    assert made.lean_report.non_finite_losses == 0


def test_nan_in_steps_is_what_the_caller_reads() -> None:
    model = Line()

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        loss, count = squared_error(model, batch)
        return loss * float("nan"), count

    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    seen = list(steps(model, optimizer, DataLoader(ROWS, 4), loss_fn, max_norm=1.0))
    assert len(seen) == 4 and all(step.loss.isnan() and step.gradient_norm.isnan() for step in seen)


@pytest.mark.parametrize("options", [{"async_checkpoints": True}, True, LeanOptions])
def test_lean_options_of_another_kind_are_refused(tmp_path: Path, options: Any) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    with pytest.raises(TypeError, match=r"lean_options=.* give it a LeanOptions"):
        Trainer(Line(), arguments, lean_options=options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prefetch_batches": 2}, r"prefetch_batches=2: .*set it to 0"),
        ({"streaming_metrics": lambda batch: {}}, r"streaming_metrics .*give compute_metrics too"),
    ],
)
def test_an_option_that_this_run_cannot_honour_is_refused_when_the_trainer_is_built(
    tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    with pytest.raises(ValueError, match=says):
        Trainer(Line(), arguments, lean_options=LeanOptions(**options))
