"""What peers say of themselves when they all talk, and what follows: the same for each of them, as all have the same numbers.

One row of numbers a peer, summed over peers that fill in their own and leave the others' at 0. A decision that any peer
made from what it alone knows would leave the others waiting in a collective.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Literal

from bareloop.swarm.torchft_pace import Pace

__all__ = ["COLUMNS", "Census", "Row", "Stage"]

Stage = Literal["retry", "wait", "found", "average", "transfer", "go"]
"""What all do next: ask again, since strangers are among them; wait for more peers; take the first one's state to begin
with; average; hand states to those who are behind; go on with micro-batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A peer's facts."""

    run: float
    """Fingerprint of the run's name."""
    setup: float
    """Fingerprint of what peers have in common: model, optimizer, scheduler, target."""
    step: float
    """Commits in its state; 0 is none, not even a common beginning."""
    entering: float
    """1 while it is in `start`."""
    min_peers: float
    """Peers without which it makes no mean."""
    samples: float
    size: float
    """Samples of its usual micro-batch."""
    seconds: float
    """Of its usual micro-batch."""

    def numbers(self) -> tuple[float, ...]:
        return astuple(self)


COLUMNS = tuple(field.name for field in fields(Row))


@dataclass(frozen=True, kw_only=True, slots=True)
class Census:
    """All peers of a quorum, in the order of their ranks."""

    rows: tuple[Row, ...]
    me: int
    """This peer's rank."""

    @classmethod
    def of(cls, table: Sequence[Sequence[float]], me: int) -> "Census":
        """From the table[peers, columns]."""
        return cls(rows=tuple(Row(**dict(zip(COLUMNS, row, strict=True))) for row in table), me=me)

    @property
    def top(self) -> int:
        """Step of those who are furthest."""
        return int(max(row.step for row in self.rows))

    @property
    def samples(self) -> float:
        """Of those who are furthest: gradients of older parameters don't count."""
        return sum(row.samples for row in self.rows if row.step == self.top)

    def paces(self) -> list[Pace]:
        return [Pace(size=row.size, seconds=row.seconds) for row in self.rows]

    def is_behind(self, rank: int) -> bool:
        return self.rows[rank].step < self.top

    def is_foreign(self, rank: int) -> bool:
        """Whether `rank` trains something else than those who were there before it."""
        return (self.rows[rank].run, self.rows[rank].setup) != (self._first.run, self._first.setup)

    def runs_differ(self, rank: int) -> bool:
        """Whether `rank` is in the wrong run, rather than in the right one with the wrong model."""
        return self.rows[rank].run != self._first.run

    def stage(self, target: float) -> Stage:
        """What all do next."""
        min_peers = max(row.min_peers for row in self.rows)
        if any(self.is_foreign(rank) for rank in range(len(self.rows))):
            return "retry"
        current = sum(row.step == self.top for row in self.rows)
        if self.top == 0:
            return "found" if current >= min_peers else "wait"
        if current >= min_peers and self.samples >= target:
            return "average"
        return "go" if current == len(self.rows) else "transfer"

    def donor(self, rank: int) -> int | None:
        """Who gives its state to `rank`; None where it needs none."""
        if self.top == 0:
            return None if rank == 0 else 0
        if not self.is_behind(rank):
            return None
        donors = [other for other in range(len(self.rows)) if not self.is_behind(other)]
        return donors[rank % len(donors)]

    def receivers(self, rank: int) -> list[int]:
        """Whom `rank` gives its state to."""
        return [other for other in range(len(self.rows)) if self.donor(other) == rank]

    @property
    def _first(self) -> Row:
        """A peer that was in the run before those who are entering, if there is one."""
        settled = [row for row in self.rows if not row.entering]
        return max(settled or self.rows, key=lambda row: row.step)
