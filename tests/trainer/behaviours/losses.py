"""Losses: accumulation, counting of items, label smoothing, own losses, clipping, precision, recomputation."""

import math
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from behaviours.behaviour import in_area
from behaviours.tasks import (
    Events,
    Line,
    PretrainedLine,
    line_rows,
    llama_model,
    logged,
    losses,
    near,
    said,
    text_model,
    text_rows,
    trainer,
    weights,
)

__all__ = ["BEHAVIOURS"]

WHOLE = {"per_device_train_batch_size": 8}
SPLIT = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}


def _ran(built: Any) -> Any:
    built.train()
    return built


def _text(cls: type[Any], model: nn.Module | None = None, **settings: Any) -> Any:
    defaults = {"optim": "sgd", "logging_steps": 1, "train_dataset": text_rows(16, ragged=True)}
    return trainer(cls, model or text_model(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0), **(defaults | settings))


def equal_splits_of_a_batch_train_alike(cls: type[Any]) -> None:
    """A batch in equal micro-batches gives the weights of the whole batch, for a loss that is a mean over rows."""
    assert near(_ran(trainer(cls, **SPLIT)), _ran(trainer(cls, **WHOLE)))


def uneven_labels_are_averaged_over_the_window(cls: type[Any]) -> None:
    """For a model that takes the count of items, micro-batches with unequal labels give the whole batch's loss and
    weights."""
    split, whole = _ran(_text(cls, **SPLIT)), _ran(_text(cls, **WHOLE))
    assert losses(split) == pytest.approx(losses(whole), rel=1e-5)
    assert near(split, whole, 1e-5)


def a_model_without_counts_averages_micro_batches(cls: type[Any]) -> None:
    """For a model that takes no count, the loss of a window is the mean of its micro-batches' losses."""
    split, whole = _text(cls, **SPLIT), _text(cls, **WHOLE)
    split.model_accepts_loss_kwargs = whole.model_accepts_loss_kwargs = False
    assert losses(_ran(split)) != pytest.approx(losses(_ran(whole)), rel=1e-3)
    seen: list[float] = []

    class Noting(cls):
        def training_step(self, *args: Any, **settings: Any) -> Any:
            loss = super().training_step(*args, **settings)
            seen.append(loss.item() * self.current_gradient_accumulation_steps)
            return loss

    noting = _text(Noting, **SPLIT)
    noting.model_accepts_loss_kwargs = False
    assert losses(_ran(noting)) == pytest.approx([sum(seen[at : at + 4]) / 4 for at in (0, 4)], rel=1e-5)


def a_model_can_say_that_it_takes_no_counts(cls: type[Any]) -> None:
    """accepts_loss_kwargs=False on the model keeps the count from it."""
    model = text_model()
    model.accepts_loss_kwargs = False
    assert trainer(cls, model).model_accepts_loss_kwargs is False
    assert trainer(cls, text_model()).model_accepts_loss_kwargs is True


def shifted_labels_are_counted_shifted(cls: type[Any]) -> None:
    """A causal model predicts no first token, so the first label of a row is not counted."""
    counts: list[int] = []

    class Noting(cls):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            counts.append(int(num_items_in_batch))
            return super().training_step(model, inputs, num_items_in_batch)

    rows = text_rows(8, ragged=True)
    _ran(_text(Noting, llama_model(), train_dataset=rows, **SPLIT))
    assert counts == [sum(label != -100 for row in rows for label in row["labels"][1:])] * 4


def a_loss_function_gets_labels_and_count(cls: type[Any]) -> None:
    """compute_loss_func gets outputs, labels and the window's count, and its loss is trained on."""
    seen: list[tuple[Any, ...]] = []

    def summed(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        seen.append((set(outputs), tuple(labels.shape), int(num_items_in_batch)))
        return nn.functional.mse_loss(outputs["predictions"], labels, reduction="sum") / num_items_in_batch

    split = _ran(trainer(cls, compute_loss_func=summed, **SPLIT))
    assert seen == [({"predictions"}, (2,), 8)] * 16
    assert near(split, _ran(trainer(cls, **WHOLE)))


def a_loss_function_without_labels_is_warned_about(cls: type[Any]) -> None:
    """compute_loss_func is called without labels where there are none, with a warning."""
    rows = [{"x": row["x"]} for row in line_rows(8)]

    def own(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        assert labels is None
        return (outputs["predictions"] - 1).square().mean()

    with said() as heard:
        _ran(trainer(cls, train_dataset=rows, compute_loss_func=own))
    assert any("labels=None" in message for message in heard)


def an_own_loss_can_say_that_it_is_scaled(cls: type[Any]) -> None:
    """loss_is_scaled_for_ga decides whether the loss is divided by the number of micro-batches."""

    class Unscaled(cls):
        loss_is_scaled_for_ga = False

    class Scaled(cls):
        loss_is_scaled_for_ga = True

    settings = {"optim": "sgd", "max_grad_norm": 1e9, "logging_steps": 1}
    unscaled, scaled = (_ran(trainer(kind, max_steps=1, **SPLIT, **settings)) for kind in (Unscaled, Scaled))
    assert losses(scaled)[0] == pytest.approx(4 * losses(unscaled)[0])
    assert logged(scaled, "grad_norm")[0] == pytest.approx(4 * logged(unscaled, "grad_norm")[0])


def training_and_evaluation_have_one_loss(cls: type[Any]) -> None:
    """training_step and prediction_step give the same loss for the same batch."""
    built = _text(cls, llama_model())
    built.create_optimizer()
    rows = text_rows(4, ragged=True)
    batch = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
    items = batch["labels"][:, 1:].ne(-100).sum()
    predicted = built.prediction_step(built.model, dict(batch), prediction_loss_only=True)[0]
    trained = built.training_step(built.model, dict(batch), items)
    assert torch.allclose(trained, predicted)


def logged_losses_are_means_since_the_last_log(cls: type[Any]) -> None:
    """Each logged loss is the mean over the steps since the last one, and their mean is the result's."""
    single, even, uneven = (_ran(trainer(cls, num_train_epochs=2, logging_steps=every)) for every in (1, 4, 3))
    steps = losses(single)
    assert losses(even) == pytest.approx([sum(steps[:4]) / 4, sum(steps[4:]) / 4], rel=1e-5)
    assert losses(uneven) == pytest.approx([sum(steps[:3]) / 3, sum(steps[3:6]) / 3], rel=1e-5)
    means = [logged(built, "train_loss")[0] for built in (single, even, uneven)]
    assert means == pytest.approx([sum(steps) / 8] * 3, rel=1e-5)


def labels_can_be_smoothed(cls: type[Any]) -> None:
    """label_smoothing_factor mixes the loss with the mean over all classes, shifted for causal models."""
    rows = text_rows(8, ragged=True)
    model = llama_model()
    batch = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
    with torch.no_grad():
        scores = model(input_ids=batch["input_ids"]).logits[:, :-1].log_softmax(-1)
    labels = batch["labels"][:, 1:]
    kept = labels != -100
    right = -scores.gather(-1, labels.clamp(min=0)[..., None])[..., 0][kept].mean()
    anything = -scores.mean(-1)[kept].mean()
    built = _ran(_text(cls, model, train_dataset=rows, label_smoothing_factor=0.2, max_steps=1))
    assert losses(built)[0] == pytest.approx((0.8 * right + 0.2 * anything).item(), rel=1e-5)


def labels_of_several_kinds_are_not_smoothed(cls: type[Any]) -> None:
    """Label smoothing is switched off with a warning for a model of multi-label classification."""
    model = text_model()
    model.config.problem_type = "multi_label_classification"
    with pytest.warns(UserWarning, match="smoothing"):
        built = _text(cls, model, label_smoothing_factor=0.1)
    assert built.label_smoother is None


def gradients_are_clipped(cls: type[Any]) -> None:
    """max_grad_norm bounds the gradient that the optimizer sees; the norm before clipping is logged."""
    settings = {
        "optim": "sgd",
        "learning_rate": 1.0,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "max_steps": 1,
    }
    built = _ran(trainer(cls, max_grad_norm=0.5, **settings))
    moved = math.hypot(*(value.item() for value in weights(built).values()))
    assert moved == pytest.approx(0.5, rel=1e-4)
    assert logged(built, "grad_norm")[0] > 3


def clipping_by_0_does_not_clip(cls: type[Any]) -> None:
    """max_grad_norm=0 leaves gradients as they are and still logs their norm."""
    settings = {
        "optim": "sgd",
        "learning_rate": 1.0,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "max_steps": 1,
    }
    built = _ran(trainer(cls, max_grad_norm=0, **settings))
    moved = math.hypot(*(value.item() for value in weights(built).values()))
    assert moved == pytest.approx(logged(built, "grad_norm")[0], rel=1e-5)


def callbacks_see_clipped_gradients(cls: type[Any]) -> None:
    """on_pre_optimizer_step comes after clipping and before the step; on_optimizer_step before gradients are emptied."""
    norms: dict[str, list[float]] = {"pre_optimizer_step": [], "optimizer_step": [], "step_end": []}

    class Norms(Events):
        def _norm(self, event: str, model: nn.Module) -> None:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            norms[event].append(math.hypot(*(gradient.item() for gradient in gradients)))

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
            self._norm("pre_optimizer_step", model)

        def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
            self._norm("optimizer_step", model)

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
            self._norm("step_end", model)

    _ran(trainer(cls, max_grad_norm=0.25, callbacks=[Norms()], max_steps=2))
    assert norms["pre_optimizer_step"] == pytest.approx([0.25, 0.25], rel=1e-4)
    assert norms["optimizer_step"] == pytest.approx([0.25, 0.25], rel=1e-4)
    assert norms["step_end"] == [0, 0]


def losses_that_are_no_numbers_are_filtered_from_logs(cls: type[Any]) -> None:
    """logging_nan_inf_filter keeps NaN and infinite losses out of the logs, and off shows them."""

    class Breaking(PretrainedLine):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict:
            self.calls += 1
            outputs = super().forward(x, labels)
            broken = {2: float("nan"), 3: float("inf")}.get(self.calls, 0.0)
            return outputs | {"loss": outputs["loss"].detach() * 0 + outputs["loss"] * 0 + 1 + broken}

    settings = {"logging_steps": 2, "learning_rate": 0.0}
    assert losses(_ran(trainer(cls, Breaking(), **settings))) == [0.75, 0.5]
    shown = losses(_ran(trainer(cls, Breaking(), logging_nan_inf_filter=False, **settings)))
    assert all(math.isnan(loss) for loss in shown)


def bf16_computes_low_and_keeps_high(cls: type[Any]) -> None:
    """bf16=True multiplies in bfloat16 under autocast and keeps the weights in float32."""
    kinds: set[torch.dtype] = set()
    model = text_model()
    model.transformer.h[0].mlp.c_fc.register_forward_hook(lambda module, inputs, output: kinds.add(output.dtype))
    low = _ran(_text(cls, model, bf16=True, max_steps=2))
    assert kinds == {torch.bfloat16}
    assert {parameter.dtype for parameter in low.model.parameters()} == {torch.float32}
    assert losses(low) == pytest.approx(losses(_ran(_text(cls, text_model(), max_steps=2))), rel=0.02)


def a_model_in_bf16_trains(cls: type[Any]) -> None:
    """A model whose weights are bfloat16 trains in them."""
    built = _ran(_text(cls, text_model().to(torch.bfloat16), max_steps=2))
    assert {parameter.dtype for parameter in built.model.parameters()} == {torch.bfloat16}
    assert all(math.isfinite(loss) for loss in losses(built))


class Overflowing(Line):
    """Gives an infinite gradient at each of the calls in `at`, as a loss scale that is too large does."""

    def __init__(self, *at: int) -> None:
        super().__init__()
        self.calls, self.at = 0, at

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict:
        self.calls += 1
        outputs = super().forward(x, labels)
        if self.calls in self.at:
            outputs["loss"] = outputs["loss"] + (self.slope - self.slope.detach()) * torch.tensor(3e38) * 100
        return outputs


def fp16_skips_steps_that_overflow(cls: type[Any]) -> None:
    """With a gradient scaler a step whose gradients overflow leaves weights and learning rate as they were."""
    events = Events()
    seen: list[float] = []

    class Weights(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
            seen.append(model.intercept.item())

    built = trainer(
        cls,
        Overflowing(2),
        fp16=True,
        optim="adamw_torch",
        max_steps=3,
        logging_steps=1,
        callbacks=[events, Weights()],
    )
    built.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    built.accelerator.native_amp = True
    built.train()
    assert seen[0] == seen[1] != seen[2]
    rates = logged(built, "learning_rate")
    assert rates[1] == rates[2] < rates[0]
    assert built.accelerator.scaler.get_scale() == 8.0
    assert built.state.global_step == 3
    assert events.names.count("optimizer_step") == 3


def activations_can_be_recomputed(cls: type[Any]) -> None:
    """activation_checkpointing trains to the same weights."""
    plain = _ran(_text(cls))
    assert near(_ran(_text(cls, activation_checkpointing=True)), plain, 1e-6)
    reentrant = {"activation_checkpointing_kwargs": {"use_reentrant": True}}
    assert near(_ran(_text(cls, activation_checkpointing=True, **reentrant)), plain, 1e-6)


def the_old_name_of_recomputing_works(cls: type[Any]) -> None:
    """gradient_checkpointing still switches recomputation on."""
    built = _ran(_text(cls, gradient_checkpointing=True, max_steps=2))
    assert built.model.is_activation_checkpointing
    assert all(math.isfinite(loss) for loss in losses(built))


BEHAVIOURS = in_area(
    "losses and gradients",
    equal_splits_of_a_batch_train_alike,
    uneven_labels_are_averaged_over_the_window,
    a_model_without_counts_averages_micro_batches,
    a_model_can_say_that_it_takes_no_counts,
    shifted_labels_are_counted_shifted,
    a_loss_function_gets_labels_and_count,
    a_loss_function_without_labels_is_warned_about,
    an_own_loss_can_say_that_it_is_scaled,
    training_and_evaluation_have_one_loss,
    logged_losses_are_means_since_the_last_log,
    labels_can_be_smoothed,
    labels_of_several_kinds_are_not_smoothed,
    gradients_are_clipped,
    clipping_by_0_does_not_clip,
    callbacks_see_clipped_gradients,
    losses_that_are_no_numbers_are_filtered_from_logs,
    bf16_computes_low_and_keeps_high,
    a_model_in_bf16_trains,
    fp16_skips_steps_that_overflow,
    activations_can_be_recomputed,
    the_old_name_of_recomputing_works,
)
