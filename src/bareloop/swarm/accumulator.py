"""Gradient accumulation that costs what PyTorch's own does, weights micro-batches exactly, and is whole in one tensor.

    accumulator = FlatAccumulator(model.parameters(), target=256)
    for batch in batches:
        with accumulator.micro_batch(len(batch)):
            loss_fn(model, batch).backward()            # a mean over the micro-batch
        if accumulator.ready():
            with accumulator.averaged():                # the mean over all 256, in param.grad
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()

While a micro-batch runs, `param.grad` is a view into one flat buffer per dtype and device, so that autograd's own add
is the accumulation: no second copy of the gradients, no operator more than a plain loop makes. Micro-batches of one
size need no arithmetic; where the size changes, the buffer is multiplied once (8 bytes a parameter), since

    sum_i n_i g_i = anchor * buffer,  anchor = n of the last micro-batch,

holds again after buffer *= old anchor / new anchor. An alternative was to weight each gradient by a hook on its
parameter (2 us per parameter and backward, and as many kernels). Between micro-batches `param.grad` is sealed.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from bareloop.swarm.layout import laid_out
from bareloop.swarm.scaling import RoundScaling, all_finite
from bareloop.swarm.sealed import guard_optimizers

__all__ = ["Average", "FlatAccumulator"]

logger = logging.getLogger(__name__)


class Average(Protocol):
    """Averaging with the other peers."""

    def __call__(self, buffers: Sequence[Tensor], samples: float) -> None:
        """Turns this peer's mean in `buffers`, weighted by its `samples`, into the mean over all peers, in place.

        Returns only when it has; what it raises leaves the round open and the local gradients in it. With 0 samples the
        buffers are zeros: this peer has nothing to give and takes the mean of the others.
        """
        ...


class FlatAccumulator:
    """Sums gradients of micro-batches in flat buffers and gives their weighted mean.

    Args:
        parameters: those to train; others (`requires_grad=False`) are left alone, doubles count once.
        target: samples (or counted tokens) that make a round; None leaves that to you. Makes it an accumulator that
            `bareloop.steps(accumulate=...)` takes.
        compat: let each micro-batch's gradient be clipped and zeroed by itself, as `hivemind.Optimizer` does: it is added
            to the buffer in one fused operator at the end of its block, and the gradients take twice the memory.
        average: averages with other peers when a round ends; None trains alone.
        scaler: scales the losses (`scaler.scale(loss).backward()`). Its scale holds for the round; inside `averaged` the
            gradient is unscaled and `optimizer.step()` is called itself, not through the scaler, which is updated on leaving.

    Raises:
        ValueError: no parameter to train; a sharded (DTensor) one; a target that is not above 0; a disabled scaler.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        target: float | None = None,
        compat: bool = False,
        average: Average | None = None,
        scaler: GradScaler | None = None,
    ) -> None:
        chosen = [p for p in {id(p): p for p in parameters}.values() if p.requires_grad]
        if not chosen:
            raise ValueError("parameters holds none that requires a gradient; freeze less, or give model.parameters()")
        sharded = [p for p in chosen if _is_sharded(p)]
        if sharded:
            raise ValueError(
                f"parameters holds {len(sharded)} DTensors: a sharded model can't be accumulated in flat buffers; inside a"
                " peer use DDP, or accumulate with bareloop.steps(accumulate=N)"
            )
        guard_optimizers()
        if target is not None and not target > 0:
            raise ValueError(f"target={target!r}: must be a number of samples or tokens above 0, or None")
        self.compat = compat
        self.target = target
        self.buffers: tuple[Tensor, ...]
        """One flat tensor per dtype and device; between rounds zero."""
        self.buffers, self._layout = laid_out(chosen)
        self._average = average
        self.scaler = scaler
        self._scaling = None if scaler is None else RoundScaling(scaler, self.buffers)
        self._open: str | None = None
        self._begin_round()
        self._seal()

    def _begin_round(self) -> None:
        self._samples: float = 0
        self._counted: Tensor | None = None
        """Counts that are tensors of an accelerator, summed there."""
        self._arriving: list[tuple[Tensor, torch.Event]] = []
        """The same counts on their way to the host, each with the event of its arrival."""
        self._arrived: float = 0
        self._micro_batches = 0
        self._anchor: float | None = None
        self._reduction: str | None = None
        self._divisor: float | Tensor | None = None
        """What the buffers are divided by now; None while they hold the running sum."""
        self._damage: str | None = None
        """Why this round can't be finished."""

    @property
    def samples(self) -> float:
        """Samples (or counted tokens) of this round so far; reads from the device where counts were given as tensors."""
        return self._samples if self._counted is None else self._samples + self._counted.item()

    @property
    def known_samples(self) -> float:
        """Those of `samples` that are known on the host; reads nothing from the device."""
        while self._arriving and self._arriving[0][1].query():
            self._arrived += self._arriving.pop(0)[0].item()
        return self._samples + self._arrived

    @property
    def micro_batches(self) -> int:
        """Micro-batches of this round so far."""
        return self._micro_batches

    def ready(self) -> bool:
        """Whether the round has its `target`, as far as is known on the host: nothing waits for the device.

        Counts that are tensors of an accelerator are copied to the host behind the work queued there, so a round may get a
        few micro-batches more than it needs; they are weighted as all others.

        Raises:
            RuntimeError: there is no target.
        """
        if self.target is None:
            raise RuntimeError("ready() without a target: give FlatAccumulator(..., target=N)")
        return self.known_samples >= self.target

    @contextmanager
    def micro_batch(self, count: "float | Tensor", *, reduction: str = "mean") -> Iterator[None]:
        """A block whose backward passes belong to one micro-batch.

        When it raises after a part of its gradient was added, the round can't be finished: `averaged` says so, and `reset`
        begins another. (With compat=True the round goes on without that micro-batch.)

        Args:
            count: samples or counted tokens in it; 0 makes the block count for nothing.
            reduction: "mean" when the loss is a mean over `count`, "sum" when it is a sum; then `count` may be a tensor,
                which is not read. One round holds one kind.

        Raises:
            ValueError: a negative count, an unknown reduction, a tensor with reduction="mean", another reduction than
                the round's.
            RuntimeError: inside another block of this accumulator; a gradient left its buffer.
        """
        self._enter(count, reduction)
        before = [buffer._version for buffer in self.buffers]
        try:
            yield
            self._close(count, reduction)
        except BaseException as error:
            if before != [buffer._version for buffer in self.buffers]:
                self._damage = f"{type(error).__name__} in the middle of a micro-batch, {error}"
            self._seal()
            raise
        finally:
            self._open = None

    @contextmanager
    def averaged(self) -> Iterator[bool]:
        """A block with the round's weighted mean in `param.grad`; leaving it starts the next round.

        A parameter that got no gradient in the whole round has one of zeros. When the block raises, the round stays open
        with its gradients as they were accumulated, unless they were changed in place.

        Enters with True; with False and zeros where scaled gradients overflowed and there is no mean of other peers: leave
        out the step, the next round has a lower scale. Among peers a local mean that is not finite counts for nothing.

        Raises:
            RuntimeError: nothing was accumulated, a micro-batch failed halfway, or inside another block of this accumulator.
        """
        self._require_closed("averaged")
        self._open = "averaged"
        finite = True
        try:
            self._require_whole()
            finite = self._unscale()
            self._divide()
            if self._average is not None:
                self._average(self.buffers, self.samples if finite else 0)
            self._show_views()
            yield finite or self._average is not None
        except BaseException:
            if finite:
                self._multiply_back()
            else:
                self.reset()
            raise
        else:
            self.reset()
            if self._scaling is not None:
                self._scaling.update()
        finally:
            self._open = None
            self._seal()

    def reset(self) -> None:
        """Drops the round: zero buffers, no samples."""
        for buffer in self.buffers:
            buffer.zero_()
        self._begin_round()

    def release(self) -> None:
        """Gives `param.grad` back to PyTorch: None everywhere. The accumulator is not usable afterwards."""
        self._clear()
        self._open = "release"

    def _require_closed(self, name: str) -> None:
        if self._open is not None:
            raise RuntimeError(f"{name}() inside {self._open}(): end that block first")

    def _enter(self, count: "float | Tensor", reduction: str) -> None:
        """Opens a micro-batch: its gradients go into the buffers, or, where they are added or dropped after it, nowhere."""
        self._require_closed("micro_batch")
        self._check(count, reduction)
        self._open = "micro_batch"
        if self.compat or (not isinstance(count, Tensor) and count == 0):
            self._clear()
        else:
            self._weigh(count, reduction)
            self._show_views()

    def _check(self, count: "float | Tensor", reduction: str) -> None:
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction={reduction!r}: must be 'mean' or 'sum', what the loss is over the micro-batch")
        if isinstance(count, Tensor):
            if reduction == "mean":
                raise ValueError(
                    "count is a tensor: its value would have to be read from the device to weight a mean. Give a number, or"
                    " backward the sum of the losses with reduction='sum'"
                )
        elif not count >= 0:
            raise ValueError(f"count={count!r}: must be a number of samples or tokens, 0 or more")
        if self._reduction not in (None, reduction):
            raise ValueError(
                f"reduction={reduction!r} in a round of reduction={self._reduction!r}: one round, one kind"
            )

    def _weigh(self, count: "float | Tensor", reduction: str) -> None:
        """Brings the buffer to the weight of this micro-batch."""
        if reduction == "sum":
            self._anchor = 1.0
            return
        if self._anchor is not None and self._anchor != count:
            for buffer in self.buffers:
                buffer.mul_(self._anchor / count)
        self._anchor = float(count)

    def _close(self, count: "float | Tensor", reduction: str) -> None:
        """Seals what the block's backward passes left in `param.grad`; nothing is counted whose gradient is not in a buffer."""
        if not isinstance(count, Tensor) and count == 0:
            self._seal()
            return
        if self.compat:
            self._add(count, reduction)
            self._seal()
        else:
            self._seal_views()
        if isinstance(count, Tensor) and count.device.type == "cpu":
            self._samples += count.item()  # no device to wait for
        elif isinstance(count, Tensor):
            self._counted = count.detach().clone() if self._counted is None else self._counted + count.detach()
            self._send(count.detach())
        else:
            self._samples += count
        self._reduction = reduction
        self._micro_batches += 1

    def _send(self, count: Tensor) -> None:
        """Starts the copy of a count to the host."""
        if self.target is None:
            return
        host = torch.empty((), dtype=count.dtype, pin_memory=True)
        host.copy_(count, non_blocking=True)
        event = torch.Event(count.device)
        event.record()
        self._arriving.append((host, event))

    def _add(self, count: "float | Tensor", reduction: str) -> None:
        """compat: adds each gradient, as the user left it, with its weight; one fused operator per device and dtype."""
        if self._anchor is None:
            self._anchor = 1.0 if reduction == "sum" else float(count)
        weight = 1.0 if reduction == "sum" else float(count) / self._anchor
        views: list[Tensor] = []
        gradients: list[Tensor] = []
        for parameter, view in zip(self._layout.parameters, self._layout.views, strict=True):
            if parameter.grad is not None:
                views.append(view)
                gradients.append(parameter.grad)
        if views:
            torch._foreach_add_(views, gradients, alpha=weight)  # pyright: ignore[reportPrivateImportUsage]

    def _seal_views(self) -> None:
        """Seals the gradients, in one walk with the look at whether each of them is in its buffer."""
        strays = []
        for parameter, view, seal in zip(self._layout.parameters, self._layout.views, self._layout.seals, strict=True):
            if parameter.grad is not view:
                strays.append(tuple(parameter.shape))
            parameter.grad = seal
        if strays:
            raise RuntimeError(
                f"the gradient of a parameter of shape {strays[0]} left its buffer inside micro_batch(): zero_grad() belongs"
                " outside of the block; DistributedDataParallel needs gradient_as_bucket_view=False;"
                " backward(create_graph=True) needs FlatAccumulator(..., compat=True)"
            )

    def _require_whole(self) -> None:
        if not self._micro_batches:
            raise RuntimeError("averaged() before any micro_batch(): the round holds no gradient")
        if self._counted is None and self._samples == 0:
            raise RuntimeError("averaged() of a round that counts 0: there is no mean of nothing; call reset()")
        if self._damage is not None:
            raise RuntimeError(f"the sum holds a part of a micro-batch that failed ({self._damage}): call reset()")

    def _unscale(self) -> bool:
        """Divides by the scale; False, with zeros in the buffers, for a mean that must not reach parameters or peers."""
        finite = True
        if self._scaling is not None:
            finite = self._scaling.unscale()
        elif self._average is not None:
            finite = all_finite(self.buffers)
        if not finite:
            logger.warning("a gradient of %s samples is not finite: they count for nothing in this round", self.samples)
            for buffer in self.buffers:
                buffer.zero_()
        return finite

    def _divide(self) -> None:
        total = self._samples if self._counted is None else self._counted + self._samples
        self._divisor = total / self._anchor if self._anchor is not None else None
        if self._divisor is not None:
            for buffer in self.buffers:
                buffer.div_(self._divisor)

    def _multiply_back(self) -> None:
        divisor, self._divisor = self._divisor, None
        if divisor is None:
            return
        if self._scaling is not None:
            self._scaling.scale_back()
        for buffer in self.buffers:
            buffer.mul_(divisor)

    def _clear(self) -> None:
        for parameter in self._layout.parameters:
            parameter.grad = None

    def _show_views(self) -> None:
        for parameter, view in zip(self._layout.parameters, self._layout.views, strict=True):
            parameter.grad = view

    def _seal(self) -> None:
        for parameter, seal in zip(self._layout.parameters, self._layout.seals, strict=True):
            parameter.grad = seal


def _is_sharded(parameter: Tensor) -> bool:
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(parameter, DTensor)
