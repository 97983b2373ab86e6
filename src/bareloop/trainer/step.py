"""What `steps` decides before it starts: device, precision, clipping, the update.

Each function here is called once and returns what the hot loop calls, so that the loop asks for nothing again. How
gradients are reduced is decided in `ranks`, by what they are divided in `division`.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

__all__ = ["clipping", "compute_device", "forwarding", "gradient_scaler", "multiply", "trained", "updating"]

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def compute_device(model: nn.Module) -> tuple[torch.device, bool]:
    """(device that `model` computes on, whether batches go there).

    Batches are moved to an accelerator that holds the whole model. For a model on the CPU there is nothing to move, and
    one that is spread over devices gets its batches as they are.

    Raises:
        ValueError: the model has no parameters.
    """
    devices = dict.fromkeys(parameter.device for parameter in model.parameters())
    if not devices:
        raise ValueError("model has no parameters: there is nothing to train")
    # fully_shard may keep the parameters of a model in host memory that computes on the accelerator.
    sharded: list[Any] = [module for module in model.modules() if hasattr(module, "_get_fsdp_state")]
    devices = dict.fromkeys(module._get_fsdp_state()._device for module in sharded) or devices
    device = next(iter(devices))
    return device, len(devices) == 1 and device.type != "cpu"


def forwarding(
    loss_fn: Callable[[Any, Any], Any], model: nn.Module, precision: str | None, device: torch.device, move: bool
) -> Callable[[Any], Any]:
    """Function of a batch that returns `loss_fn(model, batch)`, under autocast and with the batch on `device` if asked.

    Raises:
        ValueError: unknown precision, or the device has no autocast of that type.
    """
    place = partial(moved, device=device) if move else None
    if precision is None:
        return partial(loss_fn, model) if place is None else lambda batch: loss_fn(model, place(batch))
    autocast = _autocast(precision, device)  # one object for all micro-batches: it is never entered twice at a time

    def cast(batch: Any) -> Any:
        placed = batch if place is None else place(batch)
        with autocast:
            return loss_fn(model, placed)

    return cast


def _autocast(precision: str, device: torch.device) -> torch.autocast:
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r}: must be 'fp16', 'bf16' or None (the model's own)")
    if torch.amp.is_autocast_available(device.type):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # where it cannot, torch warns and computes in full precision
            autocast = torch.autocast(device.type, dtype=PRECISIONS[precision])
            with autocast:
                if torch.is_autocast_enabled(device.type):
                    return autocast
    raise ValueError(f"precision={precision!r}: torch has no such autocast on {device.type}; use another, or None")


def moved(batch: Any, device: torch.device) -> Any:
    """`batch` with its tensors on `device`: a tensor, mapping, list, tuple or anything that has `to(device)`.

    The copy is asynchronous for tensors in pinned memory. What is none of these is left as it is.
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: moved(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(moved(value, device) for value in batch)
    return batch


def gradient_scaler(precision: str | None, scaler: GradScaler | None, device: torch.device) -> GradScaler | None:
    """The scaler of "fp16", the caller's or a new one; None for every other precision.

    Raises:
        ValueError: a scaler with another precision, or one that was built with enabled=False.
    """
    if precision != "fp16":
        if scaler is not None:
            raise ValueError(f"scaler was given with precision={precision!r}: only precision='fp16' scales gradients")
        return None
    scaler = GradScaler(device.type) if scaler is None else scaler
    if not scaler.is_enabled():
        raise ValueError(
            "scaler is not enabled: 16-bit gradients vanish unscaled; use precision='bf16' or None instead"
        )
    return scaler


def trained(model: nn.Module, optimizer: Optimizer) -> Callable[[], list[nn.Parameter]]:
    """Function that lists what `optimizer` steps: first the model's parameters in the model's order, then others.

    It lists anew when the optimizer has got a parameter group more (layers that thaw).

    Raises:
        ValueError: the optimizer has none of the model's parameters.
    """

    def listed() -> list[nn.Parameter]:
        stepped = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
        own = [stepped.pop(id(parameter)) for parameter in model.parameters() if id(parameter) in stepped]
        return own + list(stepped.values())

    known, groups = listed(), len(optimizer.param_groups)
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in own for parameter in known):
        raise ValueError(
            "optimizer has none of model's parameters: build it after what replaces them (fully_shard, .to_empty(), "
            "a new model), from model.parameters()"
        )

    def current() -> list[nn.Parameter]:
        nonlocal known, groups
        if len(optimizer.param_groups) != groups:
            known, groups = listed(), len(optimizer.param_groups)
        return known

    return current


def multiply(parameters: Iterable[nn.Parameter], factor: float | Tensor) -> None:
    """Multiplies the gradients of `parameters` in place: one foreach op for each device they lie on."""
    by_device: dict[torch.device, list[Tensor]] = {}
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                # Of a DTensor this rank's part: the factor is one number, and the same on all ranks.
                gradient: Any = parameter.grad
                part = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                by_device.setdefault(part.device, []).append(part)
        for device, gradients in by_device.items():
            here = factor.to(device) if isinstance(factor, Tensor) else factor
            torch._foreach_mul_(gradients, here)  # pyright: ignore[reportPrivateImportUsage]


def clipping(
    max_norm: float | None,
    parameters: Callable[[], list[nn.Parameter]],
    scaler: GradScaler | None,
    optimizer: Optimizer,
) -> Callable[[], Tensor | None]:
    """Function that clips the gradients to `max_norm` and returns their norm before that, 0-d.

    math.inf measures and leaves them as they are; None does neither. Parameters that are DTensors give the norm of the
    whole gradient, which takes one collective.

    Raises:
        ValueError: max_norm is not above 0.
    """
    if max_norm is None:
        return lambda: None
    if not max_norm > 0:
        raise ValueError(f"max_norm={max_norm}: must be above 0; None does not clip, math.inf only measures the norm")
    parted = any(hasattr(parameter, "to_local") for parameter in parameters())

    def clip() -> Tensor:
        if scaler is not None:
            scaler.unscale_(optimizer)
        clipped = parameters()
        if not parted and max_norm != math.inf:
            return nn.utils.clip_grad_norm_(clipped, max_norm)
        norm = _total_norm([parameter.grad for parameter in clipped if parameter.grad is not None])
        if max_norm != math.inf:
            # As torch clips: multiplied even where nothing is to clip, because to know would be a read.
            multiply(clipped, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    return clip


def _total_norm(gradients: list[Tensor]) -> Tensor:
    """Norm of all gradients, plain tensors and DTensors of several meshes mixed, as a plain 0-d tensor."""
    by_mesh: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        by_mesh.setdefault(getattr(gradient, "device_mesh", None), []).append(gradient)
    norms: list[Any] = [nn.utils.get_total_norm(of_mesh) for of_mesh in by_mesh.values()]
    norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def updating(optimizer: Optimizer, scheduler: Any, scaler: GradScaler | None) -> Callable[[], Tensor | None]:
    """Function that steps the optimizer, and the scheduler where the optimizer did; returns the overflow (see `Step`).

    Raises:
        ValueError: an optimizer that needs a closure, or a scheduler that needs a metric.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("optimizer is LBFGS, which computes the loss again inside its step: steps cannot do that")
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ValueError(
            "scheduler is ReduceLROnPlateau, which needs a metric: call its step(metric) in the loop's body"
        )
    if scaler is not None:
        return _scaled(optimizer, scheduler, scaler)

    def update() -> None:
        optimizer.step()
        if scheduler is not None:
            scheduler.step()

    return update


def _scaled(optimizer: Optimizer, scheduler: Any, scaler: GradScaler) -> Callable[[], Tensor]:
    """As `updating`, for scaled gradients: a step is left out where a gradient is not finite, and the scale adapts."""
    # A fused optimizer looks at the overflow on the device and never tells; for others the scaler reads it, and whether
    # it called the optimizer says what it read.
    fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    stepped: list[bool] = []

    def update() -> Tensor:
        watch = (
            None if fused or scheduler is None else optimizer.register_step_post_hook(lambda *_: stepped.append(True))
        )
        try:
            scaler.step(optimizer)
        finally:
            if watch is not None:
                watch.remove()
        found = list(scaler._found_inf_per_device(optimizer).values())
        overflow = found[0] if len(found) == 1 else torch.stack([one.to(found[0].device) for one in found]).sum()
        scaler.update()
        if scheduler is not None and (not overflow.item() if fused else stepped):
            scheduler.step()
        stepped.clear()
        return overflow

    return update
