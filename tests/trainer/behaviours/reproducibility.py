"""Seeds: what makes two trainings equal, and what makes them differ."""

import random
from typing import Any

import datasets
import numpy as np
import torch
from torch import nn

from behaviours.behaviour import in_area
from behaviours.tasks import (
    Line,
    PretrainedLine,
    line_rows,
    losses,
    near,
    text_model,
    text_rows,
    trainer,
    weights,
)

__all__ = ["BEHAVIOURS"]


def _trained(cls: type[Any], model: nn.Module | None = None, **settings: Any) -> Any:
    built = trainer(cls, model, **settings)
    built.train()
    return built


def the_same_seed_gives_the_same_weights(cls: type[Any]) -> None:
    """Two trainings with one seed end with equal weights, another seed with others, which it reproduces."""
    assert near(_trained(cls), _trained(cls), 0)
    assert near(_trained(cls, seed=314), _trained(cls, seed=314), 0)
    assert not near(_trained(cls), _trained(cls, seed=314), 1e-5)


def training_moves_toward_the_data(cls: type[Any]) -> None:
    """A few epochs find slope and intercept of the data."""
    found = weights(_trained(cls, num_train_epochs=4, optim="sgd", learning_rate=0.4, max_grad_norm=1e9))
    assert abs(found["slope"].item() - 3) < 0.1
    assert abs(found["intercept"].item() + 1) < 0.1


def rows_of_a_dataset_train_like_a_list(cls: type[Any]) -> None:
    """A datasets.Dataset, as Python values or as tensors, gives what a list of the same rows gives."""
    rows = datasets.Dataset.from_list([{"x": float(row["x"]), "label": float(row["labels"])} for row in line_rows()])
    reference = _trained(cls)
    assert near(_trained(cls, train_dataset=rows), reference, 0)
    assert near(_trained(cls, train_dataset=rows.with_format("torch", dtype=torch.float32)), reference, 0)


def a_column_that_the_model_does_not_take_changes_nothing(cls: type[Any]) -> None:
    """Columns without a parameter in the model's forward are left out, from lists and from datasets."""
    reference = _trained(cls)
    assert near(_trained(cls, train_dataset=line_rows(extra=1.5)), reference, 0)
    rows = [{name: float(value) for name, value in row.items()} for row in line_rows(extra=1.5)]
    assert near(_trained(cls, train_dataset=datasets.Dataset.from_list(rows)), reference, 0)


def model_init_starts_again_from_scratch(cls: type[Any]) -> None:
    """With model_init each train() makes a new model, so it repeats itself, and follows a changed seed."""
    built = trainer(cls, model_init=lambda: Line())
    built.train()
    first = weights(built)
    built.train()
    assert all(torch.equal(first[name], value) for name, value in weights(built).items())
    built.args.seed = 314
    built.train()
    assert near(built, _trained(cls, Line(), seed=314), 0)


def model_init_draws_its_weights_from_the_seed(cls: type[Any]) -> None:
    """The seed is set before model_init is called."""

    def drawn() -> Line:
        return Line(torch.randn(()).item(), torch.randn(()).item())

    torch.manual_seed(5)
    expected = drawn()
    assert near(trainer(cls, model_init=drawn, seed=5), expected, 0)


def the_data_seed_orders_the_rows_and_nothing_else(cls: type[Any]) -> None:
    """data_seed changes the order of the rows and leaves other random draws to seed."""

    class Drawing(Line):
        def __init__(self) -> None:
            super().__init__()
            self.draws: list[float] = []
            self.order: list[float] = []

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict:
            self.draws.append(random.random())
            self.order += x.tolist()
            return super().forward(x, labels)

    one, other, again = (_trained(cls, Drawing(), data_seed=seed).model for seed in (1, 2, 1))
    assert one.draws == other.draws == again.draws
    assert one.order == again.order != other.order
    assert sorted(one.order) == sorted(other.order)


class Noisy(PretrainedLine):
    """Adds noise from the three generators that a model may draw from."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict:
        noise = torch.randn(()).item() + np.random.rand() + random.random()
        return super().forward(x + 0.05 * noise, labels)


def random_draws_in_the_model_repeat(cls: type[Any]) -> None:
    """Draws from torch's, NumPy's and Python's generators in the model follow the seed."""
    assert near(_trained(cls, Noisy()), _trained(cls, Noisy()), 0)
    assert not near(_trained(cls, Noisy()), _trained(cls, Noisy(), seed=1, data_seed=42), 1e-5)


def dropout_repeats(cls: type[Any]) -> None:
    """A model with dropout gives the same losses for the same seed."""
    one, other = (
        _trained(cls, text_model(), train_dataset=text_rows(), per_device_train_batch_size=4, logging_steps=1)
        for _ in range(2)
    )
    assert losses(one) == losses(other)


def training_again_goes_on_with_the_weights(cls: type[Any]) -> None:
    """A second train() goes on from the weights that are there and counts its steps anew."""
    built = trainer(cls)
    built.train()
    once = weights(built)
    assert built.train().global_step == 4
    assert not any(torch.equal(once[name], value) for name, value in weights(built).items())


def training_twice_wraps_the_model_once(cls: type[Any]) -> None:
    """The second train() uses the model as the first one prepared it."""
    built = trainer(cls)
    built.train()
    wrapped = built.model_wrapped
    built.train()
    assert built.model_wrapped is wrapped


def frozen_parameters_stay_as_they_are(cls: type[Any]) -> None:
    """A parameter without requires_grad is not trained."""
    model = PretrainedLine(slope=2.0)
    model.slope.requires_grad_(False)
    built = _trained(cls, model)
    assert built.model.slope.item() == 2.0
    assert built.model.intercept.item() != 0


def trainable_parameters_are_counted(cls: type[Any]) -> None:
    """get_num_trainable_parameters leaves out what is frozen."""
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    built = trainer(cls, model)
    assert built.get_num_trainable_parameters() == 16 * 8 + 8 + 8 * 4 + 4
    model[1].requires_grad_(False)
    assert built.get_num_trainable_parameters() == 16 * 8 + 8


def a_plain_module_trains_like_a_pretrained_one(cls: type[Any]) -> None:
    """A module without a config trains, and to the same weights."""
    assert near(_trained(cls, Line()), _trained(cls, PretrainedLine()), 0)


def a_model_that_returns_a_tuple_trains_alike(cls: type[Any]) -> None:
    """A model may return (loss, predictions) instead of a dictionary."""

    class Tuples(PretrainedLine):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple:
            return tuple(super().forward(x, labels).values())

    assert near(_trained(cls, Tuples()), _trained(cls), 0)


def submodules_in_evaluation_mode_are_put_back(cls: type[Any]) -> None:
    """A model that somebody left in evaluation mode trains in training mode from the first step."""
    model = text_model()
    model.eval()
    one = _trained(cls, model, train_dataset=text_rows(), logging_steps=1)
    assert model.training
    other = _trained(cls, text_model(), train_dataset=text_rows(), logging_steps=1)
    assert losses(one) == losses(other)


BEHAVIOURS = in_area(
    "seeds and models",
    the_same_seed_gives_the_same_weights,
    training_moves_toward_the_data,
    rows_of_a_dataset_train_like_a_list,
    a_column_that_the_model_does_not_take_changes_nothing,
    model_init_starts_again_from_scratch,
    model_init_draws_its_weights_from_the_seed,
    the_data_seed_orders_the_rows_and_nothing_else,
    random_draws_in_the_model_repeat,
    dropout_repeats,
    training_again_goes_on_with_the_weights,
    training_twice_wraps_the_model_once,
    frozen_parameters_stay_as_they_are,
    trainable_parameters_are_counted,
    a_plain_module_trains_like_a_pretrained_one,
    a_model_that_returns_a_tuple_trains_alike,
    submodules_in_evaluation_mode_are_put_back,
)
