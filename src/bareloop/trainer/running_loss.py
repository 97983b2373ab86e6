"""The sum of losses since the last log, kept without reading the device.

The stock loop asks after every micro-step whether the loss is NaN or infinite: two host reads. Here the losses are
kept as they are and added when somebody looks at the sum (a log, the end), in the same order, with the same rounding
and the same replacement of what is not finite, so the sum has the same bits. On the CPU they are added as Python
numbers: one copy for all of them instead of an op for each. Elsewhere they are added on the device: no read at all.
"""

import math
from ctypes import c_float

import torch
from torch import Tensor

__all__ = ["RunningLoss"]

_KEPT_AT_MOST = 1024
"""Losses kept before they are added, so that a run that never logs does not keep one for each micro-step."""


class RunningLoss:
    """`total[]`, a 0-d tensor, and the losses that are not in it yet."""

    __slots__ = ("_dropped", "_dropped_on_host", "_losses", "_since_log", "total")

    def __init__(self, total: Tensor) -> None:
        self.total = total
        self._dropped: Tensor | None = None
        self._dropped_on_host = 0
        self._losses: list[Tensor] = []
        self._since_log: list[int] = []

    def keep(self, loss: Tensor, since_log: int) -> None:
        """Take the `loss[]` of a micro-step.

        Args:
            since_log: 1 + the steps finished since the last log, to leave the loss out if it is not finite, as
                `logging_nan_inf_filter` does; 0 to add it whatever it is.

        Raises:
            ValueError: the loss is on another device than the sum.
            RuntimeError: it is not one number without dimensions.
        """
        if loss.device != self.total.device:
            raise ValueError(
                f"The loss is on {loss.device} and the trainer's losses are summed on {self.total.device}: "
                "return the loss on the trainer's device"
            )
        if loss.ndim:
            self.fold().add_(loss)  # which torch refuses, as in the stock loop
            return
        self._losses.append(loss)
        self._since_log.append(since_log)
        if len(self._losses) == _KEPT_AT_MOST:
            self.fold()

    def fold(self) -> Tensor:
        """`total[]` with every loss in it."""
        if self._losses:
            losses, self._losses = self._losses, []
            since_log, self._since_log = self._since_log, []
            on_host = self.total.device.type == "cpu" and self.total.dtype == torch.float32
            if on_host and len({loss.dtype for loss in losses}) == 1:
                self._fold_on_host(losses, since_log)
            else:
                self._fold_on_device(losses, since_log)
        return self.total

    def dropped(self) -> int:
        """Losses left out so far. Reads the device where losses are not on the CPU."""
        self.fold()
        return self._dropped_on_host + (0 if self._dropped is None else int(self._dropped))

    def _fold_on_host(self, losses: list[Tensor], since_log: list[int]) -> None:
        # A double holds the exact sum or quotient of two floats to more than 2 * 24 + 2 bits, so rounding it to a float
        # afterwards gives what float arithmetic gives.
        total = self.total.item()
        for loss, steps in zip(torch.stack(losses).tolist(), since_log, strict=True):
            if steps and not math.isfinite(loss):
                self._dropped_on_host += 1
                loss = c_float(total / steps).value
            total = c_float(total + loss).value
        self.total.fill_(total)

    def _fold_on_device(self, losses: list[Tensor], since_log: list[int]) -> None:
        for loss, steps in zip(losses, since_log, strict=True):
            if steps:
                finite = torch.isfinite(loss)
                loss = torch.where(finite, loss, self.total / steps)
                self._dropped = (~finite).long() if self._dropped is None else self._dropped + ~finite
            self.total += loss
