"""Flat buffers: where each parameter's gradient lies in them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bareloop.swarm.sealed import SealedGradient

__all__ = ["Layout", "laid_out"]

_ALIGNMENT = 16
"""Elements that a view starts at a multiple of: kernels read whole vectors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Parameters and, at the same index, what stands in their `grad`. Tuples beside each other: walks are once a micro-batch."""

    parameters: tuple[Tensor, ...]
    views: tuple[Tensor, ...]
    """The part of a flat buffer that each one's gradient has."""
    seals: tuple[SealedGradient, ...]
    """One for all parameters that look alike: fewer objects to fetch between two backward passes."""


def laid_out(
    parameters: Sequence[Tensor], *, seal: type[SealedGradient] = SealedGradient
) -> tuple[tuple[Tensor, ...], Layout]:
    """Zeroed flat buffers, one per dtype and device, and each parameter's view in them, in the order of `parameters`.

    Args:
        seal: class of `Layout.seals`.
    """
    kinds: dict[tuple[torch.dtype, torch.device], int] = {}
    starts = []
    for parameter in parameters:
        kind = (parameter.dtype, parameter.device)
        starts.append(kinds.get(kind, 0))
        kinds[kind] = starts[-1] + -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
    buffers = {kind: torch.zeros(size, dtype=kind[0], device=kind[1]) for kind, size in kinds.items()}
    views = (
        _view(buffers[parameter.dtype, parameter.device], start, parameter)
        for parameter, start in zip(parameters, starts, strict=True)
    )
    seals: dict[object, SealedGradient] = {}
    layout = Layout(
        parameters=tuple(parameters),
        views=tuple(views),
        seals=tuple(seals.setdefault(_looks(p), seal(p.detach())) for p in parameters),
    )
    return tuple(buffers.values()), layout


def _looks(parameter: Tensor) -> object:
    return parameter.shape, parameter.stride(), parameter.dtype, parameter.device


def _view(buffer: Tensor, start: int, parameter: Tensor) -> Tensor:
    """`buffer[start:]` in the shape of `parameter`, and in its memory order where that has no holes (channels_last)."""
    part = buffer[start : start + parameter.numel()]
    if torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return part.as_strided(parameter.size(), parameter.stride(), start)
    return part.view(parameter.shape)
