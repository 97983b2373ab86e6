"""An engine for tests: peers that are threads of one process, and meet at a condition. Exact, and slow to nobody."""

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bareloop.swarm.engine import RoundFailed, StateReplaced, TrainingState

__all__ = ["InProcessEngine", "Meeting", "threads"]

LIMIT_S = 60
"""Ends a test that hangs."""


class Meeting:
    """Where the peers of a run meet. It begins with `peers` of them."""

    def __init__(self, target: float, peers: int = 1) -> None:
        self.target = target
        self.peers = peers
        self.changed = threading.Condition()
        self.round = 0
        self.samples: dict[int, float] = {}
        """Peer -> its samples of the round."""
        self.offers: dict[int, tuple[list[Tensor], float]] = {}
        """Peer -> the means and samples that it waits with."""
        self.means: list[Tensor] = []
        self.averages = 0
        self.of_all = 0.0
        self.snapshot: Any = None
        """State after the last round."""
        self.failures = 0
        """Averages that are still to fail."""

    def meet(self, me: int, means: Sequence[Tensor], samples: float) -> float:
        """Waits for all peers, and gives each the mean."""
        with self.changed:
            before = self.averages
            self.offers[me] = ([mean.clone() for mean in means], samples)
            self._average_if_all_are_here()
            if not self.changed.wait_for(lambda: self.averages > before, LIMIT_S):
                raise RoundFailed("the others did not come")
            for mean, of_all in zip(means, self.means, strict=True):
                mean.copy_(of_all)
            return self.of_all

    def leave(self, me: int) -> None:
        with self.changed:
            self.samples.pop(me, None)
            self._average_if_all_are_here()

    def _average_if_all_are_here(self) -> None:
        if not self.offers or not self.samples.keys() <= self.offers.keys():
            return
        offers, self.offers = list(self.offers.values()), {}
        self.of_all = sum(samples for _, samples in offers)
        weights = [samples / self.of_all for _, samples in offers]
        kinds = zip(*(means for means, _ in offers), strict=True)
        self.means = [sum(mean * weight for mean, weight in zip(kind, weights, strict=True)) for kind in kinds]
        self.samples = dict.fromkeys(self.samples, 0.0)
        self.averages += 1
        self.changed.notify_all()


class InProcessEngine:
    """See `bareloop.swarm.engine.Engine`."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting
        self.round = 0
        self.records: list[str] = []
        self.asked = 0
        self.closed = 0
        self._state: TrainingState | None = None

    @property
    def peers(self) -> int:
        return len(self.meeting.samples)

    @property
    def global_samples(self) -> float:
        return sum(self.meeting.samples.values())

    def start(self, state: TrainingState, buffers: Sequence[Tensor], *, round: int = 0) -> None:
        self._state, self.round = state, round
        with self.meeting.changed:
            if self.meeting.round > round:
                self._load()
            else:
                self.meeting.round = round
            self.meeting.samples[id(self)] = 0.0
            self.meeting.changed.notify_all()
            enough = self.meeting.changed.wait_for(lambda: len(self.meeting.samples) >= self.meeting.peers, LIMIT_S)
            assert enough, "the others did not come"
            self.meeting.peers = 1

    def ready(self, samples: float) -> bool:
        self.asked += 1
        with self.meeting.changed:
            if self.meeting.round > self.round:
                self._load()
                self.meeting.samples[id(self)] = 0.0
                raise StateReplaced
            self.meeting.samples[id(self)] = samples
            return self.global_samples >= self.meeting.target

    def average(self, buffers: Sequence[Tensor], samples: float) -> float:
        with self.meeting.changed:
            if self.meeting.failures:
                self.meeting.failures -= 1
                raise RoundFailed("on request")
            if self.meeting.round > self.round:
                self._load()
                raise StateReplaced
        return self.meeting.meet(id(self), buffers, samples)

    def applied(self) -> None:
        self.round += 1
        with self.meeting.changed:
            if self.round > self.meeting.round:
                self.meeting.round, self.meeting.snapshot = self.round, copy.deepcopy(_states(self._state))

    def publish(self, record: str) -> None:
        self.records.append(record)

    def close(self) -> None:
        self.closed += 1
        self.meeting.leave(id(self))

    def _load(self) -> None:
        for thing, state in zip(_things(self._state), self.meeting.snapshot, strict=True):
            thing.load_state_dict(copy.deepcopy(state))
        self.round = self.meeting.round


def _things(state: TrainingState | None) -> list[Any]:
    assert state is not None
    return [state.model, state.optimizer, *([] if state.scheduler is None else [state.scheduler])]


def _states(state: TrainingState | None) -> list[Any]:
    return [thing.state_dict() for thing in _things(state)]


def threads(*functions: Callable[[], object]) -> None:
    """Runs them side by side, and raises what one of them raised."""
    errors: list[BaseException] = []

    def guarded(function: Callable[[], object]) -> None:
        try:
            with torch.enable_grad():
                function()
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=guarded, args=(function,), daemon=True) for function in functions]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(LIMIT_S)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in running), "a peer hangs"
