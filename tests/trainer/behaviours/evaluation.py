"""Evaluation and prediction: losses, metrics, outputs, when they run, and that they disturb nothing."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from behaviours.behaviour import in_area
from behaviours.tasks import (
    Line,
    PretrainedLine,
    Stream,
    line_rows,
    logged,
    losses,
    near,
    text_model,
    text_rows,
    trainer,
)

__all__ = ["BEHAVIOURS"]

ROWS = line_rows(22, seed=3)
X, Y = (np.array([row[name] for row in ROWS]) for name in ("x", "labels"))
TRUE_LOSS = float(((2 * X + 0.5 - Y) ** 2).mean())


def _line(cls: type[Any], model: nn.Module | None = None, **settings: Any) -> Any:
    """A trainer of y = 2 x + 0.5 with 22 rows to evaluate in batches of 4."""
    defaults = {"eval_dataset": ROWS, "per_device_eval_batch_size": 4}
    return trainer(cls, model or PretrainedLine(slope=2.0, intercept=0.5), **(defaults | settings))


def _closeness(prediction: Any) -> dict[str, float]:
    predictions, labels = prediction
    return {"close": float((np.abs(predictions - labels) < 1.5).mean())}


def _true_closeness(shift: float = 0.0) -> float:
    return float((np.abs(2 * X + 0.5 + shift - Y) < 1.5).mean())


def the_loss_is_the_mean_over_all_rows(cls: type[Any]) -> None:
    """evaluate() gives the mean loss over all rows, the incomplete last batch among them."""
    metrics = _line(cls).evaluate()
    assert metrics["eval_loss"] == pytest.approx(TRUE_LOSS, rel=1e-5)


def metrics_are_computed_over_all_predictions(cls: type[Any]) -> None:
    """compute_metrics gets all predictions and labels once, and its results are prefixed."""
    assert _line(cls, compute_metrics=_closeness).evaluate()["eval_close"] == pytest.approx(_true_closeness())


def predictions_can_be_changed_before_the_metrics(cls: type[Any]) -> None:
    """preprocess_logits_for_metrics sees each batch's outputs and labels, and the loss stays."""
    shifted = _line(cls, compute_metrics=_closeness, preprocess_logits_for_metrics=lambda logits, labels: logits + 1)
    metrics = shifted.evaluate()
    assert metrics["eval_close"] == pytest.approx(_true_closeness(1.0))
    assert metrics["eval_loss"] == pytest.approx(TRUE_LOSS, rel=1e-5)


def predict_returns_outputs_labels_and_metrics(cls: type[Any]) -> None:
    """predict() gives predictions, labels and metrics with the prefix test."""
    output = _line(cls, compute_metrics=_closeness).predict(ROWS)
    assert np.allclose(output.predictions, 2 * X + 0.5)
    assert np.array_equal(output.label_ids, Y)
    assert output.metrics["test_close"] == pytest.approx(_true_closeness())
    assert output.metrics["test_loss"] == pytest.approx(TRUE_LOSS, rel=1e-5)


def prefixes_can_be_chosen(cls: type[Any]) -> None:
    """metric_key_prefix names the metrics of evaluate() and predict()."""
    built = _line(cls, compute_metrics=_closeness)
    assert {"dev_loss", "dev_close", "dev_runtime"} <= set(built.evaluate(metric_key_prefix="dev"))
    assert {"last_loss", "last_close"} <= set(built.predict(ROWS, metric_key_prefix="last").metrics)


def rows_without_labels_can_be_predicted(cls: type[Any]) -> None:
    """Without labels predict() gives predictions, and neither labels nor a loss."""
    output = _line(cls).predict([{"x": row["x"]} for row in ROWS])
    assert np.allclose(output.predictions, 2 * X + 0.5)
    assert output.label_ids is None
    assert "test_loss" not in output.metrics


class Several(Line):
    """Two outputs, two labels."""

    def forward(self, x: torch.Tensor, labels: Any = None, labels_2: Any = None) -> dict:
        y = x * self.slope + self.intercept
        outputs = {"first": y, "second": {"doubled": 2 * y}}
        return outputs if labels is None else {"loss": nn.functional.mse_loss(y, labels), **outputs}


def several_outputs_and_labels_are_kept_apart(cls: type[Any]) -> None:
    """Outputs and labels come back as tuples in their order, nested ones nested."""
    rows = [row | {"labels_2": -row["labels"]} for row in ROWS]
    output = _line(cls, Several(2.0, 0.5), label_names=["labels", "labels_2"]).predict(rows)
    first, second = output.predictions
    assert np.allclose(first, 2 * X + 0.5)
    assert np.allclose(second["doubled"], 2 * (2 * X + 0.5))
    assert np.array_equal(output.label_ids[0], Y)
    assert np.array_equal(output.label_ids[1], -Y)


def label_names_are_found_in_the_forward(cls: type[Any]) -> None:
    """Parameters of the forward with label in their name are the labels; label_names overrides that."""
    assert _line(cls, Several()).label_names == ["labels", "labels_2"]
    assert _line(cls, Several(), label_names=["labels"]).label_names == ["labels"]


def outputs_can_be_ignored(cls: type[Any]) -> None:
    """ignore_keys leaves outputs out of the predictions; the model's config can say which by default."""
    built = _line(cls, Several(2.0, 0.5), label_names=["labels"])
    assert isinstance(built.predict(ROWS).predictions, tuple)
    assert np.allclose(built.predict(ROWS, ignore_keys=["second"]).predictions, 2 * X + 0.5)
    model = PretrainedLine(slope=2.0)
    model.config.keys_to_ignore_at_inference = ["predictions"]
    assert _line(cls, model).predict(ROWS).predictions in (None, ())


def outputs_can_be_ignored_during_training(cls: type[Any]) -> None:
    """ignore_keys_for_eval of train() reaches the evaluations in it."""
    kinds: list[type] = []

    def note(prediction: Any) -> dict[str, float]:
        kinds.append(type(prediction.predictions))
        return {}

    settings = {"label_names": ["labels"], "eval_strategy": "epoch", "compute_metrics": note}
    built = _line(cls, Several(), **settings)
    built.train(ignore_keys_for_eval=["second"])
    built.train()
    assert kinds == [np.ndarray, tuple]


def the_loss_alone_needs_no_predictions(cls: type[Any]) -> None:
    """prediction_loss_only keeps no predictions, so no metrics are computed."""

    def never(prediction: Any) -> dict[str, float]:
        raise AssertionError("has no predictions")

    metrics = _line(cls, prediction_loss_only=True, compute_metrics=never).evaluate()
    assert metrics["eval_loss"] == pytest.approx(TRUE_LOSS, rel=1e-5)


class Batchwise:
    """Counts close predictions batch by batch, as batch_eval_metrics wants it."""

    def __init__(self) -> None:
        self.close, self.rows, self.calls = 0, 0, 0

    def __call__(self, prediction: Any, compute_result: bool) -> dict[str, float]:
        predictions, labels = prediction
        self.calls += 1
        self.close += int(((predictions - labels).abs() < 1.5).sum())
        self.rows += len(labels)
        return {"close": self.close / self.rows} if compute_result else {}


def metrics_can_be_computed_batch_by_batch(cls: type[Any]) -> None:
    """batch_eval_metrics calls compute_metrics with each batch's tensors and asks for the result at the last one."""
    metrics = Batchwise()
    result = _line(cls, compute_metrics=metrics, batch_eval_metrics=True).evaluate()
    assert result["eval_close"] == pytest.approx(_true_closeness())
    assert (metrics.calls, metrics.rows) == (6, 22)


def predictions_are_kept_beside_batch_metrics(cls: type[Any]) -> None:
    """predict() with batch_eval_metrics still returns all predictions."""
    output = _line(cls, compute_metrics=Batchwise(), batch_eval_metrics=True).predict(ROWS)
    assert np.allclose(output.predictions, 2 * X + 0.5)
    assert output.metrics["test_close"] == pytest.approx(_true_closeness())


def metrics_can_see_inputs_and_losses(cls: type[Any]) -> None:
    """include_for_metrics hands inputs and losses to compute_metrics."""

    def check(prediction: Any) -> dict[str, float]:
        return {"inputs": float(prediction.inputs.sum()), "losses": float(prediction.losses.mean())}

    result = _line(cls, compute_metrics=check, include_for_metrics=["inputs", "loss"]).evaluate()
    assert result["eval_inputs"] == pytest.approx(X.sum(), rel=1e-5)
    assert result["eval_losses"] == pytest.approx(TRUE_LOSS, rel=1e-4)


def outputs_can_be_moved_to_the_host_in_between(cls: type[Any]) -> None:
    """eval_accumulation_steps changes no prediction."""
    output = _line(cls, eval_accumulation_steps=2).predict(ROWS)
    assert np.allclose(output.predictions, 2 * X + 0.5)
    assert np.array_equal(output.label_ids, Y)


def batches_can_stay_apart(cls: type[Any]) -> None:
    """eval_do_concat_batches=False returns the predictions as a list of batches."""
    output = _line(cls, eval_do_concat_batches=False).predict(ROWS)
    assert [len(batch) for batch in output.predictions] == [4, 4, 4, 4, 4, 2]


def outputs_can_be_gathered_as_objects(cls: type[Any]) -> None:
    """eval_use_gather_object trains, evaluates and predicts."""
    built = _line(cls, eval_use_gather_object=True, eval_strategy="epoch")
    built.train()
    assert "eval_loss" in built.evaluate()
    assert len(built.predict(ROWS).predictions) == 22


class Widths(nn.Module):
    """Outputs as wide as the batch's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict:
        return {"loss": nn.functional.mse_loss(x * self.factor, labels), "predictions": x * self.factor}


def batches_of_other_widths_are_padded(cls: type[Any]) -> None:
    """Predictions and labels of unequal widths are filled up with -100, with and without eval_accumulation_steps."""
    rows = [{"x": [float(at)] * (1 + at // 4), "labels": [1.0] * (1 + at // 4)} for at in range(12)]
    for more in ({}, {"eval_accumulation_steps": 2}):
        output = _line(cls, Widths(), **more).predict(rows)
        for row, predicted, labels in zip(rows, output.predictions, output.label_ids, strict=True):
            width = len(row["x"])
            assert predicted.tolist() == [2 * row["x"][0]] * width + [-100.0] * (3 - width)
            assert labels.tolist() == [1.0] * width + [-100.0] * (3 - width)


def streams_can_be_evaluated_and_predicted(cls: type[Any]) -> None:
    """Data without a length, with a column too many and an incomplete last batch, is evaluated and predicted whole."""
    rows = [row | {"extra": 1.0} for row in ROWS]
    built = _line(cls, eval_dataset=Stream(rows), compute_metrics=_closeness)
    metrics = built.evaluate()
    assert metrics["eval_loss"] == pytest.approx(TRUE_LOSS, rel=1e-5)
    assert metrics["eval_close"] == pytest.approx(_true_closeness())
    assert np.allclose(built.predict(Stream(rows)).predictions, 2 * X + 0.5)


def several_sets_are_evaluated_by_name(cls: type[Any]) -> None:
    """Each of several evaluation sets has metrics under its name, alone and during training."""
    sets = {"small": ROWS[:6], "large": ROWS}
    metrics = _line(cls, eval_dataset=sets, compute_metrics=_closeness).evaluate()
    assert metrics["eval_large_loss"] == pytest.approx(TRUE_LOSS, rel=1e-5)
    assert {"eval_small_loss", "eval_small_close", "eval_large_close"} <= set(metrics)
    built = _line(cls, eval_dataset=sets, eval_strategy="epoch")
    built.train()
    assert len(logged(built, "eval_small_loss")) == len(logged(built, "eval_large_loss")) == 1


def other_sets_can_be_evaluated(cls: type[Any]) -> None:
    """evaluate() takes a set, or sets by name, in place of the trainer's."""
    built = _line(cls, eval_dataset=None)
    assert built.evaluate(ROWS)["eval_loss"] == pytest.approx(TRUE_LOSS, rel=1e-5)
    assert built.evaluate({"a": ROWS, "b": ROWS[:4]})["eval_a_loss"] == pytest.approx(TRUE_LOSS, rel=1e-5)


def evaluation_comes_when_asked_for(cls: type[Any]) -> None:
    """Evaluations come every eval_steps and once more at the end, or after each epoch, or first of all."""
    by_steps = _line(cls, num_train_epochs=2, eval_strategy="steps", eval_steps=3)
    by_epoch = _line(cls, num_train_epochs=2, eval_strategy="epoch")
    first = _line(cls, eval_on_start=True, eval_strategy="epoch")
    steps = []
    for built in (by_steps, by_epoch, first):
        built.train()
        steps.append([entry["step"] for entry in built.state.log_history if "eval_loss" in entry])
    assert steps == [[3, 6, 8], [4, 8], [0, 4]]


def evaluation_can_be_delayed(cls: type[Any]) -> None:
    """eval_delay holds the first evaluation back by steps or epochs."""
    by_steps = _line(cls, num_train_epochs=2, eval_strategy="steps", eval_steps=2, eval_delay=5)
    by_epoch = _line(cls, num_train_epochs=2, eval_strategy="epoch", eval_delay=2)
    steps = []
    for built in (by_steps, by_epoch):
        built.train()
        steps.append([entry["step"] for entry in built.state.log_history if "eval_loss" in entry])
    assert steps == [[6, 8], [8]]


def evaluation_does_not_disturb_training(cls: type[Any]) -> None:
    """A training with evaluations in it gives the losses and weights of one without."""
    settings = {"train_dataset": text_rows(), "per_device_train_batch_size": 4, "logging_steps": 1}
    plain, evaluated = (
        trainer(cls, text_model(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0), **settings, **more)
        for more in ({}, {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": text_rows(4)})
    )
    plain.train()
    evaluated.train()
    assert losses(evaluated) == losses(plain)
    assert near(evaluated, plain, 0)


def the_model_is_in_the_right_mode(cls: type[Any]) -> None:
    """The model is in evaluation mode in evaluations and in training mode in the steps after them."""
    modes: list[bool] = []

    class Modes(Line):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict:
            modes.append(self.training)
            return super().forward(x, labels)

    _line(cls, Modes(), eval_dataset=ROWS[:4], eval_strategy="steps", eval_steps=2).train()
    assert modes == [True, True, False, True, True, False]


def evaluation_works_before_and_after_training(cls: type[Any]) -> None:
    """evaluate() before training changes nothing about it, and after it shows the trained model."""
    early, plain = _line(cls), _line(cls)
    before = early.evaluate()["eval_loss"]
    early.train()
    plain.train()
    assert near(early, plain, 0)
    assert before == pytest.approx(TRUE_LOSS, rel=1e-5)
    assert early.evaluate()["eval_loss"] < before


def evaluation_methods_can_be_overridden(cls: type[Any]) -> None:
    """evaluate, evaluation_loop and prediction_step of a subclass are used during training."""
    calls: list[str] = []

    class Own(cls):
        def evaluate(self, *args: Any, **settings: Any) -> Any:
            calls.append("evaluate")
            return super().evaluate(*args, **settings) | {"eval_own": 1.0}

        def evaluation_loop(self, *args: Any, **settings: Any) -> Any:
            calls.append("evaluation_loop")
            return super().evaluation_loop(*args, **settings)

        def prediction_step(self, *args: Any, **settings: Any) -> Any:
            calls.append("prediction_step")
            return super().prediction_step(*args, **settings)

    built = _line(Own, eval_dataset=ROWS[:8], eval_strategy="epoch")
    built.train()
    assert calls == ["evaluate", "evaluation_loop", "prediction_step", "prediction_step"]


def evaluation_can_run_in_half_precision(cls: type[Any]) -> None:
    """bf16_full_eval casts the model for evaluation outside training, and training inside stays in float32."""
    built = _line(cls, bf16_full_eval=True)
    built.train()
    assert built.model.slope.dtype == torch.float32
    built.evaluate()
    assert built.model.slope.dtype == torch.bfloat16


def rows_are_counted_for_the_rates(cls: type[Any]) -> None:
    """The rates of an evaluation are its rows and batches over its time."""
    metrics = _line(cls).evaluate()
    seconds = metrics["eval_runtime"]
    assert metrics["eval_samples_per_second"] / metrics["eval_steps_per_second"] == pytest.approx(22 / 6, rel=0.01)
    assert metrics["eval_samples_per_second"] == pytest.approx(22 / seconds, rel=0.1)


BEHAVIOURS = in_area(
    "evaluation and prediction",
    the_loss_is_the_mean_over_all_rows,
    metrics_are_computed_over_all_predictions,
    predictions_can_be_changed_before_the_metrics,
    predict_returns_outputs_labels_and_metrics,
    prefixes_can_be_chosen,
    rows_without_labels_can_be_predicted,
    several_outputs_and_labels_are_kept_apart,
    label_names_are_found_in_the_forward,
    outputs_can_be_ignored,
    outputs_can_be_ignored_during_training,
    the_loss_alone_needs_no_predictions,
    metrics_can_be_computed_batch_by_batch,
    predictions_are_kept_beside_batch_metrics,
    metrics_can_see_inputs_and_losses,
    outputs_can_be_moved_to_the_host_in_between,
    batches_can_stay_apart,
    outputs_can_be_gathered_as_objects,
    batches_of_other_widths_are_padded,
    streams_can_be_evaluated_and_predicted,
    several_sets_are_evaluated_by_name,
    other_sets_can_be_evaluated,
    evaluation_comes_when_asked_for,
    evaluation_can_be_delayed,
    evaluation_does_not_disturb_training,
    the_model_is_in_the_right_mode,
    evaluation_works_before_and_after_training,
    evaluation_methods_can_be_overridden,
    evaluation_can_run_in_half_precision,
    rows_are_counted_for_the_rates,
)
