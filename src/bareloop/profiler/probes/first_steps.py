"""The heavy observer of the first steps: batch, loss, gradient norm, learning rate and parameters, step by step.

It reads tensors, so it waits for the device; it never runs in a counting or a timing window.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from bareloop.profiler.probes.batch import BatchFacts, batch_identity
from bareloop.trace import StepFacts

__all__ = ["StepWindow", "local", "norm", "trained"]


def local(tensor: Any) -> Any:
    """The part of a tensor that lies on this process (a DTensor's shard), detached."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def norm(tensors: Any) -> float | None:
    """2-norm over all tensors in fp64; None when there are none."""
    import torch

    squares = [float(torch.linalg.vector_norm(local(tensor).float(), dtype=torch.float64)) ** 2 for tensor in tensors]
    return math.sqrt(sum(squares)) if squares else None


def trained(optimizer: Any) -> list[Any]:
    """The parameters that an optimizer trains."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


@dataclass
class StepWindow:
    """What was seen since the last step boundary."""

    forwarded: list[BatchFacts] = field(default_factory=list)
    """The first batch that went into a model in each micro-step."""
    loaded: list[BatchFacts] = field(default_factory=list)
    """The batches that the training loader yielded."""
    forwards: int = 0
    backwards: int = 0
    fresh: bool = True
    """True from a backward (or the boundary) to the next forward."""
    losses: list[float] = field(default_factory=list)
    scale: float = 1.0
    clip_norm: float | None = None
    max_grad_norm: float | None = None
    applied: list[float] = field(default_factory=list)
    learning_rates: tuple[float, ...] = ()
    optimizers: dict[int, Any] = field(default_factory=dict)

    def add_backward(self, tensors: Any) -> None:
        """Counts a backward and reads the loss it starts from."""
        self.backwards += 1
        self.fresh = True
        tensors = (tensors,) if hasattr(tensors, "detach") else tuple(tensors or ())
        scalars = [tensor for tensor in tensors if tensor.numel() == 1]
        if scalars:
            self.losses.append(sum(float(tensor.detach()) for tensor in scalars) / self.scale)
        self.scale = 1.0

    def before_step(self, optimizer: Any) -> None:
        """Reads what the optimizer is given."""
        if id(optimizer) not in self.optimizers:
            self.learning_rates += tuple(float(group["lr"]) for group in optimizer.param_groups)
        self.optimizers[id(optimizer)] = optimizer
        self._read_gradients(optimizer)

    def _read_gradients(self, optimizer: Any) -> None:
        # L-BFGS computes its gradients inside step: before it there is nothing to read.
        gradients = [p.grad for p in trained(optimizer) if p.grad is not None]
        value = norm([gradient for gradient in gradients if not gradient.is_sparse])
        if value is not None and self.backwards:
            self.applied.append(value)

    def facts(self, index: int, *, skipped: bool) -> StepFacts:
        """The step as a record."""
        if not self.applied and not skipped:
            for optimizer in self.optimizers.values():
                self._read_gradients(optimizer)
        applied = math.sqrt(sum(value**2 for value in self.applied)) if self.applied else None
        batches = self._batches()
        rows = tuple(row for batch in batches for row in batch.rows)
        parameters = norm(p for optimizer in self.optimizers.values() for p in trained(optimizer))
        return StepFacts(
            index=index,
            batch=batch_identity(rows) if rows else None,
            rows=rows,
            samples=_total(batches, "samples"),
            tokens=_total(batches, "tokens"),
            real_tokens=_total(batches, "real_tokens"),
            labels=_total(batches, "labels"),
            longest=max((batch.longest for batch in batches if batch.longest is not None), default=None),
            width=max((batch.width for batch in batches if batch.width is not None), default=None),
            padded_beyond_longest=_total(batches, "padded_beyond_longest"),
            micro_steps=max(1, self.backwards),
            forwards=self.forwards,
            backwards=self.backwards,
            loss=sum(self.losses) if self.losses else None,
            gradient_norm=self.clip_norm if self.clip_norm is not None else applied,
            applied_gradient_norm=applied,
            max_grad_norm=self.max_grad_norm,
            learning_rates=self.learning_rates,
            parameters=parameters,
            skipped=skipped,
        )

    def _batches(self) -> list[BatchFacts]:
        """What was consumed: what went into the model, unless models were fed more often than the loader yielded."""
        forwarded, loaded = _total(self.forwarded, "samples"), _total(self.loaded, "samples")
        if loaded and (not forwarded or loaded < forwarded):
            return self.loaded
        return self.forwarded

    def merge(self, earlier: "StepWindow") -> None:
        """Takes in a window that turned out to belong to the same step."""
        for name in ("forwarded", "loaded", "losses", "applied"):
            setattr(self, name, getattr(earlier, name) + getattr(self, name))
        self.forwards += earlier.forwards
        self.backwards += earlier.backwards
        self.learning_rates = earlier.learning_rates + self.learning_rates
        self.optimizers = {**earlier.optimizers, **self.optimizers}


def _total(batches: list[BatchFacts], name: str) -> int | None:
    values = [getattr(batch, name) for batch in batches]
    return None if not values or any(value is None for value in values) else sum(values)
