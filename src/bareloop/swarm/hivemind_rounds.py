"""The process beside a peer's training that makes the means and hands over the state: hivemind's averager, told who is there.

Built on `WholeAverager` (the tensors become the group's mean or stay as they were). hivemind's matchmaking takes whom it
finds until a time has passed, so a round waits for that time or leaves peers out (learning-at-home/hivemind#624, #676).
Here the group's members are known from the roster: a group is formed when all are there, some 50 ms after the last one
came, and one that lacks a peer is left before anything is sent. Groups are looked for under a key made of the round and
the parameters' lineage, so peers whose parameters differ can't average by accident.

A peer that was cut off resets no connection: upstream a follower waits for such a leader until its offer expires, asks it
again after that, and leads it as a follower. Here whoever is no member any more is left at once.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, AsyncIterator  # noqa: UP035  (hivemind reads it from the handlers' hints and knows no other)

import torch
from hivemind.averaging.allreduce import AllreduceException, AveragingMode
from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.compression import CompressionBase, deserialize_torch_tensor
from hivemind.dht import DHT
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto.averaging_pb2 import (
    BAD_GROUP_ID,  # pyright: ignore[reportAttributeAccessIssue]
    AveragingData,  # pyright: ignore[reportAttributeAccessIssue]
    DownloadData,  # pyright: ignore[reportAttributeAccessIssue]
    DownloadRequest,  # pyright: ignore[reportAttributeAccessIssue]
)
from hivemind.utils import MPFuture, get_dht_time
from hivemind.utils.asyncio import achain, aiter_with_timeout, as_aiter
from hivemind.utils.streaming import combine_from_streaming
from torch import Tensor

from bareloop.swarm.allreduce import WholeAverager
from bareloop.swarm.hivemind_offers import Offers
from bareloop.swarm.hivemind_options import mend_8bit

__all__ = ["Attempt", "Mean", "RoundAverager"]

_REDECLARE_S = 10.0
"""Seconds for which a peer offers to lead a group. When it offers again, requests that cross each other wait for
`_REQUEST_S`; so seldom."""

_REQUEST_S = 2.0
"""Seconds to wait for a possible leader's answer."""

_SECOND_LOOK_S = 1.0
"""Seconds in which a group that lacks a peer may turn out to be whole: peers give up one that died not all at once."""

_LEAVERS = 64
"""How many are remembered: a group's latecomers are told at once that they were left."""

_LINGER_S = 1.0
"""Seconds that a peer which leaves stays for groupmates who still ask about the last mean."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One try to form a group and average in it."""

    key: str
    """32 bits as text; only peers with the same key meet."""
    members: frozenset[bytes]
    """Who must be in the group, this peer included."""
    samples: float
    """This peer's weight."""
    search_s: float
    """Longest time to look for the group, in seconds."""
    average_s: float
    """Longest time for the all-reduce, in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mean:
    """What an attempt gave; the mean itself is in the averager's tensors."""

    group: bytes
    """The group's name, the same for all of its peers."""
    samples: dict[bytes, float]
    """Of each peer."""
    search_s: float
    average_s: float


class RoundAverager(WholeAverager):
    """A process that averages `tensors` in groups of known members and serves the state that `snapshot` returns.

    Args:
        tensors: on the host, float32; shared with the process. The mean replaces them, or they stay as they were.
        dht: started.
        prefix: the run's name.
        compression: of what is sent in an all-reduce.
        silence_s: a groupmate who sends nothing for so long, in seconds, fails the attempt.
        snapshot: returns (text, tensors) of this peer's state; called in a thread of the training process.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        dht: DHT,
        prefix: str,
        *,
        compression: CompressionBase,
        silence_s: float,
        snapshot: Callable[[], tuple[str, Sequence[Tensor]]],
    ) -> None:
        self._snapshot, self._silence_s = snapshot, silence_s
        self._offers = Offers(dht, prefix)
        self._members: frozenset[bytes] = frozenset()
        self._search: asyncio.Task[GroupInfo | None] | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._anew = False
        """The search was ended to begin another, without who is gone."""
        self._leavers: list[tuple[bytes, PeerID]] = []
        """Groups, and who took no part in them: this peer, or another that has said so."""
        self._serving = 0
        self._last_served = 0.0
        super().__init__(
            averaged_tensors=tensors,
            dht=dht,
            start=False,
            prefix=prefix,
            compression=compression,
            min_matchmaking_time=_REDECLARE_S,
            request_timeout=_REQUEST_S,
            sender_timeout=silence_s,
            reducer_timeout=1.05 * silence_s,  # upstream wants it longer than the sender's
            declare_state_period=3600.0,  # donors are found in the roster
            shutdown_timeout=4 * _LINGER_S + silence_s,
        )

    # In the training process.

    def launch(self, timeout_s: float) -> None:
        """Starts the process. Upstream's way to do so makes the training process deaf to Ctrl-C for good."""
        self.start()
        self.wait_until_ready(timeout_s)

    def attempt(self, attempt: Attempt) -> "MPFuture[Mean]":
        """Begins an attempt; the future ends when it has, with AllreduceException where there is no mean."""
        future: MPFuture[Mean] = MPFuture()
        self._outer_pipe.send(("_attempt", [], {"attempt": attempt, "future": future}))
        return future

    def expect(self, members: frozenset[bytes]) -> None:
        """Who must be in the group that is being looked for."""
        self._outer_pipe.send(("_expect", [], {"members": members}))

    def give_up(self) -> None:
        """Stops to look for a group; an all-reduce that has begun goes on to its end."""
        self._outer_pipe.send(("_give_up", [], {}))

    def download(self, peer: bytes, first_s: float) -> "tuple[MPFuture[str], MPFuture[list[Tensor]]]":
        """Begins to fetch the state of `peer`: its text, which comes first and within `first_s`, and its tensors."""
        text: MPFuture[str] = MPFuture()
        tensors: MPFuture[list[Tensor]] = MPFuture()
        call = {"peer": peer, "text": text, "tensors": tensors, "first_s": first_s}
        self._outer_pipe.send(("_download", [], call))
        return text, tensors

    def get_current_state(self) -> tuple[Any, Sequence[Tensor], Any]:
        text, tensors = self._snapshot()
        return text, tensors, None

    # In the averager's process.

    def run(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the training, and that ends this
        torch.set_num_threads(1)  # OpenMP's threads did not survive the fork, and the cores belong to the training
        mend_8bit()
        super().run()

    async def add_p2p_handlers(self, *args: Any, **kwargs: Any) -> None:
        await super().add_p2p_handlers(*args, **kwargs)
        self._watch = asyncio.create_task(self._leave_with_the_parent())

    async def _leave_with_the_parent(self) -> None:
        """Ends this process and the DHT's when the training process was killed."""
        while os.getppid() == self._parent_pid:
            await asyncio.sleep(0.5)
        self.dht._outer_pipe.send(("_shutdown", [], {}))
        os._exit(1)

    async def _attempt(self, *, attempt: Attempt, future: "MPFuture[Mean]") -> None:
        try:
            future.set_result(await self._mean(attempt))
        except asyncio.CancelledError:
            future.set_exception(AllreduceException("the group was no longer wanted"))
        except BaseException as error:  # WholeAverager's own kind too; this is the top of a task
            future.set_exception(AllreduceException(str(error) or repr(error)))
        finally:
            self._pending_groups_registered.set()

    async def _mean(self, attempt: Attempt) -> Mean:
        began = time.monotonic()
        control = StepControl(
            scheduled_time=get_dht_time() + _REDECLARE_S,
            deadline=get_dht_time() + attempt.search_s,
            allow_retries=False,
            weight=attempt.samples,
            data_for_gather=self.serializer.dumps([self.mode.value, attempt.samples]),
        )
        control.attach(MPFuture(), MPFuture())
        control.allow_allreduce()
        self._matchmaking.group_key_manager = self._offers
        self._offers.group_bits = attempt.key
        self._set_members(attempt.members)
        self._pending_groups_registered.clear()
        group = await self._group(control)
        if group is None:
            raise AllreduceException(f"the {len(self._members)} peers did not meet in {attempt.search_s:.0f} s")
        await self._require_all(group)
        met = time.monotonic()
        with self._register_allreduce_group(group):
            try:
                samples = await asyncio.wait_for(self._average(group, attempt.samples), attempt.average_s)
            except TimeoutError:
                raise AllreduceException(f"the all-reduce took longer than {attempt.average_s:.0f} s") from None
        self._last_served = time.monotonic()
        return Mean(group=group.group_id, samples=samples, search_s=met - began, average_s=time.monotonic() - met)

    async def _group(self, control: StepControl) -> GroupInfo | None:
        """Looks for a group until one is there, the time is over or it is given up; anew where `_expect` says so."""
        while True:
            self._anew = False
            self._search = asyncio.create_task(self._matchmaking.look_for_group(control))
            try:
                return await self._search
            except asyncio.CancelledError:
                if not self._anew:
                    raise
            finally:
                self._search.cancel()
                self._search = None

    async def _require_all(self, group: GroupInfo) -> None:
        """Returns when all members are in `group`.

        Raises:
            AllreduceException: one is missing, and did not turn out to be dead.
        """
        present, until = {peer.to_bytes() for peer in group.peer_ids}, time.monotonic() + _SECOND_LOOK_S
        while self._members - present:
            if any((group.group_id, peer) in self._leavers for peer in group.peer_ids):
                raise AllreduceException("a peer left the group")
            if time.monotonic() > until:
                self._note_leaver(group.group_id, self.peer_id)
                self._pending_groups_registered.set()  # for those whose parts wait here: they are told
                self._leaving = asyncio.create_task(self._leave(group))
                lacking = len(self._members - present)
                raise AllreduceException(f"the group lacks {lacking} of {len(self._members)} peers")
            await asyncio.sleep(0.02)

    def _note_leaver(self, group_id: bytes, peer: PeerID) -> None:
        self._leavers = [*self._leavers[1 - _LEAVERS :], (group_id, peer)]

    async def _left(self, group_id: bytes, peer: PeerID) -> None:
        self._note_leaver(group_id, peer)
        await super()._left(group_id, peer)

    async def _average(self, group: GroupInfo, weight: float) -> dict[bytes, float]:
        gathered: list[Any] = [self.serializer.loads(data) for data in group.gathered]
        modes = tuple(AveragingMode(mode) for mode, _ in gathered)
        reducers = sum(mode == AveragingMode.NODE for mode in modes)
        if not reducers:
            raise AllreduceException("all peers of the group are in client mode, and none can be reached")
        how: dict[str, Any] = {
            name: value for name, value in self.allreduce_kwargs.items() if name != "min_vector_size"
        }
        how["peer_fractions"] = tuple(1 / reducers if mode == AveragingMode.NODE else 0.0 for mode in modes)
        how |= {"tensor_infos": self.tensor_infos, "weight": weight, "modes": modes}
        await self._run_allreduce_inplace_(self._averaged_tensors, group, **how)
        return {peer.to_bytes(): float(n) for peer, (_, n) in zip(group.peer_ids, gathered, strict=True)}

    def _set_members(self, members: frozenset[bytes]) -> None:
        self._members = members
        size = max(len(members), 2)
        self._matchmaking.target_group_size = self._matchmaking.min_group_size = size
        self._offers.target_group_size, self._offers.members = size, members

    async def _expect(self, *, members: frozenset[bytes]) -> None:
        gone = self._members - members
        self._set_members(members)
        matchmaking = self._matchmaking
        if gone and self._search is not None and not matchmaking.assembled_group.done():
            for peer in [p for p in matchmaking.current_followers if p.to_bytes() in gone]:
                del matchmaking.current_followers[peer]
            leader = matchmaking.current_leader
            if not matchmaking.current_followers and (leader is None or leader.to_bytes() in gone):
                # It follows who is gone, or may be asking: that would go on for up to `_REDECLARE_S`.
                self._anew = True
                self._search.cancel()
                return
        async with matchmaking.lock_request_join_group:  # upstream looks at the size only when a follower comes
            leads = matchmaking.is_looking_for_group and matchmaking.current_leader is None
            enough = 0 < len(matchmaking.current_followers) >= len(members) - 1
            if leads and enough and not matchmaking.assembled_group.done():
                await matchmaking.leader_assemble_group()

    async def _give_up(self) -> None:
        if self._search is not None:
            self._search.cancel()

    async def _download(
        self, *, peer: bytes, text: "MPFuture[str]", tensors: "MPFuture[list[Tensor]]", first_s: float
    ) -> None:
        try:
            stub: Any = self.get_stub(self._p2p, PeerID(peer), namespace=self.prefix)
            stream = await stub.rpc_download_state(DownloadRequest())
            received: list[Tensor] = []
            parts: list[Any] = []
            # The donor packs its state between two micro-batches: the first part may be long in coming.
            async for message in aiter_with_timeout(stream, first_s):
                if message.metadata and not text.done():
                    text.set_result(str(self.serializer.loads(message.metadata)))
                if message.tensor_part.dtype and parts:
                    received.append(deserialize_torch_tensor(combine_from_streaming(parts)))
                    parts = []
                parts.append(message.tensor_part)
            if not parts:
                raise AllreduceException("it sent nothing")
            received.append(deserialize_torch_tensor(combine_from_streaming(parts)))
            tensors.set_result(received)
        except Exception as error:
            failure = AllreduceException(f"the state could not be downloaded: {str(error) or repr(error)}")
            for future in (text, tensors):
                if not future.done():
                    future.set_exception(failure)

    async def rpc_download_state(
        self,
        _request: DownloadRequest,
        _context: P2PContext,
    ) -> AsyncIterator[DownloadData]:
        self._serving += 1
        try:
            async for part in super().rpc_download_state(_request, _context):
                yield part
        finally:
            self._serving -= 1
            self._last_served = time.monotonic()

    async def rpc_aggregate_part(
        self,
        stream: AsyncIterator[AveragingData],
        context: P2PContext,
    ) -> AsyncIterator[AveragingData]:
        self._serving += 1
        try:
            first = await anext(stream)
            if (first.group_id, self.peer_id) in self._leavers:
                yield AveragingData(code=BAD_GROUP_ID)
                return
            async for part in super().rpc_aggregate_part(achain(as_aiter(first), stream), context):
                yield part
        finally:
            self._serving -= 1
            self._last_served = time.monotonic()

    async def _shutdown(self, timeout: float | None) -> None:
        """Leaves when no other peer needs this one any more: its parts of the last mean, or its state."""
        latest = time.monotonic() + self._silence_s
        while time.monotonic() < latest and (
            self._serving or (self._last_served and time.monotonic() - self._last_served < _LINGER_S)
        ):
            await asyncio.sleep(0.05)
        self._watch.cancel()
        if not self.client_mode:
            await self.remove_p2p_handlers(self._p2p, namespace=self.prefix)
