"""What users' callbacks and subclasses do in mid-training; upstream has no tests of it, its users have habits."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from behaviours.behaviour import in_area
from behaviours.tasks import (
    Events,
    Line,
    PretrainedLine,
    line_rows,
    logged,
    losses,
    near,
    text_model,
    text_rows,
    trainer,
    weights,
)

__all__ = ["BEHAVIOURS"]


def _ran(built: Any) -> Any:
    built.train()
    return built


class At(TrainerCallback):
    """Calls `act(**what the event got)` at `event` of `step`, or of every step."""

    def __init__(self, event: str, act: Any, step: int | None = None) -> None:
        def at(args: Any, state: Any, control: Any, **more: Any) -> None:
            if step is None or state.global_step == step:
                act(args=args, state=state, control=control, **more)

        setattr(self, event, at)


TEXT = {"train_dataset": text_rows(16), "per_device_train_batch_size": 4, "logging_steps": 1}


def a_callback_may_leave_the_model_in_evaluation_mode(cls: type[Any]) -> None:
    """A callback that puts the model, or a part of it, in evaluation mode does not take the dropout away."""
    plain = losses(_ran(trainer(cls, text_model(), **TEXT)))
    for event in ("on_step_begin", "on_step_end", "on_optimizer_step"):
        for part in (lambda model: model, lambda model: model.transformer.drop):
            callback = At(event, lambda model, part=part, **more: part(model).eval())
            assert losses(_ran(trainer(cls, text_model(), callbacks=[callback], **TEXT))) == plain, event


def a_callback_may_evaluate(cls: type[Any]) -> None:
    """A callback that calls evaluate() gets its metrics, and training goes on as if it had not."""
    model = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    built = trainer(cls, text_model(**model), eval_dataset=text_rows(4), **TEXT)
    built.add_callback(At("on_step_end", lambda **more: built.evaluate()))
    plain = _ran(trainer(cls, text_model(**model), **TEXT))
    assert near(_ran(built), plain, 0)
    assert len(logged(built, "eval_loss")) == 4


def callbacks_may_be_added_anywhere(cls: type[Any]) -> None:
    """A callback added by a log, an evaluation, a save or an own loss of a step gets the events of the next steps."""
    settings = {"logging_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    for event in ("on_log", "on_evaluate", "on_save", "compute_loss"):
        late = Events()

        class Adding(cls):
            def add_late(self, late: Events = late) -> None:
                if self.state.global_step == 2 and late not in self.callback_handler.callbacks:
                    self.add_callback(late)

            def compute_loss(self, *args: Any, event: str = event, **more: Any) -> Any:
                if event == "compute_loss":
                    self.add_late()
                return super().compute_loss(*args, **more)

        built = trainer(Adding, output_dir=event, eval_dataset=line_rows(8), **settings)
        if event != "compute_loss":
            built.add_callback(At(event, lambda built=built, **more: built.add_late()))
        built.train()
        assert late.names.count("step_end") == 2, event
        assert late.names.count("optimizer_step") == 2, event


def a_callback_may_freeze_parameters(cls: type[Any]) -> None:
    """A parameter that a callback freezes in mid-training stays as it is from then on."""
    kept: list[float] = []

    def freeze(model: Any, **more: Any) -> None:
        model.slope.requires_grad_(False)
        kept.append(model.slope.item())

    built = _ran(trainer(cls, callbacks=[At("on_step_end", freeze, 2)]))
    assert built.model.slope.item() == kept[0]
    assert built.model.intercept.item() != 0


def a_callback_may_change_gradients(cls: type[Any]) -> None:
    """Gradients that a callback changes before the step are those that the optimizer uses."""

    def only_the_intercept(model: Any, **more: Any) -> None:
        model.slope.grad.zero_()

    built = _ran(trainer(cls, optim="sgd", callbacks=[At("on_pre_optimizer_step", only_the_intercept)]))
    assert built.model.slope.item() == 0
    assert built.model.intercept.item() != 0


def a_callback_may_change_the_rate(cls: type[Any]) -> None:
    """A learning rate that a callback sets on the optimizer is used by the next step."""

    def halt(optimizer: Any, **more: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.0

    seen: list[float] = []
    watching = At("on_step_end", lambda model, **more: seen.append(model.slope.item()))
    _ran(trainer(cls, callbacks=[At("on_step_begin", halt, 2), watching]))
    assert seen[1] == seen[2]
    assert seen[3] != seen[2]


def a_callback_may_change_the_clipping(cls: type[Any]) -> None:
    """A max_grad_norm that a callback sets is used by the next step."""
    norms: list[float] = []

    def note(model: Any, **more: Any) -> None:
        norms.append(torch.stack([parameter.grad for parameter in model.parameters()]).norm().item())

    def tighten(args: Any, **more: Any) -> None:
        args.max_grad_norm = 0.25

    _ran(trainer(cls, callbacks=[At("on_pre_optimizer_step", note), At("on_step_end", tighten, 2)]))
    assert norms == pytest.approx([1.0, 1.0, 0.25, 0.25], rel=1e-4)


def a_callback_may_change_the_intervals(cls: type[Any]) -> None:
    """Intervals in the state and the end of training that a callback sets count from the next step on."""

    def change(state: Any, **more: Any) -> None:
        state.logging_steps, state.max_steps = 1, 5

    built = _ran(trainer(cls, num_train_epochs=3, logging_steps=2, callbacks=[At("on_step_end", change, 2)]))
    assert [entry["step"] for entry in built.state.log_history if "loss" in entry] == [2, 3, 4, 5]
    assert built.state.global_step == 5


def a_callback_may_change_weights(cls: type[Any]) -> None:
    """Weights that a callback writes are those of the next step, as averaging of weights needs it."""

    def reset(model: Any, **more: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()

    seen: list[float] = []
    watching = At("on_step_begin", lambda model, **more: seen.append(model.slope.item()))
    built = _ran(trainer(cls, callbacks=[At("on_step_end", reset), watching]))
    assert seen == [0.0] * 4
    assert weights(built)["slope"] == 0


def a_callback_may_use_a_hook(cls: type[Any]) -> None:
    """Hooks that a callback puts on the model or its parameters in mid-training are called."""
    calls: list[str] = []

    def watch(model: Any, **more: Any) -> None:
        model.register_forward_hook(lambda *them: calls.append("forward"))
        model.slope.register_hook(lambda gradient: calls.append("gradient"))

    _ran(trainer(cls, callbacks=[At("on_step_end", watch, 2)]))
    assert calls == ["forward", "gradient"] * 2


def methods_may_be_replaced_in_mid_training(cls: type[Any]) -> None:
    """A method put on the trainer by a callback at the end of a step is used from the next epoch at the latest."""
    called: list[int] = []
    built = trainer(cls, num_train_epochs=2)

    def replace(**more: Any) -> None:
        inherited = built.compute_loss

        def own(*args: Any, **settings: Any) -> Any:
            called.append(built.state.global_step)
            return inherited(*args, **settings)

        built.compute_loss = own

    built.add_callback(At("on_epoch_end", replace, 4))
    built.train()
    assert called == [4, 5, 6, 7]


def inputs_may_be_prepared_by_the_user(cls: type[Any]) -> None:
    """An overridden _prepare_inputs changes what the model gets, in training and evaluation."""

    class Doubling(cls):
        def _prepare_inputs(self, inputs: Any) -> Any:
            inputs = super()._prepare_inputs(inputs)
            return inputs | {"labels": inputs["labels"] * 2}

    rows = [row | {"labels": row["labels"] * 2} for row in line_rows()]
    assert near(_ran(trainer(Doubling)), _ran(trainer(cls, train_dataset=rows)), 0)


def the_context_of_the_loss_may_be_the_users(cls: type[Any]) -> None:
    """An overridden compute_loss_context_manager is entered around each loss."""
    entered: list[bool] = []

    class Context(cls):
        def compute_loss_context_manager(self) -> Any:
            entered.append(True)
            return torch.autocast("cpu", dtype=torch.bfloat16)

    kinds: set[torch.dtype] = set()
    model = text_model()
    model.transformer.h[0].mlp.c_fc.register_forward_hook(lambda module, inputs, output: kinds.add(output.dtype))
    _ran(trainer(Context, model, **TEXT))
    assert len(entered) == 4
    assert kinds == {torch.bfloat16}


def items_may_be_counted_by_the_user(cls: type[Any]) -> None:
    """An overridden _get_num_items_in_batch decides what losses are divided by."""

    class Tenfold(cls):
        def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> Any:
            return super()._get_num_items_in_batch(batch_samples, device) * 10

    model = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    settings = TEXT | {"max_steps": 1}
    own, plain = (_ran(trainer(kind, text_model(**model), **settings)) for kind in (Tenfold, cls))
    assert losses(own)[0] == pytest.approx(losses(plain)[0] / 10, rel=1e-5)


def logging_may_be_decided_by_the_user(cls: type[Any]) -> None:
    """An overridden _maybe_log_save_evaluate is called after each step and epoch with the step's numbers."""
    calls: list[tuple[int, bool, float]] = []

    class Deciding(cls):
        def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **settings: Any) -> None:
            calls.append((self.state.global_step, float(tr_loss) > 0, float(grad_norm)))
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **settings)

    _ran(trainer(Deciding, logging_steps=3))
    assert [step for step, _, _ in calls] == [1, 2, 3, 4, 4]
    assert [positive for _, positive, _ in calls] == [True] * 5
    assert all(norm > 0 for _, _, norm in calls)


def a_model_may_have_its_own_train(cls: type[Any]) -> None:
    """A model whose train() keeps a part in evaluation mode keeps it there."""

    class Frozen(Line):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.9)
            self.modes: list[bool] = []

        def train(self, mode: bool = True) -> "Frozen":
            super().train(mode)
            self.dropout.eval()
            return self

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict:
            self.modes.append(self.dropout.training)
            return super().forward(self.dropout(x), labels)

    built = _ran(trainer(cls, Frozen()))
    assert not any(built.model.modes)
    assert near(built, _ran(trainer(cls, Line())), 0)


def an_error_leaves_the_trainer_usable(cls: type[Any]) -> None:
    """After an error in a step a new trainer resumes from the last checkpoint, and the old one can train again."""

    def fail(**more: Any) -> None:
        raise RuntimeError("on purpose")

    settings = {"save_steps": 1, "logging_steps": 1}
    whole = _ran(trainer(cls, output_dir="whole", **settings))
    failing = At("on_optimizer_step", fail, 2)
    built = trainer(cls, callbacks=[failing], **settings)
    with pytest.raises(RuntimeError, match="on purpose"):
        built.train()
    again = trainer(cls, **settings)
    again.train(resume_from_checkpoint=True)
    assert near(again, whole, 0)
    assert losses(again) == losses(whole)
    built.remove_callback(failing)
    assert built.train(resume_from_checkpoint="out/checkpoint-2").global_step == 4
    assert near(built, whole, 0)


def buffers_of_the_model_are_trained_along(cls: type[Any]) -> None:
    """Buffers that the forward updates, as batch norms do, keep what training put into them."""

    class Counting(PretrainedLine):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict:
            self.seen += len(x)
            return super().forward(x, labels)

    assert _ran(trainer(cls, Counting(), num_train_epochs=2)).model.seen == 64


BEHAVIOURS = in_area(
    "in mid-training",
    a_callback_may_leave_the_model_in_evaluation_mode,
    a_callback_may_evaluate,
    callbacks_may_be_added_anywhere,
    a_callback_may_freeze_parameters,
    a_callback_may_change_gradients,
    a_callback_may_change_the_rate,
    a_callback_may_change_the_clipping,
    a_callback_may_change_the_intervals,
    a_callback_may_change_weights,
    a_callback_may_use_a_hook,
    methods_may_be_replaced_in_mid_training,
    inputs_may_be_prepared_by_the_user,
    the_context_of_the_loss_may_be_the_users,
    items_may_be_counted_by_the_user,
    logging_may_be_decided_by_the_user,
    a_model_may_have_its_own_train,
    an_error_leaves_the_trainer_usable,
    buffers_of_the_model_are_trained_along,
)
