"""Counts: how many epochs, steps and micro-steps a training has, and which methods are called in each."""

from typing import Any

import pytest
import torch

from behaviours.behaviour import in_area
from behaviours.tasks import Line, line_rows, logged, trainer

__all__ = ["BEHAVIOURS"]


def epochs_times_batches_is_the_number_of_steps(cls: type[Any]) -> None:
    """Without max_steps there are as many steps as batches in all epochs."""
    output = trainer(cls, num_train_epochs=3).train()
    assert output.global_step == 3 * 4


def epochs_can_be_fractions(cls: type[Any]) -> None:
    """1.5 epochs are one and a half times the batches."""
    built = trainer(cls, num_train_epochs=1.5)
    assert built.train().global_step == 6
    assert built.state.epoch == 1.5


def max_steps_overrides_epochs(cls: type[Any]) -> None:
    """max_steps decides whatever num_train_epochs says, over as many epochs as that takes."""
    built = trainer(cls, num_train_epochs=50, max_steps=10)
    assert built.train().global_step == 10
    assert built.state.num_train_epochs == 3
    assert built.state.epoch == 2.5


def fewer_batches_than_a_window_make_one_step_an_epoch(cls: type[Any]) -> None:
    """An epoch shorter than the accumulation window is one step, with and without max_steps."""
    settings = {"train_dataset": line_rows(16), "gradient_accumulation_steps": 5}
    assert trainer(cls, max_steps=3, **settings).train().global_step == 3
    assert trainer(cls, num_train_epochs=2, **settings).train().global_step == 2


def the_last_window_of_an_epoch_is_smaller(cls: type[Any]) -> None:
    """get_batch_samples is asked for whole windows and for the rest at the end of each epoch."""
    asked: list[tuple[int, int]] = []

    class Asked(cls):
        def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
            batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
            asked.append((num_batches, len(batches)))
            return batches, count

    built = trainer(Asked, train_dataset=line_rows(7 * 4), per_device_train_batch_size=4, num_train_epochs=2,
                    gradient_accumulation_steps=3)  # fmt: skip
    assert built.train().global_step == 6
    assert asked == [(3, 3), (3, 3), (1, 1)] * 2


def get_batch_samples_can_be_replaced_on_the_object(cls: type[Any]) -> None:
    """Replacing get_batch_samples on the trainer, not on its class, works too."""
    built = trainer(cls, gradient_accumulation_steps=2)
    inherited, asked = built.get_batch_samples, []

    def counting(epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        asked.append(num_batches)
        return inherited(epoch_iterator, num_batches, device)

    built.get_batch_samples = counting
    built.train()
    assert asked == [2, 2]


def training_step_is_called_for_each_micro_batch(cls: type[Any]) -> None:
    """An overridden training_step gets the model, each micro-batch, and the window's count of items."""
    calls: list[tuple[list[str], Any]] = []

    class Stepping(cls):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            calls.append((sorted(inputs), num_items_in_batch))
            return super().training_step(model, inputs, num_items_in_batch)

    trainer(Stepping, gradient_accumulation_steps=2).train()
    assert calls == [(["labels", "x"], None)] * 4


def training_step_decides_the_loss(cls: type[Any]) -> None:
    """What an overridden training_step returns is what is logged."""

    class Constant(cls):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            super().training_step(model, inputs, num_items_in_batch)
            return torch.tensor(2.5)

    built = trainer(Constant, logging_steps=2)
    built.train()
    assert logged(built, "loss") == [2.5, 2.5]


def compute_loss_is_called_for_each_micro_batch(cls: type[Any]) -> None:
    """An overridden compute_loss makes the loss, in training and in evaluation."""
    modes: list[bool] = []

    class Absolute(cls):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            modes.append(model.training)
            outputs = model(x=inputs["x"])
            loss = (outputs["predictions"] - inputs["labels"]).abs().mean()
            return (loss, {"loss": loss, **outputs}) if return_outputs else loss

    built = trainer(Absolute, eval_dataset=line_rows(16), gradient_accumulation_steps=2)
    built.train()
    built.evaluate()
    assert modes == [True] * 4 + [False] * 2


def floating_point_ops_is_called_for_each_micro_batch(cls: type[Any]) -> None:
    """An overridden floating_point_ops is added up over all micro-batches."""

    class Counting(cls):
        def floating_point_ops(self, inputs: Any) -> int:
            return int(inputs["x"].numel()) * 100

    built = trainer(Counting, train_dataset=line_rows(30), gradient_accumulation_steps=2)
    built.train()
    assert built.state.total_flos == 3000


def the_state_says_where_training_stands(cls: type[Any]) -> None:
    """After training the state has epoch, step, and the planned steps and epochs."""
    built = trainer(cls, num_train_epochs=2)
    built.train()
    state = built.state
    assert (state.epoch, state.global_step, state.max_steps, state.num_train_epochs) == (2.0, 8, 8, 2)
    assert state.train_batch_size == 8


def the_result_has_speed_and_loss(cls: type[Any]) -> None:
    """train() returns step, mean loss and metrics whose rates are its own work over its own time."""
    built = trainer(cls, num_train_epochs=2, logging_steps=1)
    output = built.train()
    assert output.training_loss == pytest.approx(sum(logged(built, "loss")) / 8)
    seconds = output.metrics["train_runtime"]
    assert output.metrics["train_samples_per_second"] == pytest.approx(64 / seconds, rel=0.1)
    assert output.metrics["train_steps_per_second"] == pytest.approx(8 / seconds, rel=0.1)
    assert output.metrics["epoch"] == 2.0


def epochs_are_logged_as_fractions(cls: type[Any]) -> None:
    """Each log entry has the step and the share of epochs done."""
    built = trainer(cls, num_train_epochs=2, logging_steps=3)
    built.train()
    assert [(entry["step"], entry["epoch"]) for entry in built.state.log_history if "loss" in entry] == [
        (3, 0.75),
        (6, 1.5),
    ]


def the_batch_size_of_a_step_is_known(cls: type[Any]) -> None:
    """get_total_train_batch_size counts the micro-batches of the window."""
    built = trainer(cls, Line(), per_device_train_batch_size=4, gradient_accumulation_steps=3)
    assert built.get_total_train_batch_size(built.args) == 12


BEHAVIOURS = in_area(
    "steps and epochs",
    epochs_times_batches_is_the_number_of_steps,
    epochs_can_be_fractions,
    max_steps_overrides_epochs,
    fewer_batches_than_a_window_make_one_step_an_epoch,
    the_last_window_of_an_epoch_is_smaller,
    get_batch_samples_can_be_replaced_on_the_object,
    training_step_is_called_for_each_micro_batch,
    training_step_decides_the_loss,
    compute_loss_is_called_for_each_micro_batch,
    floating_point_ops_is_called_for_each_micro_batch,
    the_state_says_where_training_stands,
    the_result_has_speed_and_loss,
    epochs_are_logged_as_fractions,
    the_batch_size_of_a_step_is_known,
)
