"""The work ledger: what a step consumed, as observed at the model, the loader and the optimizer."""

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Group", "Ledger", "Optimizer", "Planned", "StepFacts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFacts:
    """One optimizer step of one process, among the first ones, observed with the heavy probes."""

    index: int
    """1 is the first optimizer step of the run."""
    batch: str | None = None
    """Identity of the window's samples in order; None when no batch was seen."""
    rows: tuple[str, ...] = ()
    """Identity of each sample (trailing padding taken off), in order."""
    samples: int | None = None
    tokens: int | None = None
    """Tokens with padding; None when the model is not fed integer tokens."""
    real_tokens: int | None = None
    """Tokens without padding; None when padding can't be told from data."""
    labels: int | None = None
    """Labels that count in the loss (not -100); None when no labels tensor went into the model."""
    longest: int | None = None
    """Longest sample in the step without padding, in tokens."""
    width: int | None = None
    """Width that the samples were padded to, in tokens (the largest in the step)."""
    padded_beyond_longest: int | None = None
    """Tokens in columns that are padding in every row of their micro-batch."""
    micro_steps: int = 1
    forwards: int = 0
    """Forward passes of the outermost module in training."""
    backwards: int = 0
    loss: float | None = None
    """Sum over the window of the values that backward started from, GradScaler's factor taken out."""
    gradient_norm: float | None = None
    """2-norm of all gradients as backward left them, before clipping, in fp64."""
    applied_gradient_norm: float | None = None
    """2-norm of the gradients that the optimizer got."""
    max_grad_norm: float | None = None
    """max_norm of the clip call in this step; infinity when called with it; None without a clip call."""
    learning_rates: tuple[float, ...] = ()
    """Learning rate of each parameter group at the optimizer step."""
    parameters: float | None = None
    """Checksum of the trainable parameters after the step: their 2-norm in fp64."""
    skipped: bool = False
    """True when GradScaler skipped the optimizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A planned quantity and where it was seen."""

    quantity: str
    """"steps", "passes" or "micro_steps"."""
    value: float
    source: str
    """E.g. "transformers.Trainer state.max_steps", "loader length 120 x range(3) at train.py:40"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """One parameter group."""

    learning_rate: float
    weight_decay: float | None
    tensors: int
    elements: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """One optimizer that stepped."""

    name: str
    fused: bool | None
    foreach: bool | None
    groups: tuple[Group, ...]
    per_step: float = 1.0
    """Calls of its step per step of the run (a GAN's discriminator may step more often)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """The work of a step: of one process, or of all processes together (`Trace.work`).

    None means "could not be observed", never "zero".
    """

    samples_per_step: float | None = None
    tokens_per_step: float | None = None
    real_tokens_per_step: float | None = None
    padding_share: float | None = None
    """Padding tokens over all tokens, 0..1."""
    labels_per_step: float | None = None
    micro_steps_per_step: float | None = None
    forwards_per_step: float | None = None
    backwards_per_step: float | None = None
    forward_per_backward: float | None = None
    """Forward passes per block per backward: 1, or 2 with recompute (gradient checkpointing)."""
    planned_steps: float | None = None
    planned_passes: float | None = None
    """Planned passes over the data set."""
    plans: tuple[Planned, ...] = ()
    """Every source of a plan that was seen, also those that lost."""
    dataset_size: int | None = None
    world_size: int = 1
    wrapper: str = "none"
    """"none", "DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDP2"."""
    trainable_parameters: int | None = None
    optimizers: tuple[Optimizer, ...] = ()
    max_grad_norm: float | None = None
    """Clip in fact applied; None without a call; infinity when called with it (a norm is computed, nothing clipped)."""
    clipped_share: float | None = None
    """Share of the observed steps in which the clip changed the gradients."""
    weight_decay: float | tuple[float, ...] | None = None
    """Weight decay of all groups when they agree, else one per group."""
    learning_rate: float | tuple[float, ...] | None = None
    """Learning rate at the first step, one per group when they differ."""
    autocast: str | None = None
    """dtype of autocast during the forward, None when off."""
    matmul_dtypes: Mapping[str, float] = field(default_factory=dict[str, float])
    skipped_steps: int = 0
