"""What stands in `param.grad` between micro-batches: a gradient that can be zeroed, and nothing else.

A running sum must survive the `zero_grad()` that loops call in every micro-step, and must not be clipped, unscaled or
stepped with before it is whole. A sealed gradient has no memory: zeroing it does nothing, every other use raises.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

__all__ = ["SealedGradient", "guard_optimizers"]

_ZEROING = frozenset({torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default})


class SealedGradient(Tensor):
    """Stands for the gradient of a parameter, same shape, dtype and device, while its sum is not whole."""

    way_out = (
        "Clip, unscale, read and step inside `with accumulator.averaged():`, or build FlatAccumulator(..., compat=True), which"
        " lets each micro-batch's own gradient be changed"
    )

    @staticmethod
    def __new__(cls, parameter: Tensor) -> "SealedGradient":
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, parameter.shape, strides=parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func not in _ZEROING:
            raise RuntimeError(_refusal(str(func), cls.way_out))
        return args[0] if func is torch.ops.aten.zero_.default else None

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"SealedGradient(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


@functools.cache
def guard_optimizers() -> None:
    """Lets no optimizer of this process begin a step with a sealed gradient.

    Without it AdamW would decay the weights first and fail at the gradient after that.
    """
    register_optimizer_step_pre_hook(_refuse_sealed)


def _refuse_sealed(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        if any(isinstance(parameter.grad, SealedGradient) for parameter in group["params"]):
            raise RuntimeError(_refusal(f"{type(optimizer).__name__}.step", SealedGradient.way_out))


def _refusal(what: str, way_out: str) -> str:
    return f"{what} on a gradient in the middle of a round: it is a part of the sum. {way_out}"
