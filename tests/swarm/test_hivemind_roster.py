"""For how long a peer counts as silent, where readings of the DHT are slow: as they are near a node that was cut off."""

import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("hivemind")

from hivemind.utils import ValueWithExpiration

sys.path.insert(0, str(Path(__file__).parent))
from records import record

from bareloop.swarm import hivemind_roster
from bareloop.swarm.hivemind_roster import PeerRecord, Roster

FORGET_S = 5.0
OTHER = record(b"other")


@dataclass
class DHT:
    """Answers with one record, after `takes_s` by its own clock."""

    record: PeerRecord = OTHER
    takes_s: float = 0.0
    now_s: float = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def get(self, *_: Any, **__: Any) -> Any:
        def result(timeout: float) -> Any:
            self.now_s += self.takes_s
            return ValueWithExpiration({b"sub": ValueWithExpiration(asdict(self.record), 0.0)}, 0.0)

        return SimpleNamespace(result=result)


@pytest.fixture
def dht(monkeypatch: pytest.MonkeyPatch) -> DHT:
    made = DHT()
    monkeypatch.setattr(hivemind_roster, "time", made)
    return made


def read_until_gone(roster: Roster, dht: DHT, every_s: float) -> float:
    """Seconds from now until the other peer is given up."""
    began_s = dht.now_s
    while True:
        dht.now_s += every_s
        roster._read()
        if not roster.view.others:
            return dht.now_s - began_s
        assert dht.now_s - began_s < 60


def made(dht: DHT) -> Roster:
    return Roster(dht, "run.peers", b"mine", replace(OTHER, peer=b"me"), FORGET_S, lambda: 0.0)  # type: ignore[arg-type]


def test_a_record_is_as_old_as_the_reading_that_found_it(dht: DHT) -> None:
    """A peer writes, is cut off, and the reading that finds its last word takes 1.5 s for a node that does not answer."""
    roster = made(dht)
    roster._read()
    dht.record, dht.takes_s = replace(OTHER, beat=2), 1.5
    began_s = dht.now_s
    roster._read()
    dht.takes_s = 0.0
    assert roster.view.others
    read_until_gone(roster, dht, 0.2)
    assert dht.now_s - began_s == pytest.approx(FORGET_S, abs=0.21)


def test_a_peer_whose_record_changes_is_never_given_up(dht: DHT) -> None:
    """However slow the readings are."""
    roster = made(dht)
    dht.takes_s = 4.0
    for beat in range(20):
        dht.record = replace(OTHER, beat=beat)
        dht.now_s += 1.0
        roster._read()
        assert [peer.peer for peer in roster.view.others] == [b"other"]


def test_time_in_which_this_process_slept_does_not_count(dht: DHT) -> None:
    roster = made(dht)
    roster._read()
    dht.now_s += 60.0
    roster._read()
    assert roster.view.others
