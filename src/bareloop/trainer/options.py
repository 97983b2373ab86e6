"""`LeanOptions`: what a lean trainer does beyond the stock one. Each is off unless it cannot change results."""

from dataclasses import dataclass

from bareloop.trainer.evaluation import StreamingMetrics, refuse_metrics
from bareloop.trainer.losses import refuse_names

__all__ = ["LeanOptions"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LeanOptions:
    """Options of `lean(...)` trainers: `Trainer(..., lean_options=LeanOptions(async_checkpoints=True))`.

    Raises:
        ValueError: a value out of range; options that exclude each other.
    """

    async_checkpoints: bool = False
    """Write checkpoints in a thread: training waits for the copy of model and optimizer to host memory (which holds it
    until it is written) and for files of a few kB, not for the disk. The next save, the end of training and callbacks
    that override `on_save` wait for the thread; its error is raised at the end of a step. Refused where the stock save
    has to run (`bareloop.trainer.checkpoint`) and with a `hub_strategy` that pushes checkpoints."""

    stateful_loader: bool = False
    """Resume in mid-epoch from the loader's own state (torchdata's StatefulDataLoader), which checkpoints then hold in
    one more file, instead of reading the batches that were trained on again. A resumed run equals one that was not
    stopped, to the bit, with random collators, iterable data and any number of workers, which must be the same when
    resuming. Needs torchdata; see `bareloop.trainer.resume` for what is read again after all."""

    streaming_metrics: StreamingMetrics | None = None
    """A function of one batch (EvalPrediction of this process's samples) that returns sums by name, of whose totals
    `compute_metrics` then makes the metrics; or a mapping from name to a metric with `update`, `compute` and `reset`,
    as torchmetrics' are. The predictions of no more than one batch are held. None evaluates as the stock Trainer."""

    log_extra_losses: tuple[str, ...] = ()
    """Names of outputs of the model, or of the mapping that your `compute_loss` returns beside the loss, to log: 0-d
    tensors, each a mean over its micro-batch, or mappings of such (each entry is logged by its own name). The log has the
    mean over the micro-steps since the last log, on all processes, without a host read per step. ("aux_loss",), say."""

    shrink_on_out_of_memory: bool = False
    """After an out-of-memory error do the micro-batch again in halves: same samples per step, same gradient. The size
    that fits is kept. One process; not with batch normalisation. See `bareloop.trainer.memory` for what it costs."""

    prefetch_batches: int = 0
    """Batches copied to the accelerator ahead of their use, on a stream of their own; 0 copies each when it is used.
    Refused where there is no accelerator."""

    swarm_counts: str = "samples"
    """What a trainer in a swarm counts towards the target batch, and weighs micro-batches by: "samples", the rows of the
    batches, or "labels", those that are not -100, as gradient accumulation in transformers weighs them. "labels" needs a
    model that takes `num_items_in_batch` (those of transformers do) or a `compute_loss_func`."""

    def __post_init__(self) -> None:
        refuse_metrics(self.streaming_metrics)
        refuse_names(self.log_extra_losses)
        if (
            isinstance(self.prefetch_batches, bool)
            or not isinstance(self.prefetch_batches, int)
            or self.prefetch_batches < 0
        ):
            raise ValueError(f"prefetch_batches={self.prefetch_batches!r}: must be 0 (off) or a number of batches")
        if self.prefetch_batches and self.stateful_loader:
            raise ValueError(
                f"prefetch_batches={self.prefetch_batches} with stateful_loader=True: the loader's state would be ahead "
                "of what was trained on; give one of the two"
            )
        if self.swarm_counts not in ("samples", "labels"):
            raise ValueError(f"swarm_counts={self.swarm_counts!r}: must be 'samples' (rows) or 'labels'")
