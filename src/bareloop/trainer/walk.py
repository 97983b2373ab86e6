"""The modules and parameters of a model, walked once and again only when somebody changed them.

The stock loop walks the module tree at every micro-step to put it in training mode, and twice at every step to clip
and to clear the gradients. Here the modules are listed once; whether each is still in the mode it had after the last
`train()` is one comparison of two lists, and `train()` is called again only when it is not.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

__all__ = ["Walk", "overrides_train"]

_PURE_TRAIN = (nn.Module.train, DistributedDataParallel.train, PreTrainedModel.train)
"""Implementations of `train` without an effect on a module that is in training mode already."""


class Walk:
    """What was found in `model` when it was walked."""

    __slots__ = (
        "_every_time",
        "_modes",
        "_optimizer_train",
        "_shape",
        "is_stale",
        "model",
        "modules",
        "parameters",
        "was_used",
    )

    def __init__(self, model: nn.Module, *, every_time: bool, optimizer_train: Callable[[], Any] | None) -> None:
        """`every_time`: put the model in training mode at every micro-step, as the stock loop does;
        `optimizer_train`: the same for an optimizer with modes, None for one without."""
        self.model = model
        self.modules = list(model.modules())
        self.parameters = list(model.parameters())
        self.is_stale = False
        """The model has other modules or parameters by now: walk it anew."""
        self.was_used = False
        """`look_again` has run since the first forward, which makes the parameters of some models."""
        self._every_time = every_time
        self._optimizer_train = optimizer_train
        self._modes: list[bool] | None = None
        self._shape = self._shape_now()

    def enter_training(self) -> None:
        """`model.train()`, where a module is not in the mode that `train()` left it in."""
        if self._optimizer_train is not None:
            self._optimizer_train()
        if self._every_time:
            self.model.train()
        elif [module.training for module in self.modules] != self._modes:
            self.model.train()
            self._modes = [module.training for module in self.modules]

    def look_again(self) -> None:
        """Somebody else's code ran: see whether the model is made of the same modules and parameters."""
        self.was_used = True
        if self._shape_now() != self._shape:
            self.is_stale = True

    def zero_grad(self) -> None:
        """Set every gradient to None, as `model.zero_grad()` does."""
        for parameter in self.model.parameters() if self.is_stale else self.parameters:
            parameter.grad = None

    def _shape_now(self) -> tuple[list[tuple[int | None, ...]], list[bool]]:
        # The lists above keep what was found alive, so no other module or parameter can have its id.
        children = [
            (*map(id, module._modules.values()), None, *map(id, module._parameters.values())) for module in self.modules
        ]
        return children, [parameter.requires_grad for parameter in self.parameters]


def overrides_train(model: nn.Module) -> str | None:
    """The class in `model` whose `train` may do more than set the mode; None when there is none."""
    for module in model.modules():
        train = getattr(module.train, "__func__", module.train)
        if train not in _PURE_TRAIN:
            return type(module).__qualname__
    return None
