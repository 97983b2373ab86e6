"""Flat buffers: where each parameter's gradient lies in them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bareloop.swarm.sealed import SealedGradient

__all__ = ["Slot", "laid_out"]

_ALIGNMENT = 16
"""Elements that a view starts at a multiple of: kernels read whole vectors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """A parameter and its part of a flat buffer."""

    parameter: Tensor
    view: Tensor
    seal: SealedGradient


def laid_out(parameters: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Slot, ...]]:
    """Zeroed flat buffers, one per dtype and device, and each parameter's view in them, in the order of `parameters`."""
    kinds: dict[tuple[torch.dtype, torch.device], int] = {}
    starts = []
    for parameter in parameters:
        kind = (parameter.dtype, parameter.device)
        starts.append(kinds.get(kind, 0))
        kinds[kind] = starts[-1] + -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
    buffers = {kind: torch.zeros(size, dtype=kind[0], device=kind[1]) for kind, size in kinds.items()}
    slots = [
        Slot(
            parameter=parameter,
            view=_view(buffers[parameter.dtype, parameter.device], start, parameter),
            seal=SealedGradient(parameter.detach()),
        )
        for parameter, start in zip(parameters, starts, strict=True)
    ]
    return tuple(buffers.values()), tuple(slots)


def _view(buffer: Tensor, start: int, parameter: Tensor) -> Tensor:
    """`buffer[start:]` in the shape of `parameter`, and in its memory order where that has no holes (channels_last)."""
    part = buffer[start : start + parameter.numel()]
    if torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return part.as_strided(parameter.size(), parameter.stride(), start)
    return part.view(parameter.shape)
