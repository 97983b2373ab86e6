"""Extra losses in the log equal the means that a callback of the test takes from the same run by hand."""

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import TrainingArguments
from transformers.utils import ModelOutput

from bareloop.trainer.hf import Trainer, lean
from bareloop.trainer.options import LeanOptions

gc.collect()
gc.freeze()  # accelerate collects garbage in every `train()`, which takes 0.4 s over what is imported

ROWS = [{"x": torch.linspace(-1, 1, 4) * row, "labels": torch.tensor([float(row % 3)])} for row in range(22)]


class Regression(nn.Module):
    """Returns two parts of its loss in a mapping, one more by name, and writes down what it returned in training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line, self.returned = nn.Linear(4, 1), []

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        predicted = self.line(x)
        fit, size = (predicted - labels).pow(2).mean(), self.line.weight.pow(2).mean()
        if self.training:
            self.returned.append((fit.item(), size.item()))
        return ModelOutput(loss=fit + 0.1 * size, logits=predicted, parts={"fit": fit, "size": size}, twice=2 * fit)


def arguments(folder: Path, **changed: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 2,
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**settings | changed)


def trained(
    folder: Path, model: nn.Module, trainer: type = Trainer, names: Any = ("parts", "twice"), **changed: Any
) -> Any:
    made = trainer(
        model, arguments(folder, **changed), train_dataset=ROWS, lean_options=LeanOptions(log_extra_losses=names)
    )
    made.train()
    return made


def test_logged_values_are_the_means_over_the_micro_steps_since_the_last_log(tmp_path: Path) -> None:
    model = Regression()
    logs = [line for line in trained(tmp_path, model).state.log_history if "learning_rate" in line]
    # 22 rows in micro-batches of 3 are 8 per epoch, 2 to a step and 4 to a log.
    assert len(model.returned) == 16 and len(logs) == 4
    for place, line in enumerate(logs):
        fits, sizes = zip(*model.returned[4 * place : 4 * place + 4], strict=True)
        assert line["fit"] == pytest.approx(sum(fits) / 4, rel=1e-6)
        assert line["size"] == pytest.approx(sum(sizes) / 4, rel=1e-6)
        assert line["twice"] == pytest.approx(2 * sum(fits) / 4, rel=1e-6)


def test_everything_else_of_the_run_is_the_stock_run(tmp_path: Path) -> None:
    ours, theirs = Regression(), Regression()
    lines = trained(tmp_path, ours).state.log_history
    stock = transformers.Trainer(theirs, arguments(tmp_path), train_dataset=ROWS)
    stock.train()
    clock = ("runtime", "per_second")
    assert [
        {key: value for key, value in line.items() if key not in ("fit", "size", "twice") and not key.endswith(clock)}
        for line in lines
    ] == [{key: value for key, value in line.items() if not key.endswith(clock)} for line in stock.state.log_history]
    assert torch.equal(ours.line.weight, theirs.line.weight)


def test_evaluation_neither_counts_nor_takes_extra_losses_for_predictions(tmp_path: Path) -> None:
    model, shapes = Regression(), []

    def look(prediction: transformers.EvalPrediction) -> dict[str, float]:
        shapes.append(prediction.predictions.shape)
        return {}

    made = Trainer(
        model,
        arguments(tmp_path, eval_strategy="steps", eval_steps=3, logging_steps=4, per_device_eval_batch_size=5),
        train_dataset=ROWS,
        eval_dataset=ROWS[:9],
        compute_metrics=look,
        lean_options=LeanOptions(log_extra_losses=("parts", "twice")),
    )
    made.train()
    line = next(line for line in made.state.log_history if "learning_rate" in line)
    assert line["fit"] == pytest.approx(sum(fit for fit, _ in model.returned[:8]) / 8, rel=1e-6)
    assert shapes and set(shapes) == {(9, 1)}


def test_a_second_call_of_train_starts_from_nothing(tmp_path: Path) -> None:
    model = Regression()
    made = trained(tmp_path, model, logging_steps=5)  # 8 steps: three of them are after the last log
    model.returned.clear()
    made.train()
    line = next(line for line in made.state.log_history if "learning_rate" in line)
    assert line["fit"] == pytest.approx(sum(fit for fit, _ in model.returned[:10]) / 10, rel=1e-6)


class OwnLoss(transformers.Trainer):
    """Returns its parts beside the loss; one of them only every second time."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        kinds = {"fit": outputs["parts"]["fit"]}
        if len(model.returned) % 2:
            kinds["seldom"] = torch.tensor(float(len(model.returned)))
        return (loss, outputs) if return_outputs else (loss, {"kinds": kinds})


def test_compute_loss_returns_them_beside_the_loss_and_each_is_averaged_over_its_own_count(tmp_path: Path) -> None:
    model = Regression()
    made = trained(tmp_path, model, lean(OwnLoss), ("kinds",))
    first, second, *_ = [line for line in made.state.log_history if "learning_rate" in line]
    assert first["fit"] == pytest.approx(sum(fit for fit, _ in model.returned[:4]) / 4, rel=1e-6)
    assert (first["seldom"], second["seldom"]) == ((1 + 3) / 2, (5 + 7) / 2)


def test_evaluation_that_calls_compute_loss_as_training_does_is_not_counted(tmp_path: Path) -> None:
    class AsTrlDoes(OwnLoss):
        def prediction_step(self, model: Any, inputs: Any, *positional: Any, **named: Any) -> Any:
            with torch.no_grad():
                loss = self.compute_loss(model, self._prepare_inputs(inputs))
            return loss, None, None

    model = Regression()
    made = lean(AsTrlDoes)(
        model,
        arguments(tmp_path, eval_strategy="steps", eval_steps=1),
        train_dataset=ROWS,
        eval_dataset=ROWS[:9],
        lean_options=LeanOptions(log_extra_losses=("kinds",)),
    )
    made.train()
    line = next(line for line in made.state.log_history if "learning_rate" in line)
    assert line["fit"] == pytest.approx(sum(fit for fit, _ in model.returned[:4]) / 4, rel=1e-6)


def test_no_host_read_is_added_to_a_step(tmp_path: Path) -> None:
    class Quiet(Regression):
        def forward(self, x: Tensor, labels: Tensor) -> Any:
            predicted = self.line(x)
            fit = (predicted - labels).pow(2).mean()
            return ModelOutput(loss=fit, logits=predicted, parts={"fit": fit, "half": fit / 2})

    def reads(names: tuple[str, ...]) -> int:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            trained(tmp_path, Quiet(), names=names, logging_steps=4)
        return sum(event.count for event in profile.key_averages() if event.key == "aten::_local_scalar_dense")

    # `tolist` on the CPU reads memory without the operator, so a log adds none either.
    assert reads(("parts",)) == reads(())


def broken(change: Callable[[dict[str, Any]], Any]) -> nn.Module:
    class Broken(Regression):
        def forward(self, x: Tensor, labels: Tensor) -> Any:
            return change(dict(super().forward(x, labels)))

    return Broken()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda out: {**out, "parts": {"loss": out["loss"]}}, r"'loss' is a name of the stock log"),
        (lambda out: {**out, "parts": {"eval_fit": out["loss"]}}, r"'eval_fit' is a name of the stock log"),
        (lambda out: {**out, "parts": {"fit": out["logits"]}}, r"'fit' must be a 0-d tensor, got shape \(3, 1\)"),
        (lambda out: {**out, "parts": {"fit": 1.0}}, r"'fit' must be a 0-d tensor, got float"),
        (lambda out: {"loss": out["loss"], "logits": out["logits"]}, r"no 'parts' in the outputs, only loss, logits"),
        (lambda out: (out["loss"], out["logits"]), r"the outputs are a tuple without names"),
        (lambda out: {**out, "parts": {"twice": out["loss"]}}, r"name the loss 'twice' twice"),
    ],
)
def test_a_bad_extra_loss_is_one_clear_error(tmp_path: Path, change: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        trained(tmp_path, broken(change))


def test_compute_loss_that_returns_the_loss_alone_is_told_so(tmp_path: Path) -> None:
    class Alone(transformers.Trainer):
        def compute_loss(self, *positional: Any, **named: Any) -> Any:
            return super().compute_loss(*positional, **named)

    with pytest.raises(ValueError, match=r"returned the loss alone; return \(loss, \{name: value"):
        trained(tmp_path, Regression(), lean(Alone))


@pytest.mark.parametrize("names", [("loss",), ("grad_norm",), ("train_kl",), "kl", ("kl", "kl"), (1,), ("",)])
def test_bad_names_are_refused_when_the_options_are_built(names: Any) -> None:
    with pytest.raises(ValueError, match="log_extra_losses"):
        LeanOptions(log_extra_losses=names)


def test_options_are_off_by_default(tmp_path: Path) -> None:
    made = Trainer(copy.deepcopy(Regression()), arguments(tmp_path), train_dataset=ROWS)
    made.train()
    assert not any("fit" in line for line in made.state.log_history)
