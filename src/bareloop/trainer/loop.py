"""Batches to optimizer steps: the loop that people write themselves, with the parts they get wrong done right.

    for step in steps(model, optimizer, batches, loss_fn, accumulate=8, max_norm=1.0, scheduler=scheduler):
        if step.index % 100 == 0:
            print(step.index, step.loss.item(), step.gradient_norm.item())

It costs what the loop by hand costs: the same ops, host reads, collectives and copies as the same work done by hand, and
16 Python calls a step. Exact accumulation has its price where a step has several micro-batches and their losses come
with counts: one foreach multiplication of the gradients (none in one process where the counts are equal numbers), and
over ranks one all-reduce of the count.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from bareloop.trainer.division import Count, Division, nonzero, over_window, per_micro_batch, undivided
from bareloop.trainer.ranks import Reduction, last_reduces, reduction
from bareloop.trainer.step import clipping, compute_device, forwarding, gradient_scaler, multiply, trained, updating

__all__ = ["Accumulator", "Step", "steps"]


@runtime_checkable
class Accumulator(Protocol):
    """Gathers gradients beyond this process and decides when there are enough for a step, e.g. those of a swarm's peers.

    A round is the micro-batches between two averages. Rounds go on where a call of `steps` ends. Where it has a method
    `attach(model, optimizer, scheduler, scaler)` it is called with those of `steps`, before the first micro-batch.
    """

    def micro_batch(self, count: Count, *, reduction: str) -> AbstractContextManager[object]:
        """Around the backward of one micro-batch's loss.

        With reduction="sum" it is a sum over `count` items, of all ranks of a DDP model, where `count` is a tensor; with
        "mean" it is the loss of a loss_fn that does not count, and `count` is 1.
        """
        ...

    def ready(self) -> bool:
        """Whether the round is complete. Asked after each micro-batch: it must not read from the device."""
        ...

    def averaged(self) -> AbstractContextManager[object]:
        """Entered when the round is complete; inside, each param.grad is the weighted mean of the round.

        To leave it starts the next round. Unless it enters with False, for a mean that could not be had: then no step is
        made, the gradients stay, and the round goes on.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One optimizer step. All tensors are 0-d, on the device and without a gradient; nothing of it has been read."""

    index: int
    """Counts the steps of this call of `steps`, from 0."""
    micro_losses: tuple[Tensor, ...]
    """What loss_fn returned for each micro-batch of this process: sums where it counts, else means."""
    count: Count | None
    """Items that the step's losses sum over, of all ranks; None where loss_fn returned plain means."""
    ranks: int
    """Ranks whose gradients made the step."""
    gradient_norm: Tensor | None
    """Norm of the whole gradient before clipping; None without `max_norm`."""
    overflow: Tensor | None
    """Above 0 if a gradient was not finite, so that the parameters were left as they are; None but for "fp16", and with an
    accumulator, which leaves such a round out."""

    @property
    def micro_steps(self) -> int:
        """Micro-batches of this process in the step."""
        return len(self.micro_losses)

    @property
    def loss(self) -> Tensor:
        """Loss of the step, computed on the device when asked for; its mean over the ranks is the global loss."""
        total = self.micro_losses[0] if self.micro_steps == 1 else torch.stack(self.micro_losses).sum()
        by = self.micro_steps if self.count is None else nonzero(self.count)
        if self.ranks > 1 and self.count is not None:
            return total * self.ranks / by
        return total if not isinstance(by, Tensor) and by == 1 else total / by


def steps(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[Any],
    loss_fn: Callable[[Any, Any], Any],
    *,
    accumulate: int | Accumulator = 1,
    max_norm: float | None = None,
    scheduler: Any = None,
    precision: str | None = None,
    scaler: GradScaler | None = None,
) -> Iterator[Step]:
    """One `Step` after each optimizer step, until `batches` ends.

    `loss_fn(model, batch)` returns (loss_sum, count): the loss summed over the micro-batch's items (counted labels, as a
    rule) and their number. The step's gradient is then that of all its micro-batches on all ranks taken as one batch,
    however it was split. Where a step counts 0 items its gradient is 0, and the step is made. Counts may be numbers or
    0-d tensors, of the same kind on every rank.

    Or it returns the mean loss alone. Then the step averages over the window's micro-batches, and DDP and fully_shard
    over the ranks, as loops do: every micro-batch weighs the same. That differs from the whole batch's mean as soon as
    micro-batches hold different numbers of items (padding, masked labels, a short last batch).

    The model is put in training mode once, at the start: a body that calls `model.eval()` calls `model.train()` after it.
    In the body the gradients are gone already. To leave the loop, or an exception in it or in `loss_fn`, drops the
    unfinished window, and training can go on with another call.

    Args:
        model: bare, or under torch.compile, DistributedDataParallel or fully_shard, which then reduce once a step.
        optimizer: over parameters of `model`. It alone decides what is clipped and stepped.
        batches: micro-batches: a loader for one epoch, or any iterable. Moved to the model's device if that is an
            accelerator. With `accumulate` above 1 under DDP or fully_shard one is taken ahead within a window.
        loss_fn: see above.
        accumulate: micro-batches in a step, of which the last of `batches` may have fewer; or an `Accumulator`, such as
            what `bareloop.swarm.join` gives. Under DDP an `Accumulator` makes each micro-step reduce, since no one knows
            beforehand which is the last.
        max_norm: clip the total gradient to this norm; math.inf only measures it.
        scheduler: stepped after each step of the optimizer, and not where "fp16" leaves one out. With a fused optimizer
            that takes one host read a step; with others torch's scaler makes that read itself.
        precision: "bf16" or "fp16" for autocast, "fp16" with scaled gradients; None as the model is.
        scaler: what scales gradients with "fp16". Give one to keep its scale over epochs or in checkpoints.

    Raises:
        ValueError: an argument out of range (at once); `batches` without a batch, what loss_fn returned (on the way).
    """
    device, move = compute_device(model)
    reducing = reduction(model)
    scaler = gradient_scaler(precision, scaler, device)
    gathered = _gathered(accumulate, scaler)
    unscaling = scaler if gathered is None else None  # an accumulator has divided the scale out
    parameters = trained(model, optimizer)
    plan = _Plan(
        window=_window(accumulate, reducing),
        forward=forwarding(loss_fn, model, precision, device, move),
        division=_division(accumulate, reducing, device),
        backward=_backward(scaler, gathered),
        complete=_always if gathered is None else gathered.ready,
        averaged=nullcontext if gathered is None else gathered.averaged,
        multiplied=lambda factor: multiply(parameters(), factor),
        clip=clipping(max_norm, parameters, unscaling, optimizer),
        update=updating(optimizer, scheduler, unscaling),
        clear=optimizer.zero_grad if gathered is None else _nothing,
        abandon=reducing.abandon or _nothing,
        restore=partial(reducing.synchronise, True) if reducing.synchronise else _nothing,
        ranks=reducing.ranks,
    )
    if gathered is not None:
        getattr(gathered, "attach", _not_attached)(model, optimizer, scheduler, scaler)
    return _steps(model, batches, plan)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """What the hot loop calls. Whatever there was to decide is decided in here."""

    window: Callable[[Iterator[Any]], Iterator[Any]]
    """The next micro-batches that belong together, of those that are left."""
    forward: Callable[[Any], Any]
    division: Division
    backward: Callable[[Tensor, Count | None], None]
    complete: Callable[[], bool]
    """Whether a step is due after the window."""
    averaged: Callable[[], AbstractContextManager[object]]
    multiplied: Callable[[Count], None]
    """Multiplies the gradients by a factor."""
    clip: Callable[[], Tensor | None]
    update: Callable[[], Tensor | None]
    """Optimizer, gradient scaler and scheduler."""
    clear: Callable[[], None]
    """Drops the gradients."""
    abandon: Callable[[], None]
    """Drops the gradients that the model keeps elsewhere, after an exception."""
    restore: Callable[[], None]
    """Lets the model reduce gradients again, after an exception."""
    ranks: int


def _steps(model: nn.Module, batches: Iterable[Any], plan: _Plan) -> Iterator[Step]:
    """The hot loop."""
    model.train()
    plan.clear()
    weigh, settle = plan.division.weigh, plan.division.settle
    source, index, losses, counts, unit = iter(batches), 0, [], [], None
    while True:
        before = len(losses)
        try:
            for batch in plan.window(source):
                loss, weighed, count, unit = weigh(plan.forward(batch), unit)
                plan.backward(weighed, count)
                losses.append(loss.detach())
                counts.append(count)
            if len(losses) == before:
                break
            if not plan.complete():  # the batches ended in a round: the next turn will find none
                continue
            count, factor = settle(counts, unit)
            if factor is not None:
                plan.multiplied(factor)
            with plan.averaged() as average:
                if average is False:
                    continue
                norm = plan.clip()
                overflow = plan.update()
            plan.clear()
        except BaseException:  # an interrupt from the keyboard too
            plan.restore()
            plan.clear()
            plan.abandon()
            raise
        # Not in the try: nothing is half done here, so leaving the loop has nothing to undo.
        yield Step(
            index=index,
            micro_losses=tuple(losses),
            count=count,
            ranks=plan.ranks,
            gradient_norm=norm,
            overflow=overflow,
        )
        index, losses, counts, unit = index + 1, [], [], None
    if not index and not losses:
        raise ValueError("batches has no batch: an iterator can be gone through once, so make a new one for each epoch")


def _gathered(accumulate: int | Accumulator, scaler: GradScaler | None) -> Accumulator | None:
    """The accumulator, or None for a number of micro-batches.

    Raises:
        ValueError: it is neither, a number below 1, or an accumulator that knows nothing of the scaler.
    """
    if isinstance(accumulate, int) and not isinstance(accumulate, bool):
        if accumulate < 1:
            raise ValueError(f"accumulate={accumulate}: a step takes at least 1 micro-batch")
        return None
    if not isinstance(accumulate, Accumulator):
        raise ValueError(
            f"accumulate={accumulate!r}: must be a number of micro-batches or an accumulator, which has the methods "
            "micro_batch(count, reduction=...), ready() and averaged()"
        )
    if scaler is not None and not hasattr(accumulate, "attach") and getattr(accumulate, "scaler", None) is not scaler:
        raise ValueError(
            "precision='fp16' with an accumulator that does not divide by the scale: give the same scaler to both, "
            "FlatAccumulator(..., scaler=scaler) and steps(..., scaler=scaler), or use precision='bf16'"
        )
    return accumulate


def _window(accumulate: int | Accumulator, reducing: Reduction) -> Callable[[Iterator[Any]], Iterator[Any]]:
    if not isinstance(accumulate, int):
        return partial(_until_ready, accumulate)
    if accumulate == 1 or reducing.synchronise is None:
        return lambda source: islice(source, accumulate)
    last = last_reduces(reducing.synchronise)
    return lambda source: last(islice(source, accumulate))


def _division(accumulate: int | Accumulator, reducing: Reduction, device: torch.device) -> Division:
    if not isinstance(accumulate, int):
        return undivided(reducing)
    return per_micro_batch(reducing) if accumulate == 1 else over_window(accumulate, reducing, device)


def _until_ready(accumulator: Accumulator, source: Iterator[Any]) -> Iterator[Any]:
    for batch in source:
        yield batch
        if accumulator.ready():
            return


def _backward(scaler: GradScaler | None, gathered: Accumulator | None) -> Callable[[Tensor, Count | None], None]:
    if gathered is not None:
        around, scaled = gathered.micro_batch, _as_it_is if scaler is None else scaler.scale

        def weighted(loss: Tensor, count: Count | None) -> None:
            with around(1, reduction="mean") if count is None else around(count, reduction="sum"):
                scaled(loss).backward()

        return weighted
    if scaler is not None:
        return lambda loss, count: scaler.scale(loss).backward()
    return lambda loss, count: loss.backward()


def _always() -> bool:
    """Whether a window of so many micro-batches makes a step, a short one at the end too."""
    return True


def _not_attached(model: nn.Module, optimizer: Optimizer, scheduler: Any, scaler: GradScaler | None) -> None:
    """For an accumulator that needs to know none of them."""


def _as_it_is(loss: Tensor) -> Tensor:
    return loss


def _nothing() -> None:
    """What is called where there is nothing to do."""
