"""Where a round is, and what the rounds before it took: what a peer logs, and what it shows to `bareloop swarm watch`.

It costs two readings of the clock a micro-batch, and one JSON object of about 300 bytes a second.
"""

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

__all__ = ["Meter", "SwarmStatus", "peer_name", "record"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SwarmStatus:
    """A peer's view of its run. "Samples" are what the counts of the micro-batches count: samples, or labels."""

    round: int
    """Rounds that the run has finished."""
    samples: float
    """Samples of all peers in this round, as last heard."""
    local_samples: float
    """Samples of this peer in this round, as far as they are known on the host."""
    target: float
    """Samples that make a round."""
    peers: int
    """Peers as last heard, this one included."""
    round_samples: float
    """Samples of all peers in the last round."""
    round_s: float
    """What the last round took, averaging included; 0 before there was one."""
    average_s: float
    """What averaging took in the last round, failed attempts included."""
    local_samples_per_s: float
    """Samples of this peer per second outside of averaging: of the last round, or of this one before there was one."""
    failures: int
    """Averages that this peer could not have; the gradients were kept and the round went on."""
    lost_samples: float
    """Samples of this peer whose gradients were dropped, because its parameters were replaced by those of the others."""

    def __str__(self) -> str:
        line = (
            f"round {self.round}: {self.samples:g} of {self.target:g} samples, {self.peers} peers, "
            f"{self.local_samples_per_s:.4g} samples/s here"
        )
        if self.round_s:
            line += f"; the last round took {self.round_s:.3g} s, {self.average_s:.3g} s of it to average"
        if self.failures:
            line += f"; failed averages: {self.failures}"
        if self.lost_samples:
            line += f"; samples lost: {self.lost_samples:g}"
        return line


class Meter:
    """What a peer's rounds took. Begins with the first micro-batch: to join, or to wait for data, is no part of a round."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began: float | None = None
        self._averaging_s = 0.0
        self._averaging_since: float | None = None
        self.round_s = 0.0
        self.average_s = 0.0
        self.round_samples = 0.0
        self._samples_per_s: float | None = None

    def begin(self) -> None:
        """A micro-batch begins; the first one begins the round."""
        if self._began is None:
            self._began = self._clock()

    def averaging(self) -> None:
        """From here to `averaged` the peer waits for the others."""
        self._averaging_since = self._clock()

    def averaged(self) -> None:
        if self._averaging_since is not None:
            self._averaging_s += self._clock() - self._averaging_since
            self._averaging_since = None

    def finish(self, samples: float, of_all: float) -> None:
        """The round is over, and the next one begins.

        Args:
            samples: this peer's.
            of_all: all peers'.
        """
        now = self._clock()
        self.round_s = 0.0 if self._began is None else now - self._began
        self.average_s, self.round_samples = self._averaging_s, of_all
        computing_s = self.round_s - self.average_s
        self._samples_per_s = samples / computing_s if computing_s > 0 else None
        self._began, self._averaging_s = now, 0.0

    def drop(self) -> None:
        """The round is given up; the next micro-batch begins another."""
        self._began, self._averaging_s, self._averaging_since = None, 0.0, None

    def samples_per_s(self, samples: float) -> float:
        """Of the last round; of this one, with `samples` so far, before there was one."""
        if self._samples_per_s is not None:
            return self._samples_per_s
        computing_s = 0.0 if self._began is None else self._clock() - self._began - self._averaging_s
        return samples / computing_s if computing_s > 0 else 0.0


def peer_name() -> str:
    """This peer's name in records: machine and process."""
    return f"{socket.gethostname()}-{os.getpid()}"


def record(peer: str, status: SwarmStatus) -> str:
    """The JSON object that `bareloop swarm watch` reads; its `time` is in unix seconds."""
    fields = asdict(status)
    del fields["round_samples"]
    fields["samples_per_s"] = fields.pop("local_samples_per_s")
    return json.dumps({"peer": peer, **fields, "time": time.time()})
