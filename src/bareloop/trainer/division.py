"""Losses and their counts to one gradient: the sum over a window, divided once by the count over all ranks.

That count is known after the window's last forward only. So a micro-batch's loss is divided by a stand-in for it
before backward (sums would leave the range of 16-bit gradients), and the gradients are multiplied by what is missing
at the end: one foreach op a step, none where the factor is known to be 1. With one micro-batch in a window the loss
itself is divided, as a loop by hand does.

Ranks must use the same stand-in, for their gradients are added before they are multiplied. It is agreed on once, and a
power of two, so that no result depends on which one it is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from bareloop.trainer.ranks import Reduction

__all__ = ["Count", "Division", "nonzero", "over_window", "per_micro_batch", "undivided"]

Count: TypeAlias = int | float | Tensor
"""Items that a loss sums over: a number, or a 0-d tensor. A tensor is never read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """Two functions that the hot loop calls; `unit` is the stand-in for a window's count, None at its start."""

    weigh: Callable[[Any, Count | None], tuple[Tensor, Tensor, Count | None, Count | None]]
    """(what loss_fn returned, unit) to (loss as returned, loss for backward, count, unit)."""
    settle: Callable[[list[Count | None], Count | None], tuple[Count | None, Count | None]]
    """(counts of the window, unit) to (count over all ranks, factor for the gradients). Count None: the losses were
    plain means; factor None: nothing to multiply."""


def per_micro_batch(reducing: Reduction) -> Division:
    """Divides each loss by its count over all ranks. Gradients need no factor afterwards."""
    groups, divisor = reducing.groups, reducing.divisor

    def weigh(result: Any, unit: Count | None) -> tuple[Tensor, Tensor, Count | None, None]:
        loss, count = _parts(result)
        if count is None:
            return loss, loss, None, None
        count = _over_ranks(count, groups, loss.device)
        by = nonzero(count)
        by = by if divisor == 1 else by / divisor  # the mean over the ranks, undone
        return loss, loss if not isinstance(by, Tensor) and by == 1 else loss / by, count, None

    return Division(weigh=weigh, settle=_no_factor)


def undivided(reducing: Reduction) -> Division:
    """Leaves the division to an accumulator: sums stay sums, with their counts over all ranks."""
    groups, divisor = reducing.groups, reducing.divisor

    def weigh(result: Any, unit: Count | None) -> tuple[Tensor, Tensor, Count | None, None]:
        loss, count = _parts(result)
        if count is None:
            return loss, loss, None, None
        return loss, loss if divisor == 1 else loss * divisor, _over_ranks(count, groups, loss.device), None

    return Division(weigh=weigh, settle=_no_factor)


def over_window(accumulate: int, reducing: Reduction, device: torch.device) -> Division:
    """Divides each loss by a stand-in for its window's count, and the gradients by the rest.

    For plain losses that is `accumulate`, and the rest is 1 but for a window that was cut short. For counts that are
    numbers, in one process, it is `accumulate` times the first of the window, so that equal counts leave no rest.

    Args:
        accumulate: micro-batches of a whole window.
        reducing: what the model does with the ranks' gradients.
        device: where a count that is a number is put to be summed over ranks.
    """
    groups, divisor = reducing.groups, reducing.divisor
    agreed: Tensor | None = None

    def weigh(result: Any, unit: Count | None) -> tuple[Tensor, Tensor, Count | None, Count | None]:
        nonlocal agreed
        loss, count = _parts(result)
        if count is None:
            return loss, loss / accumulate, None, unit
        if unit is None and not groups and not isinstance(count, Tensor):
            unit = accumulate * (count or 1)
        elif unit is None:
            agreed = unit = _power_of_two(_over_ranks(count, groups, device)) if agreed is None else agreed
        return loss, loss / unit, count, unit

    def settle(counts: list[Count | None], unit: Count | None) -> tuple[Count | None, Count | None]:
        count = _sum(counts)
        if count is None or unit is None:
            return None, None if len(counts) == accumulate else accumulate / len(counts)
        count = _over_ranks(count, groups, device)
        factor = unit * divisor / nonzero(count)
        return count, None if not isinstance(factor, Tensor) and factor == 1 else factor

    return Division(weigh=weigh, settle=settle)


def _no_factor(counts: list[Count | None], unit: Count | None) -> tuple[Count | None, None]:
    return _sum(counts), None


def nonzero(count: Count) -> Count:
    """`count`, or a number that is not 0: nothing counted is a loss of 0 and a gradient of 0, whatever divides them."""
    if not isinstance(count, Tensor):
        return count or 1
    return count.clamp(min=torch.finfo(count.dtype).tiny if count.is_floating_point() else 1)


def _power_of_two(count: Count) -> Tensor:
    """The greatest power of two that is not above `count`, which is a tensor here; 1 for 0."""
    count = torch.as_tensor(count)
    kept = (count + (count == 0)).to(torch.float32).view(torch.int32) & 0x7F800000  # the exponent's bits
    return kept.view(torch.float32)


def _parts(result: Any) -> tuple[Tensor, Count | None]:
    """(loss, count) of what loss_fn returned.

    Raises:
        ValueError: it has neither form, or no gradient flows from the loss.
    """
    loss, count = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    counted = result is loss or (isinstance(count, int | float | Tensor) and not getattr(count, "ndim", 0))
    if not isinstance(loss, Tensor) or loss.ndim or not counted:
        raise ValueError(
            f"loss_fn returned {_described(result)}: it must return (loss_sum, count), a 0-d tensor and a number or "
            "0-d tensor; or one 0-d tensor, the mean loss of the micro-batch"
        )
    if not loss.requires_grad:
        raise ValueError(
            "loss_fn returned a loss that no gradient flows from: it was detached or computed without gradients "
            "(torch.no_grad, .item()), or depends on no parameter that requires them"
        )
    return loss, count


def _described(result: Any) -> str:
    if isinstance(result, Tensor):
        return f"a tensor of shape {list(result.shape)}"
    if isinstance(result, tuple) and not hasattr(result, "_fields"):
        return f"({', '.join(map(_described, result))})"
    return repr(result) if isinstance(result, int | float | None) else f"a {type(result).__name__}"


def _sum(counts: list[Count | None]) -> Count | None:
    """Sum of a window's counts, None where the losses came without: two ops where they are tensors, else none."""
    given: list[Count] = [count for count in counts if count is not None]
    if given and len(given) != len(counts):
        raise ValueError(
            f"loss_fn returned (loss_sum, count) for {len(given)} of the {len(counts)} micro-batches of a step and a "
            "mean loss for the others: return one form always"
        )
    if len(given) < 2:
        return given[0] if given else None
    tensors = [count for count in given if isinstance(count, Tensor)]
    return torch.stack(tensors).sum() if len(tensors) == len(given) else sum(given)


def _over_ranks(count: Count, groups: Sequence[dist.ProcessGroup], device: torch.device) -> Count:
    """Sum of `count` over the ranks of all `groups`: a tensor on `device` where there are any."""
    if not groups:
        return count
    if isinstance(count, Tensor):
        total = count.to(device, copy=True)
    else:
        # Filled on the device: a copy of the number from the host would wait for the device.
        total = torch.full((), count, dtype=torch.int64 if isinstance(count, int) else torch.float32, device=device)
    for group in groups:
        dist.all_reduce(total, group=group)
    return total
