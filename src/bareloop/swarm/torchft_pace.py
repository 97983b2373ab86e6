"""When peers that can only talk all at once should talk: as soon as they have the samples, and no sooner.

A question to all peers is a barrier: it takes 5 ms, and each waits for the slowest one's micro-batch. So it isn't asked
after each micro-batch: each time they talk, peers tell each other the size and the seconds of their micro-batches, and all
compute from the same numbers how many micro-batches each does until they talk again. As long as the speeds hold, all are
done within one micro-batch of the fastest, the sum is the target, and a round takes one question. A peer that became slower
asks when the time is over, so that the others wait for one of its micro-batches at most; one that became faster waits.
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Pace", "PaceMeter", "plan"]

_REMEMBERED = 9
"""Micro-batches whose median is a peer's pace: a compilation, a checkpoint or a slow read among them doesn't show."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """A peer's usual micro-batch; zeros before there was one."""

    size: float
    """Samples in it."""
    seconds: float

    @property
    def known(self) -> bool:
        return self.size > 0 and self.seconds > 0


def plan(paces: Sequence[Pace], missing: float, *, least: int) -> tuple[list[int], float]:
    """Micro-batches that each peer does until they have `missing` samples more, and the seconds that this takes.

    It is the shortest time in which whole micro-batches make the sum, which exceeds it by less than one micro-batch a peer.
    While there is a peer of unknown pace, and where nothing is missing, each does one.

    Args:
        paces: one a peer.
        missing: samples.
        least: micro-batches that each does in any case: 1 when a round begins, since nobody holds a peer back from its
            first one; 0 within a round, where a slow peer may wait for the others instead.
    """
    if missing <= 0 or not all(pace.known for pace in paces):
        return [1] * len(paces), 0.0

    def counts(seconds: float) -> list[int]:
        return [max(least, int(seconds / pace.seconds * (1 + 1e-9))) for pace in paces]

    def enough(seconds: float) -> bool:
        return sum(pace.size * count for pace, count in zip(paces, counts(seconds), strict=True)) >= missing

    too_short, long = 0.0, min(math.ceil(missing / pace.size) * pace.seconds for pace in paces)
    if least and enough(0.0):
        return [least] * len(paces), least * max(pace.seconds for pace in paces)
    while long - too_short > 1e-6 * long:
        middle = (too_short + long) / 2
        too_short, long = (too_short, middle) if enough(middle) else (middle, long)
    return counts(long), max(long, least * max(pace.seconds for pace in paces))


class PaceMeter:
    """Measures this peer's micro-batches, and says when its part of the plan is done.

    Args:
        clock: seconds, from any beginning.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sizes: deque[float] = deque(maxlen=_REMEMBERED)
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._samples = 0.0
        self.resume()
        self.follow(1, 0.0)

    @property
    def pace(self) -> Pace:
        """Median size and seconds of this peer's last micro-batches."""
        if not self._sizes:
            return Pace(size=0.0, seconds=0.0)
        return Pace(size=statistics.median(self._sizes), seconds=statistics.median(self._seconds))

    def resume(self) -> None:
        """From here on the time is that of a micro-batch."""
        self._began = self._clock()

    def count(self, samples: float) -> None:
        """Told the samples of the round after a micro-batch, counts it."""
        if samples > self._samples:
            self._sizes.append(samples - self._samples)
            self._seconds.append(max(self._clock() - self._began, 1e-6))
            self._done += 1
            self._samples = samples
        self.resume()

    def begin_round(self) -> None:
        """No samples."""
        self._samples = 0.0

    def follow(self, micro_batches: int, seconds: float) -> None:
        """Takes a plan: so many micro-batches more, or, where that takes longer than 1.1 times the seconds planned, fewer."""
        self._planned, self._done = micro_batches, 0
        self._until = self._clock() + 1.1 * seconds

    @property
    def is_due(self) -> bool:
        """Whether this peer's part of the plan is done, or its time over."""
        return self._done >= self._planned or self._clock() >= self._until
