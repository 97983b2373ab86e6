"""Who must be in the next mean, from a roster made by hand."""

import logging
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

pytest.importorskip("hivemind")

sys.path.insert(0, str(Path(__file__).parent))
from records import record

from bareloop.swarm import hivemind_company
from bareloop.swarm.hivemind_company import Company
from bareloop.swarm.hivemind_options import HivemindOptions
from bareloop.swarm.hivemind_roster import PeerRecord, View
from bareloop.swarm.hivemind_rounds import Mean

ME = record(b"me", round=3, lineage="L3", samples=8.0, rate=1.0, pace_s=0.1, waiting=True)


@dataclass
class Now:
    """Clock and roster, as the company sees them."""

    view: View
    mine: PeerRecord = ME
    time_s: float = 100.0

    def monotonic(self) -> float:
        return self.time_s


def peers(*names: bytes, waiting: bool = True) -> tuple[PeerRecord, ...]:
    return tuple(replace(ME, peer=name, waiting=waiting) for name in names)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Now:
    made = Now(View(read=1, others=peers(b"a", b"b")))
    monkeypatch.setattr(hivemind_company, "time", made)
    return made


@pytest.fixture
def company(now: Now) -> Company:
    made = Company(now, HivemindOptions(forget_after_s=4.0, patience_s=10.0))  # pyright: ignore[reportArgumentType]
    made.met(2, Mean(group=b"g", samples={b"me": 8, b"a": 8, b"b": 8}, search_s=0.1, average_s=0.1))
    return made


def test_all_who_hold_the_same_parameters_are_waited_for(company: Company, now: Now) -> None:
    now.view = View(read=2, others=(*peers(b"a"), *peers(b"b", waiting=False), replace(ME, peer=b"c", lineage="other")))
    assert company.members("L3", 0.0) == {b"me", b"a", b"b"}
    assert company.members("L3", 11.0) == {b"me", b"a"}, "b lives and does not come: patience is over"


def test_the_larger_part_goes_on_at_once_and_the_smaller_one_later(company: Company, now: Now) -> None:
    now.view = View(read=2, others=peers(b"a"))
    assert company.members("L3", 0.0) == {b"me", b"a"}
    now.view = View(read=3, others=())
    assert company.members("L3", 0.0) == frozenset(), "one of three may be the one that was cut off"
    now.time_s += 1.9
    assert company.members("L3", 1.9) == frozenset()
    now.time_s += 0.2
    assert company.members("L3", 2.1) == {b"me"}


def test_the_wait_begins_anew_when_the_others_were_back(company: Company, now: Now) -> None:
    now.view = View(read=2, others=())
    assert company.members("L3", 0.0) == frozenset()
    now.view, now.time_s = View(read=3, others=peers(b"a")), now.time_s + 3
    assert company.members("L3", 3.0) == {b"me", b"a"}
    now.view = View(read=4, others=())
    assert company.members("L3", 3.0) == frozenset()


def test_peers_who_took_their_leave_are_not_waited_for(company: Company, now: Now, caplog) -> None:
    now.view = View(read=2, others=(), left=frozenset({b"a", b"b"}))
    assert company.members("L3", 0.0) == {b"me"}
    with caplog.at_level(logging.WARNING):
        company.met(3, None)
    assert not caplog.records


def test_a_round_without_a_silent_peer_says_so(company: Company, now: Now, caplog) -> None:
    now.view = View(read=2, others=peers(b"a"))
    with caplog.at_level(logging.WARNING):
        company.met(3, Mean(group=b"h", samples={b"me": 8, b"a": 8}, search_s=0.1, average_s=0.1))
    assert "round 4 goes on without 1 of 3 peers" in caplog.text


def test_fewer_than_min_peers_make_no_mean(now: Now) -> None:
    company = Company(now, HivemindOptions(min_peers=4))  # pyright: ignore[reportArgumentType]
    assert company.members("L3", 0.0) == frozenset()


def test_one_who_downloads_is_waited_for_and_a_donor_holds_its_round(company: Company, now: Now) -> None:
    loading = replace(ME, peer=b"c", loading=True, waiting=False)
    now.view = View(read=2, others=(*peers(b"a", b"b"), loading))
    assert company.members("L3", 60.0) == {b"me", b"a", b"b", b"c"}
    now.view = View(read=3, others=peers(b"a", b"b"))
    company.hold("L3")
    assert company.members("L3", 0.0) == frozenset(), "whom it served is not in the roster yet"
    now.view = View(read=4, others=peers(b"a", b"b", b"c"))
    assert company.members("L3", 0.0) == {b"me", b"a", b"b", b"c"}
