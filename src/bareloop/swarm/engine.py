"""The seam between the swarm's door (`door.py`) and the engines beneath it (`hivemind_engine.py`, `torchft_engine.py`).

An engine keeps one peer in step with the others: it says when the peers have enough samples together, makes the mean of
their gradients, and hands the run's state to whoever comes late. It never steps an optimizer and never touches
`param.grad`. A round is the micro-batches of all peers between two means; every peer applies the same mean or none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["Engine", "RoundFailed", "StateReplaced", "TrainingState"]


class RoundFailed(RuntimeError):
    """The mean could not be had. Nothing was applied, and the local gradients are as they were."""


class StateReplaced(RuntimeError):
    """The training state was replaced by that of peers who are further: local gradients belong to parameters that are gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingState:
    """What all peers have in common, and what a late joiner downloads."""

    model: nn.Module
    """Its parameters and buffers, bare or under DistributedDataParallel."""
    optimizer: Optimizer
    scheduler: Any
    """A torch scheduler, or None. Stepped once a round, by the caller."""


class Engine(Protocol):
    """One peer's membership in a run."""

    @property
    def round(self) -> int:
        """Means that the run has applied since it began; the step number."""
        ...

    @property
    def peers(self) -> int:
        """Peers of the run as last heard, this one included."""
        ...

    @property
    def global_samples(self) -> float:
        """Samples of all peers towards the target, as last heard."""
        ...

    def start(self, state: TrainingState, buffers: Sequence[Tensor], *, round: int = 0) -> None:
        """Joins the run; where peers are further than `round`, loads their state into `state` before it returns.

        Raises:
            RuntimeError: no peer answers at the addresses given, or their models differ.
        """
        ...

    def ready(self, samples: float) -> bool:
        """Whether to average now, told this peer's samples of the round. Asked after each micro-batch: it costs under 0.5 ms
        unless it is time to talk to the others.

        Raises:
            StateReplaced: the others had gone on; their state was loaded.
        """
        ...

    def average(self, buffers: Sequence[Tensor], samples: float) -> float:
        """Turns this peer's mean over `samples` in `buffers` into the mean over all peers, in place; returns their samples.

        With 0 samples this peer has nothing to give (its gradients are not finite) and takes the mean of the others.

        Raises:
            RoundFailed: `buffers` are as they were. Also where all peers have 0 samples.
            StateReplaced: as for `ready`.
        """
        ...

    def applied(self) -> None:
        """Told when the optimizer has stepped on the mean: the round is over."""
        ...

    def publish(self, record: str) -> None:
        """Shows `record`, a JSON object, to `bareloop swarm watch`; does not wait, and a failure harms nothing."""
        ...

    def close(self) -> None:
        """Leaves the run: peers are told, processes and threads ended. May be called twice."""
        ...
