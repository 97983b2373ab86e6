"""Evaluation metrics that stream: memory does not grow with the evaluation set.

The stock loop keeps every prediction until the end, and joins them anew after each batch: 2,000 rows of 128 tokens
with a vocabulary of 30,000 are 31 GB of logits. Its `batch_eval_metrics=True` keeps none, but still gathers each
batch's logits to every process, lets every process compute the same, and leaves the running state to a global of the
user's. Here a process reads its own predictions, the copies of samples that fill the last batch dropped, and only
what the metric keeps of them is put together at the end.

`LeanOptions(streaming_metrics=...)` takes one of two things:

* a function of one batch that returns sums. `compute_metrics` is then called once, with their totals::

    def counts(batch: EvalPrediction) -> dict[str, Tensor]:                  # logits[B, T, V], labels[B, T]
        predicted, labels = batch.predictions[:, :-1].argmax(-1), batch.label_ids[:, 1:]
        return {"right": (predicted == labels).sum(), "counted": (labels != -100).sum()}

    Trainer(..., lean_options=LeanOptions(streaming_metrics=counts),
            compute_metrics=lambda total: {"accuracy": total["right"] / total["counted"]})

* a mapping from name to a metric with `update(predictions, labels)`, `compute()` and `reset()`, as torchmetrics' are,
  for what is not a sum.
"""

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize

from bareloop.trainer import losses

__all__ = ["Metric", "StreamingMetrics", "evaluation_loop", "refuse_metrics", "refuse_streaming"]

STOCK_NAMES = frozenset(
    {"loss", "runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "epoch", "step"}
)


@runtime_checkable
class Metric(Protocol):
    """What a metric of one's own needs. It sees every sample once, on each process, in the order of the data.

    A metric whose `sync_on_compute` is true, as torchmetrics' is by default, is fed the samples of its own process
    only, and puts the processes' states together itself in `compute`. It is moved to the device if it has `to`.
    """

    def update(self, predictions: Any, labels: Any, /) -> None:
        """Add a batch. `predictions` is the first output beside the loss; T5's encoder states, say, are left out."""
        ...

    def compute(self) -> Any:
        """A number, or a mapping from name to number."""
        ...

    def reset(self) -> Any:
        """Forget all batches; called before each evaluation."""
        ...


StreamingMetrics = Callable[[EvalPrediction], Mapping[str, Tensor]] | Mapping[str, Metric]


class Sums:
    """Totals of what a function returns for each batch of one evaluation."""

    def __init__(self, trainer: Any, function: Callable[[EvalPrediction], Mapping[str, Tensor]]) -> None:
        self.trainer, self.function = trainer, function
        self.totals: dict[str, Tensor] = {}

    def add(self, batch: EvalPrediction, own: int) -> None:
        """Add the first `own` samples of this process's batch."""
        if own == 0:  # a mean over no samples, say, would make the totals NaN
            return
        returned = self.function(_first_samples(batch, own))
        if not isinstance(returned, Mapping):
            raise TypeError(f"streaming_metrics must return a mapping from name to sum, got {type(returned).__name__}")
        for name, value in returned.items():
            _add(self.totals, name, _wide(value))

    def results(self) -> Mapping[str, Any]:
        """`compute_metrics` of the totals over all processes: 0-d totals as numbers, others as CPU tensors."""
        # As objects: a process whose samples were all copies has no totals, so their names may differ.
        here = {name: total.cpu() for name, total in self.totals.items()}
        totals: dict[str, Tensor] = {}
        for process in gather_object([here]) if self.trainer.args.world_size > 1 else [here]:
            for name, value in process.items():
                _add(totals, name, value)
        plain = {name: total if total.ndim else total.item() for name, total in totals.items()}
        return self.trainer.compute_metrics(plain)


class Objects:
    """Metrics that keep their own state, over one evaluation."""

    def __init__(self, trainer: Any, metrics: Mapping[str, Metric]) -> None:
        self.accelerator = trainer.accelerator
        self.metrics = metrics
        for metric in metrics.values():
            metric.reset()
            move = getattr(metric, "to", None)
            if move is not None:
                move(trainer.args.device)
        self.all_sync = all(getattr(metric, "sync_on_compute", False) for metric in metrics.values())
        self.alone = trainer.args.world_size == 1

    def add(self, batch: EvalPrediction, own: int) -> None:
        """Feed each metric what it must see: this process's `own` samples, or those of all processes."""
        batch = EvalPrediction(_first_output(batch.predictions), batch.label_ids)
        mine = _first_samples(batch, own)
        ours = mine if self.alone or self.all_sync else self._gathered(batch)
        for metric in self.metrics.values():
            if not getattr(metric, "sync_on_compute", False):
                metric.update(ours.predictions, ours.label_ids)
            elif own:
                metric.update(mine.predictions, mine.label_ids)

    def results(self) -> dict[str, Any]:
        """By name; a metric that returns a mapping gives one entry per key, `name_key`."""
        results: dict[str, Any] = {}
        for name, metric in self.metrics.items():
            value = metric.compute()
            named = isinstance(value, Mapping)
            results.update({f"{name}_{key}": entry for key, entry in value.items()} if named else {name: value})
        return results

    def _gathered(self, batch: EvalPrediction) -> EvalPrediction:
        return EvalPrediction(self._gather(batch.predictions), self._gather(batch.label_ids))

    def _gather(self, tensors: Any) -> Any:
        if tensors is None:
            return None
        padded = self.accelerator.pad_across_processes(tensors, dim=1, pad_index=-100)
        return self.accelerator.gather_for_metrics(padded)


def refuse_metrics(metrics: object) -> None:
    """Refuse what is neither a function nor a mapping of metrics.

    Raises:
        ValueError: naming the entry.
    """
    if isinstance(metrics, Metric):
        raise ValueError(f"streaming_metrics={type(metrics).__name__}: give it a name, as in {{'accuracy': metric}}")
    if metrics is None or (callable(metrics) and not isinstance(metrics, Mapping)):
        return
    if not isinstance(metrics, Mapping) or not metrics:
        raise ValueError(
            f"streaming_metrics={metrics!r}: give a function of a batch (EvalPrediction) that returns sums, "
            "or a mapping from name to metric"
        )
    for name, metric in metrics.items():
        if not isinstance(metric, Metric) or isinstance(metric, type):
            raise ValueError(f"streaming_metrics[{name!r}]: {type(metric).__name__} has no update, compute and reset")


def refuse_streaming(trainer: Any) -> None:
    """Refuse arguments that streaming would leave without effect.

    Raises:
        ValueError: naming the argument.
    """
    metrics = trainer.lean_options.streaming_metrics
    if metrics is None:
        return
    if trainer.args.batch_eval_metrics:
        raise ValueError("batch_eval_metrics=True: streaming_metrics takes its place; give one of the two")
    if trainer.args.prediction_loss_only:
        raise ValueError("prediction_loss_only=True leaves no predictions for streaming_metrics; give one of the two")
    if isinstance(metrics, Mapping) and trainer.compute_metrics is not None:
        raise ValueError(
            "compute_metrics needs every prediction in memory; with a mapping of streaming_metrics drop it"
        )
    if not isinstance(metrics, Mapping) and trainer.compute_metrics is None:
        raise ValueError("streaming_metrics returns sums: give compute_metrics too, a function of their totals")


def evaluation_loop(
    trainer: Any,
    stock: Callable[..., EvalLoopOutput],
    dataloader: Any,
    description: str,
    prediction_loss_only: bool | None = None,
    ignore_keys: list[str] | None = None,
    metric_key_prefix: str = "eval",
) -> EvalLoopOutput:
    """The stock evaluation loop; with streaming metrics it sees no predictions, except for `predict`, which returns them.

    Raises:
        ValueError: the predictions do not come, or a metric takes the name of a stock one.
    """
    options = trainer.lean_options
    if options.log_extra_losses:
        ignore_keys = losses.hidden_in_evaluation(trainer, ignore_keys)
    if options.streaming_metrics is None:
        return stock(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
    kind: Any = Objects if isinstance(options.streaming_metrics, Mapping) else Sums
    stream = kind(trainer, options.streaming_metrics)
    with _streaming(trainer, stream, keep=description == "Prediction"):
        output = stock(dataloader, description, False, ignore_keys, metric_key_prefix)
    assert output.metrics is not None  # the stock loop makes one; its type hint covers other callers
    output.metrics.update(_prefixed(stream.results(), metric_key_prefix))
    return output


@contextmanager
def _streaming(trainer: Any, stream: Sums | Objects, *, keep: bool) -> Any:
    """Within: predictions go to `stream`, and on to the stock loop only where it must `keep` them."""
    step, compute_metrics = trainer.prediction_step, trainer.compute_metrics
    shadowed = trainer.__dict__.get("prediction_step")
    trainer.prediction_step = partial(_prediction_step, trainer, step, stream, keep)
    trainer.compute_metrics = None  # `predict` would call it with the predictions in place of the totals
    try:
        yield
    finally:
        trainer.compute_metrics = compute_metrics
        if shadowed is None:
            del trainer.prediction_step
        else:
            trainer.prediction_step = shadowed


def _prediction_step(
    trainer: Any,
    stock: Callable[..., tuple[Any, Any, Any]],
    stream: Sums | Objects,
    keep: bool,
    model: torch.nn.Module,
    inputs: dict[str, Any],
    prediction_loss_only: bool,
    ignore_keys: list[str] | None = None,
) -> tuple[Any, Any, Any]:
    loss, logits, labels = stock(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
    if logits is None:
        raise ValueError(
            f"streaming_metrics: prediction_step of {type(trainer).__name__} returned no predictions; "
            "let it return (loss, predictions, labels) or take the option away"
        )
    size = find_batch_size(inputs)
    assert size is not None  # the model made predictions from it
    stream.add(_batch(trainer, inputs, loss, logits, labels), _own_samples(trainer.accelerator, size))
    return (loss, logits, labels) if keep else (loss, None, None)


def _batch(trainer: Any, inputs: dict[str, Any], loss: Any, logits: Any, labels: Any) -> EvalPrediction:
    """This process's batch, made as the stock loop makes the whole: after `preprocess_logits_for_metrics`."""
    include = trainer.args.include_for_metrics
    if trainer.preprocess_logits_for_metrics is not None:
        logits = trainer.preprocess_logits_for_metrics(logits, labels)
    main_input = inputs[getattr(trainer.model, "main_input_name", "input_ids")] if "inputs" in include else None
    return EvalPrediction(logits, labels, main_input, loss if "loss" in include else None)


def _own_samples(accelerator: Any, size: int) -> int:
    """How many of this process's `size` samples are not copies that fill the last batch.

    The same rule as accelerate's `gather_for_metrics`, which cuts the gathered batch after `remainder` samples;
    here without the gather. Data of unknown length that processes read on their own has no remainder: all count.
    """
    state = accelerator.gradient_state
    if not state.end_of_dataloader or state.remainder <= 0:
        return size
    return min(max(state.remainder - accelerator.process_index * size, 0), size)


def _first_samples(batch: EvalPrediction, count: int) -> EvalPrediction:
    return EvalPrediction(
        _cut(batch.predictions, count), _cut(batch.label_ids, count), _cut(batch.inputs, count), batch.losses
    )


def _cut(value: Any, count: int) -> Any:
    if isinstance(value, Tensor):
        return value[:count] if value.ndim else value
    if isinstance(value, (tuple, list)):
        return type(value)(_cut(entry, count) for entry in value)
    if isinstance(value, Mapping):
        return {key: _cut(entry, count) for key, entry in value.items()}
    return value


def _first_output(predictions: Any) -> Any:
    return predictions[0] if isinstance(predictions, (tuple, list)) else predictions


def _wide(value: Any) -> Tensor:
    """Whole numbers as int64, which is exact; others as float64 where the device has it."""
    value = torch.as_tensor(value).detach()
    if not value.is_floating_point():
        return value.to(torch.int64)
    return value.float() if value.device.type == "mps" else value.double()


def _add(totals: dict[str, Tensor], name: str, value: Tensor) -> None:
    before = totals.get(name)
    if before is not None and before.shape != value.shape:
        raise ValueError(
            f"streaming_metrics: {name!r} has shape {tuple(value.shape)}, in an earlier batch {tuple(before.shape)}; "
            "sums must have one shape"
        )
    totals[name] = value if before is None else before + value


def _prefixed(results: Any, prefix: str) -> dict[str, Any]:
    if not isinstance(results, Mapping):
        raise TypeError(f"compute_metrics must return a mapping from name to number, got {type(results).__name__}")
    taken = sorted(STOCK_NAMES & {name.removeprefix(f"{prefix}_") for name in results})
    if taken:
        raise ValueError(f"streaming_metrics: {', '.join(taken)} is a name of the stock evaluation; rename the metric")
    plain: Any = denumpify_detensorize(dict(results))
    return {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": value for name, value in plain.items()}
