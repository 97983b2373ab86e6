"""From accumulated gradients to an optimizer step: their norm, the clip, the step, each with the same bits as upstream.

`clip_grad_norm_` of torch looks at every gradient in Python to see that one fused kernel can take them all. Here that
is decided once, from the parameters; the kernels are the same ones in the same order.
"""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from bareloop.trainer.walk import Walk

__all__ = [
    "clip_of",
    "clips_unexpectedly",
    "norm_and_clip",
    "one_kernel_takes_all",
    "optimizer_step_of",
    "total_norm",
    "wraps_unexpectedly",
]

_ON_THE_WAY_TO_THE_CLIP = ("clip_grad_norm_", "_clip_grad_norm_dtensor_aware", "unscale_gradients")


def total_norm(gradients: list[Tensor]) -> Tensor:
    """The 2-norm[] of all `gradients` seen as one vector; all of one type and device."""
    norms = torch._foreach_norm(gradients, 2.0)  # pyright: ignore[reportPrivateImportUsage]
    return torch.linalg.vector_norm(torch.stack(norms), 2.0)


def norm_and_clip(parameters: list[nn.Parameter], gradients: list[Tensor], max_norm: float) -> Tensor:
    """The 2-norm[] of `gradients`, those of `parameters`, which are then scaled in place so that it is at most
    `max_norm`."""
    norm = total_norm(gradients)
    # By torch's public function, looked up now: that is where those who watch a training see a clip.
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=True)
    return norm


def one_kernel_takes_all(parameters: list[nn.Parameter]) -> str | None:
    """None when the gradients of `parameters` are plain tensors of one type on one device; else what is not so."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    kinds = {type(parameter) for parameter in trained}
    if not kinds <= {nn.Parameter, Tensor}:
        return "parameters are " + ", ".join(sorted(kind.__name__ for kind in kinds - {nn.Parameter, Tensor}))
    types = {(parameter.device, getattr(parameter, "grad_dtype", None) or parameter.dtype) for parameter in trained}
    if len(types) > 1:
        return f"parameters are of {len(types)} types or devices"
    if any(device.type not in ("cpu", "cuda") for device, _ in types):
        return "no fused kernel is known for this device"
    return None


def clips_unexpectedly(accelerator: Any) -> str | None:
    """None for accelerate's own clip; else who has another one."""
    if type(accelerator) is not Accelerator:
        return f"the accelerator is a {type(accelerator).__qualname__}"
    replaced = [name for name in _ON_THE_WAY_TO_THE_CLIP if name in vars(accelerator)]
    return f"accelerator.{replaced[0]} was replaced on the object" if replaced else None


def clip_of(trainer: Any, walk: Walk, *, by_stock: bool, overridden: bool) -> Callable[[bool], Tensor | float | None]:
    """What the stock loop does between the backward and `on_pre_optimizer_step`: (norm is wanted) -> norm or None.

    The stock loop computes the norm of every step and multiplies the gradients by one where `max_grad_norm` is 0. Here
    they are then left alone and the norm is computed when it is wanted, for a log. One thing differs: gradients that
    hold an infinity and are not clipped stay as they are; the stock loop makes all of them NaN.

    Args:
        by_stock: call the trainer's own methods.
        overridden: they are the user's, so they are called at every step.
    """

    def by_the_library(wanted: bool) -> Tensor | float | None:
        norm = None
        if not (wanted or overridden or trainer.args.max_grad_norm > 0):
            return None
        if trainer.args.max_grad_norm > 0:
            norm = trainer._clip_grad_norm(walk.model)
        return trainer._get_grad_norm(walk.model, grad_norm=norm)

    if by_stock:
        return by_the_library
    unscale = trainer.accelerator.unscale_gradients if trainer.accelerator.scaler is not None else None

    def direct(wanted: bool) -> Tensor | None:
        max_norm = trainer.args.max_grad_norm
        if unscale is not None:
            unscale()
        if not (wanted or max_norm > 0):
            return None
        gradients = [each.grad for each in walk.parameters if each.grad is not None]
        if not gradients:
            return torch.tensor(0.0)
        with torch.no_grad():
            return norm_and_clip(walk.parameters, gradients, max_norm) if max_norm > 0 else total_norm(gradients)

    return direct


def optimizer_step_of(trainer: Any, *, by_stock: bool) -> Callable[[], Any]:
    """What `trainer.optimizer.step()` does on the last micro-step of a window, less accelerate's look-ups."""
    optimizer = trainer.optimizer
    if by_stock or wraps_unexpectedly(optimizer) is not None:
        return lambda: trainer.optimizer.step()
    inner = optimizer.optimizer
    tells_scheduler = "step" in vars(optimizer)
    if optimizer.scaler is not None:
        return _scaled_step(optimizer, tells_scheduler=tells_scheduler)

    def step() -> None:
        if tells_scheduler:
            optimizer._opt_called = True  # torch's scheduler warns where it does not see a step before its own
        inner.step(None)

    return step


def wraps_unexpectedly(optimizer: Any) -> str | None:
    """None for accelerate's own optimizer wrapper whose `step` nobody but torch's scheduler has wrapped; else why not."""
    if type(optimizer) is not AcceleratedOptimizer:
        return f"the optimizer is a {type(optimizer).__qualname__}, not accelerate's wrapper"
    replaced = vars(optimizer).get("step")
    if replaced is None:
        return None
    if getattr(replaced, "_wrapped_by_lr_sched", False) and replaced.__wrapped__ is AcceleratedOptimizer.step:
        return None
    return "optimizer.step was replaced on the object"


def _scaled_step(optimizer: Any, *, tells_scheduler: bool) -> Callable[[], None]:
    """The step under a gradient scaler: skipped by the scaler when a gradient is not finite, which is recorded."""

    def step() -> None:
        if tells_scheduler:
            optimizer._opt_called = True
        inner, scaler = optimizer.optimizer, optimizer.scaler
        inner.step = optimizer._optimizer_patched_step_method
        scaler.step(inner, None)
        scaler.update()
        optimizer._is_overflow = not optimizer._accelerate_step_called
        inner.step = optimizer._optimizer_original_step_method
        optimizer._accelerate_step_called = False

    return step
