"""Who takes part in a run on hivemind's DHT: where each peer stands, what it has gathered, and whether it still lives.

hivemind's ProgressTracker tells how many peers and samples there are, but not who they are, which parameters they hold, or
that one is about to join; it hides a peer without samples and trusts clocks to agree. This roster is one small signed
record a peer (about 300 bytes), written about once a second and at once where it matters, and read 1 to 5 times a second:
two calls of the DHT, some 3 ms of CPU in its process. A peer is given up when its record has not changed for
`forget_after_s` of this peer's own reading, so neither wrong clocks nor a process that slept count others out.
"""

import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

from hivemind.dht import DHT
from hivemind.utils import ValueWithExpiration, get_dht_time

__all__ = ["PeerRecord", "Roster", "View", "group_key", "lineage_after"]

_FASTEST_READ_S = 0.2
"""Seconds between two looks at the others where the end of a round is near or awaited."""

_SLOWEST_READ_S = 1.0

_WRITE_S = 0.2
"""Seconds between two reports of a growing number of samples."""

_CLOCKS_S = 3.0
"""How far hivemind lets clocks be apart, in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerRecord:
    """What one peer says about itself."""

    peer: bytes
    """Its address in the swarm, as hivemind's PeerID in bytes."""
    round: int
    """Means that its parameters have seen."""
    lineage: str
    """Names the parameters: equal for peers who started alike and have applied the same means."""
    samples: float
    """Samples of its open round."""
    rate: float
    """Samples a second."""
    pace_s: float
    """Longest time between two of its micro-batches lately."""
    waiting: bool
    """It is averaging, or waits for others to do so."""
    loading: bool
    """It downloads the state of `round`."""
    schema: str
    """Names the shapes and types of the model's tensors."""
    client: bool
    """It can't be reached, only reach."""
    left: bool
    """It has taken its leave."""
    beat: int
    """Grows with each record."""


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """The other peers as last read."""

    read: int
    """Counts readings."""
    others: tuple[PeerRecord, ...]
    left: frozenset[bytes] = frozenset()
    """Peers who took their leave a moment ago."""

    def beside(self, round: int, lineage: str) -> tuple[PeerRecord, ...]:
        """Those who hold the parameters that `lineage` names."""
        return tuple(p for p in self.others if (p.round, p.lineage) == (round, lineage))

    def ahead_of(self, round: int, lineage: str) -> tuple[PeerRecord, ...]:
        """Those whose state a peer at (`round`, `lineage`) must take; empty where it holds the state to hold.

        Most rounds win; where peers went apart (a cut network), most peers, then an arbitrary side, the same for all.
        """
        standing = [(p.round, p.lineage) for p in self.others]
        mine = (round, lineage)
        best = max({*standing, mine}, key=lambda s: (s[0], standing.count(s) + (s == mine), s[1]))
        return () if best == mine else self.beside(*best)


class Roster(threading.Thread):
    """Keeps this peer's record in the DHT and reads those of the others, until `close`.

    Args:
        dht: started.
        key: where the run's records are.
        subkey: where this peer's is; with the public key of a validator of `dht` in it, nobody else can write there.
        mine: this peer's first record; it is not written before `report`.
        forget_after_s: silence after which a peer counts as gone.
        eta_s: how long the round may last yet, in seconds; the roster looks the closer the less it is.
    """

    def __init__(
        self,
        dht: DHT,
        key: str,
        subkey: bytes,
        mine: PeerRecord,
        forget_after_s: float,
        eta_s: Callable[[], float],
    ) -> None:
        super().__init__(name="bareloop.swarm.roster", daemon=True)
        self._dht, self._key, self._subkey = dht, key, subkey
        self._forget_after_s, self._eta_s = forget_after_s, eta_s
        self._changed = threading.Condition()
        self._mine, self._written, self._write_at = mine, mine.beat, float("inf")
        self._heard: dict[bytes, tuple[PeerRecord, float]] = {}
        """By subkey: the last record, and the seconds of reading in which it has not changed."""
        self._last_read = self._read_at = time.monotonic()
        self._hurry = self._reading = False
        self._closing = False
        self._last_store: Any = None
        self.view = View(read=0, others=())

    @property
    def mine(self) -> PeerRecord:
        return self._mine

    def report(self, record: PeerRecord, *, now: bool = False) -> None:
        """Takes in this peer's new record; written soon, or at once."""
        with self._changed:
            self._mine = record
            due = time.monotonic() + (0.0 if now else _WRITE_S)
            if due < self._write_at or self._write_at == float("inf"):
                self._write_at = due
            if now:
                self._changed.notify_all()

    def look(self, timeout_s: float) -> View:
        """The others as read after this call began; the last view where that takes longer than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            # One that is under way began before.
            wanted = self.view.read + (2 if self._reading else 1)
            self._hurry = True
            self._changed.notify_all()
            while self.view.read < wanted and (left := deadline - time.monotonic()) > 0 and self.is_alive():
                self._hurry = True
                self._changed.wait(min(left, 0.1))
            return self.view

    def run(self) -> None:
        while not self._closing:
            with self._changed:
                pause_s = min(self._read_at, self._write_at) - time.monotonic()
                if pause_s > 0 and not self._hurry and not self._closing:
                    self._changed.wait(min(pause_s, _FASTEST_READ_S))
                if self._closing:
                    return
                write, read = time.monotonic() >= self._write_at, self._hurry or time.monotonic() >= self._read_at
                self._hurry, self._reading = False, read
                if write:  # the next beat is due in any case: silence is what others take for death
                    self._write_at = time.monotonic() + self._forget_after_s / 5
            if write:
                self._write(self._mine)
            if read:
                self._read()

    def _write(self, record: PeerRecord) -> None:
        self._written += 1
        self._last_store = self._dht.store(
            self._key,
            asdict(record) | {"beat": self._written},
            get_dht_time() + self._forget_after_s + _CLOCKS_S,
            subkey=self._subkey,
            return_future=True,
        )

    def _read(self) -> None:
        began = time.monotonic()
        pending: Any = self._dht.get(self._key, latest=True, return_future=True)
        try:
            found = pending.result(timeout=self._forget_after_s)
        except Exception:  # the DHT did not answer: nothing was learnt, and no silence counts against the others
            entries = None
        else:
            entries = found.value if isinstance(found, ValueWithExpiration) else {}
        now = time.monotonic()
        # Near an unreachable node a reading takes up to 3 s; a process that was stopped for longer must not count it all.
        passed_s, self._last_read = min(now - self._last_read, _SLOWEST_READ_S + 0.4 * self._forget_after_s), now
        self._read_at = now + min(max(self._eta_s() / 4, _FASTEST_READ_S), _SLOWEST_READ_S)
        if isinstance(entries, dict):
            # What a reading finds was written before it ended: near an unreachable node that is 1.5 s after it began.
            self._take_in(entries, passed_s, min(now - began, 0.4 * self._forget_after_s))
        with self._changed:
            alive = tuple(p for p, silent_s in self._heard.values() if silent_s < self._forget_after_s and not p.left)
            left = frozenset(p.peer for p, _ in self._heard.values() if p.left)
            self.view, self._reading = View(read=self.view.read + 1, others=alive, left=left), False
            self._changed.notify_all()

    def _take_in(self, entries: dict[Any, Any], passed_s: float, reading_s: float) -> None:
        fresh = {}
        for subkey, entry in entries.items():
            record = _parsed(getattr(entry, "value", None))
            if record is not None and subkey != self._subkey and record.peer != self._mine.peer:
                fresh[subkey] = record
        for subkey in {*self._heard, *fresh}:
            old, silent_s = self._heard.get(subkey, (None, 0.0))
            record = fresh.get(subkey, old)
            assert record is not None
            changed = old is None or record.beat != old.beat
            self._heard[subkey] = (record, reading_s if changed else silent_s + passed_s)
            if self._heard[subkey][1] > 2 * self._forget_after_s + _CLOCKS_S and subkey not in fresh:
                del self._heard[subkey]

    def close(self, farewell: PeerRecord | None) -> None:
        """Ends the thread; others read `farewell` as this peer's last word."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self.is_alive():
            self.join(timeout=2 * self._forget_after_s)
        if farewell is not None:
            self._write(farewell)
            try:
                self._last_store.result(timeout=2.0)
            except Exception:  # the others find out by the silence
                pass


def _parsed(value: Any) -> PeerRecord | None:
    """The record that `value` is; None for anything else that someone stored there."""
    names = {f.name: f.type for f in fields(PeerRecord)}
    if not isinstance(value, dict) or set(value) != set(names):
        return None
    for name, kind in names.items():
        given = value[name]
        if kind is float and isinstance(given, int) and not isinstance(given, bool):
            value = {**value, name: float(given)}
        elif type(given) is not kind:
            return None
    return PeerRecord(**value)


def lineage_after(before: str, group: bytes) -> str:
    """The name of the parameters that `before` names, after the mean of `group`."""
    return hashlib.blake2b(before.encode() + group, digest_size=12).hexdigest()


def group_key(round: int, lineage: str) -> str:
    """32 bits as text, where hivemind has the bits of a group: who holds these parameters looks for a group under it."""
    digest = hashlib.blake2b(f"{round}-{lineage}".encode(), digest_size=4).digest()
    return format(int.from_bytes(digest, "big"), "032b")
