"""A micro-batch that halves after an out-of-memory error, with the same samples per step and the same gradient.

`auto_find_batch_size` of the stock Trainer starts the training anew with a smaller batch: other samples per step,
another schedule, and what was trained is lost. Here the micro-batch that failed is done again in pieces: the step
still sees the same samples and ends at the same place of the same epoch. The size that fits is kept for the run.

What makes the gradient of the pieces that of the whole:

* A loss that is a sum divided by `num_items_in_batch` adds up as it is. A mean is weighted by the labels that each
  piece counts. Whether it is one or the other is not guessed from the signature (T5's takes `**kwargs` and ignores
  the count) but tried: after the first failure the loss of two samples is compared with those of each, in evaluation
  mode. A loss that is neither (contrastive, random targets) is refused there. A part of it below 5e-5 (1e-2 in bf16
  and fp16), the auxiliary loss of a mixture of experts for example, is not noticed. Where a mean over labels and one
  over samples cannot be told apart (each label has the same loss, or bf16), labels are taken. For a mean the labels of
  each micro-batch in pieces are counted on the host: one read.
* What a failed backward left in `.grad` is removed. While a micro-step runs, the gradients of the earlier ones in the
  window are put aside and added after it, which takes one more buffer of gradients for windows of more than one.
* Batch normalisation sees a piece in place of the micro-batch, which is another model: refused. Dropout draws anew
  for each piece: the same distribution, not the same masks.

Refused on several processes: the others already wait in the reduction of the gradients when one of them fails.
"""

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers.trainer_pt_utils import find_batch_size

from bareloop.trainer import losses

__all__ = ["attach", "largest_micro_batch", "out_of_memory", "refuse_shrinking", "training_step"]

logger = logging.getLogger(__name__)

SUM, LABELS, SHIFTED, SAMPLES = "sum", "labels", "shifted labels", "samples"
"""How the loss of a micro-batch follows from those of its pieces: their sum, or their mean weighted by the counted
labels, by those after the first position, or by the samples."""

ENOUGH_TRIES = 8
"""After so many the first of the rules that still agree is taken: in bf16 some can never be told apart."""


@dataclass(kw_only=True, slots=True)
class Fit:
    """What is known of the micro-batches that fit."""

    samples: int | None = None
    """The largest micro-batch to try; None before the first out-of-memory error."""

    rules: tuple[str, ...] = (SUM, LABELS, SHIFTED, SAMPLES)
    """The rules that agree with every loss that was tried."""

    tries: int = 0
    """Pairs of samples that were tried."""


def attach(trainer: Any) -> None:
    """Let this trainer shrink its micro-batches, if its options say so; at the end of its construction.

    Its `training_step` is wrapped on the object, outside of any override.

    Raises:
        ValueError: the promise of the same gradient could not be kept; names the setting and what to do instead.
    """
    refuse_shrinking(trainer)
    if trainer.lean_options.shrink_on_out_of_memory:
        trainer.training_step = partial(training_step, trainer, trainer.training_step)


def refuse_shrinking(trainer: Any) -> None:
    """See `attach`."""
    if not trainer.lean_options.shrink_on_out_of_memory:
        return
    by_hand = "lower per_device_train_batch_size and raise gradient_accumulation_steps by hand"
    args, option = trainer.args, "shrink_on_out_of_memory=True"
    if args.world_size > 1 or args.n_gpu > 1:
        raise ValueError(f"{option}: {max(args.world_size, args.n_gpu)} processes or devices; {by_hand}")
    if args.auto_find_batch_size:
        raise ValueError(f"{option}: auto_find_batch_size=True starts the training anew instead; give one of the two")
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise ValueError(f"{option}: DeepSpeed and FSDP keep gradients where they cannot be taken back; {by_hand}")
    optimizer = str(getattr(args.optim, "value", args.optim))
    if optimizer in ("lomo", "adalomo"):
        raise ValueError(f"{option}: optim={optimizer!r} steps during the backward; choose another or {by_hand}")
    for name, module in trainer.model.named_modules():
        if isinstance(module, _BatchNorm):
            raise ValueError(f"{option}: {name} normalises over the micro-batch; use GroupNorm there, or {by_hand}")


def largest_micro_batch(trainer: Any) -> int | None:
    """Samples of the largest micro-batch that is tried since an out-of-memory error; None if there was none."""
    return _fit(trainer).samples


def out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory ran out, on an accelerator or on the CPU."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, Exception) and should_reduce_batch_size(error)
    )


def training_step(
    trainer: Any,
    stock: Callable[..., Tensor],
    model: nn.Module,
    inputs: dict[str, Any],
    num_items_in_batch: Tensor | int | None = None,
) -> Tensor:
    """The loss (0-d, detached) of one micro-batch whose gradient was added, in one piece or in several.

    Raises:
        RuntimeError: one sample alone does not fit.
        ValueError: the micro-batch or its loss cannot be taken apart.
    """
    fit, size = _fit(trainer), find_batch_size(inputs)
    if size is None or fit.samples is None or size <= fit.samples:
        # A copy, for `compute_loss` may take labels out of it and the micro-batch may be needed again.
        loss = _attempt(trainer, model, lambda: stock(model, copy.copy(inputs), num_items_in_batch))
        if loss is not None:
            return loss
        _shrink(fit, size or 1)
    assert size is not None
    return _in_pieces(trainer, stock, model, inputs, num_items_in_batch, size)


def _in_pieces(
    trainer: Any, stock: Callable[..., Tensor], model: nn.Module, inputs: Any, num_items: Any, size: int
) -> Tensor:
    fit = _fit(trainer)
    shares = _shares(trainer, model, inputs, num_items, size)
    start, total = 0, torch.zeros((), device=trainer.args.device)
    while start < size:
        assert fit.samples is not None
        stop = min(start + fit.samples, size)
        share = None if shares is None else sum(shares[start:stop])
        if share == 0.0:  # no label in it: the loss would be 0 / 0, and its part of the mean is nothing
            start = stop
            continue
        piece = _take(inputs, slice(start, stop), size)
        with _weighted(trainer, share, (stop - start) / size):
            loss = _attempt(trainer, model, lambda piece=piece: stock(model, piece, num_items))
        if loss is None:
            _shrink(fit, stop - start)
            continue
        start, total = stop, total + loss
    return total


def _attempt(trainer: Any, model: nn.Module, run: Callable[[], Tensor]) -> Tensor | None:
    """The loss that `run` returns, its gradient added; None, with gradients as they were, if memory ran out."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kept = [parameter.grad for parameter in parameters]
    recorded, loss = losses.recorded(trainer), None
    for parameter in parameters:
        parameter.grad = None
    try:
        loss = run()
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
    finally:
        if loss is None:
            for parameter, gradient in zip(parameters, kept, strict=True):
                parameter.grad = gradient
    if loss is None:
        # Out of the except block, so that the traceback no longer holds the activations of the failed forward.
        losses.restore(trainer, recorded)
        clear_device_cache(garbage_collection=True)
        return None
    _add_kept(parameters, kept)
    return loss


def _add_kept(parameters: Sequence[nn.Parameter], kept: Sequence[Tensor | None]) -> None:
    """Earlier gradient plus new one, in the order and in the buffer in which autograd would have added them."""
    old, new = [], []
    for parameter, gradient in zip(parameters, kept, strict=True):
        if gradient is None:
            continue
        if parameter.grad is not None and parameter.grad.layout != gradient.layout:
            parameter.grad = gradient + parameter.grad
            continue
        if parameter.grad is not None:
            old.append(gradient)
            new.append(parameter.grad)
        parameter.grad = gradient
    if old:
        torch._foreach_add_(old, new)  # pyright: ignore[reportPrivateImportUsage]


def _shrink(fit: Fit, failed: int) -> None:
    if failed == 1:
        raise RuntimeError(
            "out of memory with a micro-batch of one sample, so there is nothing left to halve; shorten the samples, "
            "turn on gradient_checkpointing, or use a smaller model"
        )
    fit.samples = (failed + 1) // 2
    logger.warning("out of memory with a micro-batch of %d samples: going on with %d", failed, fit.samples)


@contextmanager
def _weighted(trainer: Any, share: float | None, samples: float) -> Any:
    """Within: losses count `share` in the gradient (as they are for None), and extra losses `samples` in the log."""
    unscaled, shadowed, called = trainer.compute_loss, trainer.__dict__.get("compute_loss"), []

    def scaled(*args: Any, **kwargs: Any) -> Any:
        called.append(True)
        returned = unscaled(*args, **kwargs)
        if share is None:
            return returned
        return (returned[0] * share, *returned[1:]) if isinstance(returned, tuple) else returned * share

    trainer.compute_loss = scaled
    losses.weigh(trainer, samples)
    try:
        yield
    finally:
        losses.weigh(trainer, 1.0)
        if shadowed is None:
            del trainer.compute_loss
        else:
            trainer.compute_loss = shadowed
    if share is not None and not called:
        raise ValueError(
            f"shrink_on_out_of_memory=True: training_step of {type(trainer).__name__} does not call compute_loss, "
            "so the pieces of a micro-batch cannot be weighted; call it there, or take the option away"
        )


def _shares(trainer: Any, model: nn.Module, inputs: Any, num_items: Any, size: int) -> list[float] | None:
    """The part of each sample in the loss of the micro-batch; None where losses add up as they are.

    Raises:
        ValueError: no rule agrees with the losses of two samples.
    """
    fit = _fit(trainer)
    found = {rule: _parts(rule, inputs, size) for rule in fit.rules}
    parts = {rule: part for rule, part in found.items() if part is not None}
    first = next(iter(parts.values()), None)
    # Rules that give the same parts need not be told apart yet: with as many labels in each sample, say.
    open_question = (SUM in fit.rules and len(fit.rules) > 1) or any(part != first for part in parts.values())
    if fit.tries == 0 or (open_question and fit.tries < ENOUGH_TRIES):
        fit.rules, fit.tries = _agreeing(trainer, model, inputs, num_items, size, parts), fit.tries + 1
    rule = next(iter(fit.rules))
    return None if rule == SUM else parts.get(rule) or _parts(SAMPLES, inputs, size)


def _agreeing(
    trainer: Any, model: nn.Module, inputs: Any, num_items: Any, size: int, parts: Mapping[str, list[float]]
) -> tuple[str, ...]:
    """The rules that give the loss of a pair of samples from those of each."""
    pair = _telling_pair(parts, size)
    both = _take(inputs, pair, size)
    try:
        whole, one, other = (
            _loss_of(trainer, model, batch, num_items) for batch in (both, _take(both, [0], 2), _take(both, [1], 2))
        )
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise RuntimeError(
            "out of memory in a forward of two samples without gradients, so it cannot be tried how the loss of a "
            "micro-batch follows from its pieces; lower per_device_train_batch_size by hand"
        ) from None
    reduced = trainer.args.bf16 or trainer.args.fp16 or next(model.parameters()).dtype != torch.float32
    tolerance = (1e-2 if reduced else 5e-5) * abs(whole)
    expected = {rule: _mean(part, pair, one, other) for rule, part in parts.items()} | {SUM: one + other}
    agreeing = [rule for rule in _fit(trainer).rules if abs(expected.get(rule, float("nan")) - whole) <= tolerance]
    if not agreeing:
        raise ValueError(
            f"shrink_on_out_of_memory=True: the loss of two samples is {whole:.7g}, of each alone {one:.7g} and "
            f"{other:.7g}: neither their sum nor a mean over labels or samples, so a micro-batch cannot be taken "
            "apart; lower per_device_train_batch_size by hand"
        )
    if LABELS in agreeing and SHIFTED in agreeing and bool(both["labels"][:, 0].ne(-100).any()):
        # A loss that shifts the labels by itself has none left of the first: 0 or 0 / 0.
        alone = _loss_of(trainer, model, _with_first_label_alone(both), num_items)
        agreeing.remove(SHIFTED if math.isfinite(alone) and alone else LABELS)
    return tuple(agreeing)


def _mean(parts: Sequence[float], pair: Sequence[int], one: float, other: float) -> float:
    left, right = (parts[index] for index in pair)
    return (left * one + right * other) / (left + right) if left + right else float("nan")


def _telling_pair(parts: Mapping[str, list[float]], size: int) -> list[int]:
    """Two samples on which the rules differ most: among those with labels, the one with most and the one with fewest."""
    counts = parts.get(LABELS) or parts.get(SHIFTED) or [1.0] * size
    order = sorted((index for index in range(size) if counts[index]), key=lambda index: counts[index])
    return [order[0], order[-1]] if len(order) > 1 else [0, 1]


def _parts(rule: str, inputs: Any, size: int) -> list[float] | None:
    """By sample, its part of a mean that follows the rule; None if there is none."""
    if rule == SUM:
        return None
    if rule == SAMPLES:
        return [1 / size] * size
    labels = inputs.get("shift_labels", inputs.get("labels"))
    if (
        not isinstance(labels, Tensor)
        or labels.ndim == 0
        or len(labels) != size
        or (rule == SHIFTED and labels.ndim < 2)
    ):
        return None
    if rule == SHIFTED:
        if "shift_labels" in inputs:
            return None
        labels = labels[..., 1:]
    counts = labels.ne(-100).reshape(size, -1).sum(dim=1).tolist()
    total = sum(counts)
    return [count / total for count in counts] if total else None


def _with_first_label_alone(inputs: Any) -> Any:
    labels = inputs["labels"].clone()
    labels[:, 1:] = -100
    return {**inputs, "labels": labels}


def _loss_of(trainer: Any, model: nn.Module, inputs: Any, num_items: Any) -> float:
    """The loss without gradient and dropout; modes and recorded losses are left as they were."""
    modes, recorded = [(module, module.training) for module in model.modules()], losses.recorded(trainer)
    model.eval()
    try:
        with torch.no_grad(), trainer.compute_loss_context_manager():
            inputs = trainer._prepare_inputs(copy.copy(inputs))
            loss = trainer.compute_loss(model, inputs, num_items_in_batch=num_items)
    finally:
        losses.restore(trainer, recorded)
        for module, training in modes:
            module.training = training
    return float(loss)


def _take(value: Any, index: slice | list[int], size: int, name: str = "inputs") -> Any:
    """The samples at `index` of a batch of `size`: tensors, arrays and lists by their first dimension.

    Raises:
        ValueError: a tensor whose first dimension is not the samples.
    """
    if isinstance(value, Mapping):
        return {key: _take(entry, index, size, f"{name}[{key!r}]") for key, entry in value.items()}
    shape = getattr(value, "shape", None)
    if shape is not None and len(shape):
        if shape[0] != size:
            raise ValueError(
                f"shrink_on_out_of_memory=True: {name} has shape {tuple(shape)}, its first dimension is not the {size} "
                "samples of the micro-batch, so it cannot be taken apart; lower per_device_train_batch_size by hand"
            )
        return value[index]
    if isinstance(value, (list, tuple)):
        if len(value) != size:
            return type(value)(_take(entry, index, size, f"{name}[{place}]") for place, entry in enumerate(value))
        return value[index] if isinstance(index, slice) else type(value)(value[place] for place in index)
    return value


def _fit(trainer: Any) -> Fit:
    fit: Fit | None = trainer.__dict__.get("_micro_batch_fit")
    if fit is None:
        fit = trainer._micro_batch_fit = Fit()
    return fit
