"""What the peers of a run say about themselves, read where they publish it, without taking part in the run.

A reading costs one lookup in hivemind's DHT (about 10 ms on a LAN), or one request a peer to the store beside torchft's
lighthouse (under 1 ms). Records come from strangers: each is checked field by field, and one that is not what it should
be is counted, not shown. Nothing that was received is unpickled; names lose what a terminal would obey.
"""

import json
import math
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Protocol

from bareloop.extras import needs
from bareloop.swarm.addresses import checked, host_and_port
from bareloop.swarm.engines import ENGINES

__all__ = [
    "Board",
    "PublishedRecord",
    "Reading",
    "Row",
    "RunView",
    "Source",
    "Unreachable",
    "WatchOptions",
    "is_number",
    "parse_record",
    "require_listener",
    "views",
    "watching",
]

STALE_S = 5.0
"""A peer publishes about once a second, or with each micro-batch where that is longer."""
GONE_S = 30.0
_LONGEST_RECORD = 4_096
_LONGEST_NAME = 40


class Unreachable(RuntimeError):
    """Nobody answers at the addresses given; the message says what was tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchOptions:
    """Where to look for which run.

    Raises:
        ValueError: a field out of range.
    """

    run_id: str
    """The name that its peers gave to `swarm.join`, or to hivemind.Optimizer."""
    peers: tuple[str, ...]
    """Addresses as `bareloop swarm serve` prints them."""
    engine: str = "hivemind"
    """ "hivemind" or "torchft"."""
    every_s: float = 1.0
    """Seconds between two readings, at least 0.1."""

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ValueError(f"engine={self.engine!r}: must be one of {', '.join(map(repr, ENGINES))}")
        if not self.run_id:
            raise ValueError("run_id='': must be the name of a run")
        if not self.peers:
            raise ValueError("peers=(): give an address, as `bareloop swarm serve` prints it")
        if not 0.1 <= self.every_s < math.inf:
            raise ValueError(f"every_s={self.every_s!r}: must be at least 0.1 seconds")
        checked(self.engine, self.peers)


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRecord:
    """What a peer says about itself. None: unknown, in a run of plain hivemind.Optimizer."""

    peer: str
    round: float
    samples: float | None
    """Of all peers in this round, as it last heard."""
    local_samples: float
    samples_per_s: float
    target: float | None
    peers: float | None
    round_s: float | None
    average_s: float | None
    failures: float | None
    lost_samples: float | None
    time: float
    """Unix seconds of its clock."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What one look found."""

    records: Mapping[str, PublishedRecord]
    """By the name it is stored under."""
    plain: bool = False
    """Whether the run is one of plain hivemind.Optimizer, which tells less."""
    unreadable: int = 0
    """Records that were not what they should be."""
    runs: tuple[str, ...] | None = None
    """Names of all runs that publish there; None where that can't be known."""
    nodes: int | None = None
    """hivemind: nodes of the DHT seen so far, this one not counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A peer and how long ago it last said something."""

    record: PublishedRecord
    age_s: float
    stale: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RunView:
    """A run at one moment. Sums are over the peers that are not stale."""

    run_id: str
    rows: tuple[Row, ...]
    round: float
    samples: float
    """Of all peers in the newest round, as last heard."""
    target: float | None
    samples_per_s: float
    failures: float | None
    lost_samples: float | None
    plain: bool
    unreadable: int
    runs: tuple[str, ...] | None
    nodes: int | None

    @property
    def live(self) -> int:
        """Peers that are not stale."""
        return sum(not row.stale for row in self.rows)


class Source(Protocol):
    """Where records are read."""

    def read(self) -> Reading:
        """What is there now.

        Raises:
            Unreachable: nobody answers any more.
        """
        ...


class Board:
    """Remembers the peers of one run, so that one that falls silent greys and goes instead of vanishing."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._seen: dict[str, tuple[PublishedRecord, float]] = {}

    def update(self, reading: Reading, now: float) -> RunView:
        """The run after `reading` at `now`, in unix seconds of this machine.

        A peer's clock only counts when it is seen for the first time; after that its age is the time since its record
        last changed.
        """
        for key, record in reading.records.items():
            before = self._seen.get(key)
            if before is None:
                self._seen[key] = record, min(now, record.time)
            elif record != before[0]:
                self._seen[key] = record, now
        self._seen = {key: seen for key, seen in self._seen.items() if now - seen[1] <= GONE_S}
        rows = tuple(
            Row(record=record, age_s=max(0.0, now - at), stale=now - at > self._stale_s(record))
            for record, at in sorted(self._seen.values(), key=lambda seen: seen[0].peer)
        )
        return self._view(rows, reading)

    def _stale_s(self, record: PublishedRecord) -> float:
        """A peer that says little, as one of plain hivemind.Optimizer does, is not stale for it."""
        return GONE_S if record.target is None else STALE_S

    def _view(self, rows: tuple[Row, ...], reading: Reading) -> RunView:
        live = [row.record for row in rows if not row.stale]
        newest = max((record.round for record in live), default=0)
        there = [record for record in live if record.round == newest]
        if reading.plain:
            samples = sum(record.local_samples for record in there)
        else:
            samples = max((record.samples or 0.0 for record in there), default=0.0)
        known = [record for record in live if record.target is not None]
        return RunView(
            run_id=self._run_id,
            rows=rows,
            round=newest,
            samples=samples,
            target=max((record.target or 0.0 for record in known), default=0.0) if known else None,
            samples_per_s=sum(record.samples_per_s for record in live),
            failures=sum(record.failures or 0.0 for record in known) if known else None,
            lost_samples=sum(record.lost_samples or 0.0 for record in known) if known else None,
            plain=reading.plain,
            unreadable=reading.unreadable,
            runs=reading.runs,
            nodes=reading.nodes,
        )


def views(options: WatchOptions, source: Source, ended: threading.Event) -> Iterator[RunView]:
    """The run, read every `options.every_s` until `ended` is set.

    Raises:
        Unreachable: nobody answers any more.
    """
    board = Board(options.run_id)
    while not ended.is_set():
        yield board.update(source.read(), time.time())
        ended.wait(options.every_s)


def parse_record(text: "str | bytes") -> PublishedRecord | None:
    """A record as peers publish it; None when it is not one."""
    if len(text) > _LONGEST_RECORD:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    names = {field.name for field in fields(PublishedRecord)}
    if not isinstance(found, dict) or not names <= set(found) or not isinstance(found["peer"], str):
        return None
    numbers = {name: found[name] for name in names - {"peer"}}
    if not all(map(is_number, numbers.values())):
        return None
    return PublishedRecord(peer=_plain(found["peer"]), **numbers)


@contextmanager
def watching(options: WatchOptions) -> Iterator[Source]:
    """A block in which the run's records can be read.

    Raises:
        Unreachable: nobody answers at `options.peers`.
        ImportError: the engine's package is not installed.
    """
    with needs(f"engine={options.engine!r}", "swarm"):
        if options.engine == "hivemind":
            from bareloop.swarm.watch_hivemind import hivemind_source as source
        else:
            from bareloop.swarm.watch_torchft import torchft_source as source
    with source(options.run_id, options.peers) as opened:
        yield opened


def require_listener(host: str, port: int, what: str) -> None:
    """Returns when something accepts a connection at host:port within 5 s.

    Raises:
        Unreachable: nothing does.
    """
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError as error:
        raise Unreachable(f"{what} at {host_and_port(host, port)}: {error.strerror or error}") from error


def is_number(value: Any) -> bool:
    """Whether `value` is a number that a record may hold: not negative, not huge, not NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e18


def _plain(name: str) -> str:
    shown = "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in name)
    return shown if len(shown) <= _LONGEST_NAME else shown[: _LONGEST_NAME - 3] + "..."
