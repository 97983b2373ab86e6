"""How a peer meets those it averages with, where one of them falls silent without a word: a network that is cut.

Killed peers are in `test_hivemind_engine.py`; their connections break, which tells upstream's matchmaking. A cut one
breaks nothing, so here matchmaking is a stand-in that waits as upstream's does, for a leader who never answers.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("hivemind")

from hivemind.averaging.allreduce import AllreduceException, AveragingMode
from hivemind.p2p import PeerID
from hivemind.utils import ValueWithExpiration

from bareloop.swarm import allreduce, hivemind_offers, hivemind_rounds
from bareloop.swarm.allreduce import WholeAverager
from bareloop.swarm.hivemind_offers import Offers
from bareloop.swarm.hivemind_rounds import RoundAverager

ME, OTHER, GONE = (PeerID(name) for name in (b"me", b"other", b"gone"))
ALL, LEFT = (frozenset(peer.to_bytes() for peer in peers) for peers in ((ME, OTHER, GONE), (ME, OTHER)))


class _Matchmaking:
    """Looks for a group until told of one; upstream's names."""

    def __init__(self) -> None:
        self.searches = 0
        self.current_leader: PeerID | None = None
        self.current_followers: dict[PeerID, object] = {}
        self.lock_request_join_group = asyncio.Lock()
        self.assembled_group: asyncio.Future[list[PeerID]] = asyncio.get_running_loop().create_future()
        self.is_looking_for_group = False
        self.target_group_size = self.min_group_size = 0

    async def look_for_group(self, control: object) -> list[PeerID]:
        self.searches += 1
        self.is_looking_for_group = True
        return await asyncio.shield(self.assembled_group)

    async def leader_assemble_group(self) -> None:
        self.assembled_group.set_result([ME, *self.current_followers])


class _Search:
    """A search for a group of `ALL`."""

    def __init__(self) -> None:
        self.matchmaking = _Matchmaking()
        self.averager: Any = RoundAverager.__new__(RoundAverager)
        self.averager._parent_pid = None  # upstream's __del__ reads it
        self.averager._offers = Offers(SimpleNamespace(peer_id=ME), "run")  # type: ignore[arg-type]
        self.averager._matchmaking = self.matchmaking
        self.averager._leavers, self.averager.dht = [], SimpleNamespace(peer_id=ME)
        self.averager._set_members(ALL)
        self.group = asyncio.create_task(self.averager._group(None))

    async def expect(self, members: frozenset[bytes]) -> None:
        await self.averager._expect(members=members)
        for _ in range(5):
            await asyncio.sleep(0)

    async def end(self) -> None:
        self.group.cancel()
        await asyncio.gather(self.group, return_exceptions=True)


def _searching(check: Callable[[_Search], Awaitable[None]]) -> None:
    async def run() -> None:
        search = _Search()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert search.matchmaking.searches == 1
        try:
            await check(search)
        finally:
            await search.end()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_leader_who_is_gone_is_left() -> None:
    async def check(search: _Search) -> None:
        search.matchmaking.current_leader = GONE
        await search.expect(LEFT)
        assert search.matchmaking.searches == 2
        assert not search.group.done()

    _searching(check)


def test_a_leader_who_lives_is_kept() -> None:
    async def check(search: _Search) -> None:
        search.matchmaking.current_leader = OTHER
        await search.expect(LEFT)
        assert search.matchmaking.searches == 1

    _searching(check)


def test_a_follower_who_is_gone_is_not_led() -> None:
    async def check(search: _Search) -> None:
        search.matchmaking.current_followers = {GONE: "request", OTHER: "request"}
        await search.expect(LEFT)
        assert search.matchmaking.searches == 1
        assert await search.group == [ME, OTHER]

    _searching(check)


def test_a_search_that_is_given_up_does_not_begin_anew() -> None:
    async def check(search: _Search) -> None:
        await search.averager._give_up()
        with pytest.raises(asyncio.CancelledError):
            await search.group
        assert search.matchmaking.searches == 1

    _searching(check)


def test_only_members_offers_are_seen_and_withdrawing_waits_for_nobody() -> None:
    async def run() -> None:
        never = asyncio.get_running_loop().create_future()
        stored: list[bool] = []

        async def get(key: str, **_: Any) -> Any:
            entries = {p.to_bytes(): ValueWithExpiration(True, 7.0) for p in (GONE, OTHER)}
            return ValueWithExpiration(entries, 7.0)

        def store(*, value: bool, **_: Any) -> Any:
            stored.append(value)
            return never

        dht: Any = SimpleNamespace(peer_id=ME, get=get, store=store)
        offers = Offers(dht, "run")
        offers.members = LEFT
        began_s = time.monotonic()
        for _ in range(6):
            assert await offers.get_averagers("run.0b01", only_active=True) == [(OTHER, 7.0)]
        assert time.monotonic() - began_s > 4 * hivemind_offers._OFFERS_S  # not as often as it can
        assert await offers.declare_averager("run.0b01", ME, 7.0, looking_for_group=False)
        await asyncio.sleep(0)
        assert stored == [False]
        never.cancel()
        await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_silent_groupmate_is_asked_whether_it_agreed_but_not_waited_for_as_long_again() -> None:
    asked: list[tuple[bytes, int, float]] = []

    async def run() -> None:
        averager: Any = WholeAverager.__new__(WholeAverager)
        averager._parent_pid = None

        async def ask(peer: PeerID, question: int, group: bytes, patience_s: float) -> bool | None:
            asked.append((peer.to_bytes(), question, patience_s))
            return None if peer == GONE else question == allreduce._IS_IT_WHOLE

        averager._ask, averager.dht = ask, SimpleNamespace(peer_id=ME)
        runner: Any = SimpleNamespace(ordered_peer_ids=(ME, GONE, OTHER), modes=(AveragingMode.NODE,) * 3)
        group: Any = SimpleNamespace(peer_ids=runner.ordered_peer_ids)
        ballot = allreduce._Ballot(group, runner.modes)
        ballot.whole.set_result(True)
        assert not await averager._agree(ballot, b"group", runner, 9.0)

    asyncio.run(asyncio.wait_for(run(), 60))
    again = {peer: patience_s for peer, question, patience_s in asked if question == allreduce._WAS_IT_AGREED}
    assert again == {b"gone": allreduce._AGAIN_S, b"other": 9.0}


def test_who_takes_no_part_in_a_group_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """One to whom nothing is sent, as in a group with a small model, would wait for its parts."""
    monkeypatch.setattr(hivemind_rounds, "_SECOND_LOOK_S", 0.05)
    told: list[tuple[bytes, int, bytes]] = []

    async def run() -> None:
        search = _Search()

        async def ask(peer: PeerID, question: int, group: bytes, patience_s: float) -> bool | None:
            told.append((peer.to_bytes(), question, group))
            return True

        search.averager._ask = ask
        search.averager._pending_groups_registered = asyncio.Event()
        group: Any = SimpleNamespace(group_id=b"7", peer_ids=(ME, OTHER))
        with pytest.raises(AllreduceException, match="lacks 1 of 3"):
            await search.averager._require_all(group)
        await search.averager._leaving
        await search.end()

    asyncio.run(asyncio.wait_for(run(), 60))
    assert told == [(b"other", allreduce._LEFT, b"7")]


def test_an_all_reduce_ends_when_a_groupmate_leaves_and_not_for_a_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[str] = []

    async def run() -> None:
        search = _Search()
        runner = SimpleNamespace(ordered_peer_ids=(ME, OTHER), _fail=failures.append)
        running = asyncio.get_running_loop().create_future()
        running.set_result(runner)
        search.averager._running_groups = {b"7": running}
        monkeypatch.setattr(hivemind_rounds, "_SECOND_LOOK_S", 60.0)
        await search.averager._left(b"7", GONE)
        waiting = asyncio.create_task(
            search.averager._require_all(SimpleNamespace(group_id=b"7", peer_ids=(ME, OTHER)))
        )
        await asyncio.sleep(0.1)
        assert failures == [] and not waiting.done()
        await search.averager._left(b"7", OTHER)
        # One that is still waiting for a peer to turn out dead hears of it as well.
        with pytest.raises(AllreduceException, match="left the group"):
            await waiting
        await search.end()

    asyncio.run(asyncio.wait_for(run(), 60))
    assert len(failures) == 1
