"""`Walk` calls `train()` when a module left its mode, and knows when the model is made of other modules."""

from typing import Any

import pytest
import torch
from torch import nn

from bareloop.trainer.walk import Walk, overrides_train


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
        self.walks = 0

    def train(self, mode: bool = True) -> "Counted":
        self.walks += mode
        return super().train(mode)


def walk_of(model: nn.Module, **kwargs: Any) -> Walk:
    return Walk(model, **{"every_time": False, "optimizer_train": None, **kwargs})


def test_walks_once_and_again_only_when_a_mode_changed() -> None:
    model = Counted().eval()
    walk = walk_of(model)
    assert not model.training, "listing the modules sets no mode"
    for _ in range(3):
        walk.enter_training()
    assert model.walks == 1
    model.inner[1].eval()
    walk.enter_training()
    assert model.walks == 2
    assert model.inner[1].training


def test_walks_every_time_where_it_has_to() -> None:
    model, modes = Counted(), []
    walk = walk_of(model, every_time=True, optimizer_train=lambda: modes.append("train"))
    for _ in range(3):
        walk.enter_training()
    assert model.walks == len(modes) == 3
    assert overrides_train(model) == "Counted"
    assert overrides_train(model.inner) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.add_module("new", nn.ReLU()),
        lambda model: setattr(model.inner[0], "bias", None),
        lambda model: setattr(model, "inner", nn.Sequential(nn.Linear(2, 2), nn.Dropout())),
        lambda model: model.inner[0].requires_grad_(False),
        lambda model: model.register_parameter("scale", nn.Parameter(torch.ones(1))),
    ],
)
def test_sees_that_the_model_is_made_of_something_else(change: Any) -> None:
    model = Counted()
    walk = walk_of(model)
    walk.look_again()
    assert not walk.is_stale
    change(model)
    walk.look_again()
    assert walk.is_stale


def test_clears_gradients_as_the_model_does() -> None:
    model = Counted()
    walk = walk_of(model)
    model.inner(torch.ones(1, 2)).sum().backward()
    walk.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    model.register_parameter("scale", nn.Parameter(torch.ones(1)))
    model.scale.grad = torch.ones(1)
    walk.look_again()
    walk.zero_grad()
    assert model.scale.grad is None
