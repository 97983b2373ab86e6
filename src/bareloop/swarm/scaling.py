"""A gradient scaler over a round: one scale for all its micro-batches, divided out before other peers see the mean.

Peers have scales of their own (a late joiner begins anew), so scaled gradients can't be averaged. torch's scaler does
the arithmetic on the flat buffers: one pass for the whole round (8 bytes a parameter and one host read), where a scaler
that unscales in each micro-step makes as many passes and host reads as there are micro-steps.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

__all__ = ["RoundScaling", "all_finite"]


class RoundScaling:
    """What `scaler` does for `buffers`, which hold the gradients of losses that it scaled.

    Raises:
        ValueError: a scaler that is not enabled.
    """

    def __init__(self, scaler: GradScaler, buffers: Sequence[Tensor]) -> None:
        if not scaler.is_enabled():
            raise ValueError("scaler is not enabled: leave it out, or build it with enabled=True")
        self._scaler = scaler
        self._buffers = buffers
        self._unscaled: list[Any] = []
        """What was unscaled since the scaler's last update, kept because the scaler knows it by its id."""

    def unscale(self) -> bool:
        """Divides the buffers by the scale; False where one of their values is not finite. Reads from the device."""
        flat = _Gradients(self._buffers)
        self._unscaled.append(flat)
        self._scaler.unscale_(flat)  # pyright: ignore[reportArgumentType]
        return not any(found.item() for found in self._scaler._found_inf_per_device(flat).values())  # pyright: ignore[reportArgumentType]

    def scale_back(self) -> None:
        """Undoes `unscale`: a scale is a power of two, so to the bit."""
        for buffer in self._buffers:
            buffer.mul_(self._scaler.get_scale())

    def update(self) -> None:
        """Adapts the scale to the round that ends: lower if it overflowed, higher after many that did not.

        Raises:
            RuntimeError: the scaler stepped or unscaled an optimizer in the round, and so divided a second time.
        """
        unscaled = {id(flat) for flat in self._unscaled}
        others = [key for key in self._scaler._per_optimizer_states if key not in unscaled]
        if others:
            raise RuntimeError(
                "scaler.step or scaler.unscale_ was called in a round of FlatAccumulator(..., scaler=scaler): inside averaged()"
                " the gradient is unscaled already, so it was divided twice. Call optimizer.step() itself"
            )
        self._scaler.update()
        self._unscaled.clear()


class _Gradients:
    """Flat buffers as what a scaler takes for an optimizer: parameters of one element's memory with a whole gradient."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self.param_groups = [{"params": [_with_gradient(buffer) for buffer in buffers]}]


def _with_gradient(buffer: Tensor) -> Tensor:
    parameter = buffer.new_empty(1).expand(buffer.shape)
    parameter.grad = buffer
    return parameter


def all_finite(buffers: Sequence[Tensor]) -> bool:
    """Whether no value is infinite or not a number: one pass, one host read for each device and dtype."""
    return all(torch.isfinite(torch.linalg.vector_norm(buffer, torch.inf)).item() for buffer in buffers)
