"""hivemind's all-reduce, made whole or nothing.

Upstream (hivemind 1.1.12) goes on when a peer dies in the middle: a reducer leaves the dead sender out of the parts it has
not summed yet, a sender keeps its own values for the parts of a dead reducer, and a retry starts from tensors that the
failed attempt has half replaced. Survivors then step on different gradients. Here an attempt ends in one of two ways:

- every part is the mean over every peer of the group, and the group has agreed on that: the tensors become the mean;
- anything else: the tensors are as they were, bit for bit, and hivemind's own retry is right.

The agreement costs one message to each groupmate and one round trip a round, and the averager's process holds the result
beside the tensors until it is agreed on, the size of the gradients once more. It leaves one window, which no protocol
closes: two peers die within a message's flight, and one survivor heard one of them.

All peers of a run need this averager: one with hivemind's own can't agree, and no group with it is formed.
"""

import asyncio
import ctypes
import multiprocessing
import time
from collections.abc import Sequence
from typing import Any

import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.allreduce import AllreduceException, AllReduceRunner, AveragingMode
from hivemind.averaging.group_info import GroupInfo
from hivemind.compression import deserialize_torch_tensor, serialize_torch_tensor
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.proto.averaging_pb2 import AveragingData  # pyright: ignore[reportAttributeAccessIssue]
from hivemind.utils import get_dht_time
from hivemind.utils.asyncio import amap_in_executor
from torch import Tensor

__all__ = ["WholeAverager"]

_AGREE_S = 5.0
"""Patience with a groupmate's answer, in seconds, when the averager has no next_chunk_timeout."""

_AGAIN_S = 1.0
"""Patience, in seconds, when a groupmate who gave no answer is asked something else."""

_REMEMBERED = 32
"""Groups whose outcome a peer can still be asked for."""

_CODES = averaging_pb2.DESCRIPTOR.enum_types_by_name["MessageCode"].values_by_name
# Codes that all-reduces know, read as a question and its answer.
_IS_IT_WHOLE: int = _CODES["PART_FOR_AVERAGING"].number
_WAS_IT_AGREED: int = _CODES["REQUEST_JOIN"].number
_YES: int = _CODES["AVERAGED_PART"].number
_NO: int = _CODES["CANCELLED"].number
_LEFT: int = _CODES["GROUP_DISBANDED"].number
"""No question: who says it takes no part."""


class _AttemptFailed(BaseException):
    """An attempt that ended in nothing. Not an Exception: upstream prints a traceback for those, and names this one itself."""


_PART = averaging_pb2.AVERAGED_PART  # pyright: ignore[reportAttributeAccessIssue]
_UNCOMPRESSED = runtime_pb2.CompressionType.NONE  # pyright: ignore[reportAttributeAccessIssue]


class _Runner(AllReduceRunner):
    """An all-reduce that fails as soon as one groupmate does, and never sends a mean that lacks one."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def _fail(self, reason: str) -> None:
        if not self.failed.done():
            self.failed.set_result(reason)

    async def _ban_sender(self, peer_id: PeerID) -> None:
        # The reducer is not told: the part in work would become a mean without that peer, and be sent.
        self._fail(f"{peer_id} stopped sending")

    async def _communicate_with_peer(self, peer_id: PeerID) -> None:
        try:
            if peer_id == self.peer_id:
                await self._reduce_own_parts()
            else:
                await super()._communicate_with_peer(peer_id)
        except Exception as error:
            self._fail(f"{peer_id} did not return its part: {error!r}")
            raise

    # Upstream sends the difference from what the receiver gave, so each peer's sum is rounded its own way: their means differ
    # by 1e-7 and their parameters drift apart. Here the mean itself is sent, and all peers have the same to the bit.

    async def _reduce_own_parts(self) -> None:
        sender, reducer = self.sender_peer_ids.index(self.peer_id), self.ordered_peer_ids.index(self.peer_id)
        container = self.tensor_part_container
        kind = container.compression.compression_type
        for index, part in enumerate(self.parts_for_local_averaging):
            mean = await self.tensor_part_reducer.accumulate_part(sender, index, part, weight=self.weight)
            if kind != _UNCOMPRESSED:  # what the others get
                mean = deserialize_torch_tensor(serialize_torch_tensor(mean, kind))
            container.register_processed_part(reducer, index, mean)

    async def _accumulate_parts_streaming(self, stream: Any, sender_index: int) -> Any:
        index, loop = 0, asyncio.get_running_loop()
        try:
            async for part, weight, kind in amap_in_executor(
                lambda sent: (deserialize_torch_tensor(sent.tensor_part), sent.weight, sent.tensor_part.compression),
                stream,
                max_prefetch=self.tensor_part_container.prefetch,
            ):
                mean = await self.tensor_part_reducer.accumulate_part(sender_index, index, part, weight=weight)
                index += 1
                packed = await loop.run_in_executor(None, serialize_torch_tensor, mean, kind)
                yield AveragingData(code=_PART, tensor_part=packed)
        finally:
            if index != self.tensor_part_reducer.num_parts:
                await self._ban_sender(self.sender_peer_ids[sender_index])

    async def exchange(self) -> list[Tensor]:
        """The mean of each tensor; [] for an auxiliary peer.

        Raises:
            AllreduceException: a groupmate failed.
        """
        collecting = asyncio.create_task(self._collect())
        try:
            await asyncio.wait({collecting, self.failed}, return_when=asyncio.FIRST_COMPLETED)
            if self.failed.done():  # first: parts of a failed reducer are collected as zeros
                raise AllreduceException(self.failed.result())
            return await collecting
        finally:
            collecting.cancel()
            await asyncio.gather(collecting, return_exceptions=True)
            if self._future.done() and not self._future.cancelled():
                self._future.exception()  # nobody else asks, and asyncio would print it

    async def _collect(self) -> list[Tensor]:
        return [mean async for mean in self]


class _Ballot:
    """One group's agreement, as one peer sees it."""

    def __init__(self, group: GroupInfo, modes: Sequence[AveragingMode]) -> None:
        loop = asyncio.get_running_loop()
        self.whole: asyncio.Future[bool] = loop.create_future()
        """Whether all parts arrived here."""
        self.agreed: asyncio.Future[bool] = loop.create_future()
        """Whether the group's mean is applied."""
        self.doubted = False
        """A groupmate was told that this peer has not agreed: it may only follow one that has."""
        self.clients = {
            peer: loop.create_future()
            for peer, mode in zip(group.peer_ids, modes, strict=True)
            if mode == AveragingMode.CLIENT
        }
        """Client-mode peers, who can't be asked: their word comes with their own question."""

    def lose(self) -> None:
        for answer in (self.whole, self.agreed):
            if not answer.done():
                answer.set_result(False)


class WholeAverager(DecentralizedAverager):
    """An averager whose `step` turns its tensors into the group's weighted mean, or leaves them as they were.

    Takes what `hivemind.averaging.DecentralizedAverager` takes, and goes before any subclass of it:
    `class Mine(WholeAverager, GradientAverager)`. After a failed attempt hivemind looks for another group until the step's
    timeout; when that passes, `step` raises. Each attempt may take `allreduce_timeout`.
    """

    # Upstream keeps the list of handlers on the class, where a subclass would find its parent's.
    _rpc_handlers = None
    _stub_type = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._rpc_handlers = None
        cls._stub_type = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Before upstream's __init__, which forks the averager's process.
        self._ballots: dict[bytes, _Ballot] = {}
        self._means = multiprocessing.Value(ctypes.c_uint64, 0)
        super().__init__(*args, **kwargs)

    @property
    def means(self) -> int:
        """Means that the tensors became since the averager was built. Under `get_tensors()` it tells what they hold: a step
        that was cancelled or timed out may still have ended in a mean, which the rest of the group applies."""
        return self._means.value

    async def _run_allreduce_inplace_(
        self, tensors: Sequence[Tensor], group_info: GroupInfo, group_id: bytes | None = None, **kwargs: Any
    ) -> None:
        group_id = group_info.group_id if group_id is None else group_id
        runner = _Runner(
            p2p=self._p2p,
            servicer_type=type(self),
            prefix=self.prefix,
            tensors=tensors,
            group_id=group_id,
            ordered_peer_ids=group_info.peer_ids,
            **kwargs,
        )
        ballot = self._ballots[group_id] = _Ballot(group_info, runner.modes)
        if len(self._ballots) > _REMEMBERED:
            del self._ballots[next(iter(self._ballots))]
        self._running_groups[group_id].set_result(runner)
        try:
            began = time.monotonic()
            means = await runner.exchange()
            ballot.whole.set_result(True)
            # A client-mode groupmate downloads only after it has sent: as long again.
            patience_s = time.monotonic() - began + (runner.sender_timeout or _AGREE_S)
            if not await self._agree(ballot, group_id, runner, patience_s):
                raise AllreduceException("a groupmate did not get the whole mean: none of the group applies it")
        except AllreduceException as error:
            raise _AttemptFailed(str(error)) from None
        finally:
            ballot.lose()
        with torch.no_grad():
            for tensor, mean in zip(tensors, means, strict=False):
                tensor.copy_(
                    mean if self._averaging_alpha == 1 else tensor.lerp(mean.to(tensor), self._averaging_alpha)
                )
        self._means.value += 1
        self.last_updated = get_dht_time()
        self._state_updated.set()

    async def _agree(self, ballot: _Ballot, group_id: bytes, runner: _Runner, patience_s: float) -> bool:
        """Whether every groupmate has the whole mean, or, where one can't be reached, whether another knows that it had."""
        asked = [
            peer
            for peer, mode in zip(runner.ordered_peer_ids, runner.modes, strict=True)
            if peer != self.peer_id and mode != AveragingMode.CLIENT
        ]
        told = [answer for peer, answer in ballot.clients.items() if peer != self.peer_id]
        answers = await asyncio.gather(
            *(self._ask(peer, _IS_IT_WHOLE, group_id, patience_s) for peer in asked),
            *(_within(answer, patience_s) for answer in told),
        )
        if False in answers:
            return False
        if None not in answers and not ballot.doubted:
            ballot.agreed.set_result(True)
            return True
        # This is answered at once. One that has just been silent for all that time is asked as well: it may have agreed.
        questions = [
            self._ask(peer, _WAS_IT_AGREED, group_id, min(patience_s, _AGAIN_S) if answer is None else patience_s)
            for peer, answer in zip(asked, answers[: len(asked)], strict=True)
        ]
        for asking in asyncio.as_completed(questions):
            if await asking:
                ballot.agreed.set_result(True)  # and not another await from here until the tensors are changed
                return True
        return False

    async def _ask(self, peer: PeerID, question: int, group_id: bytes, patience_s: float) -> bool | None:
        """The answer of `peer`; None when it can't be reached."""
        request = AveragingData(code=question, group_id=group_id)
        stub: Any = self.get_stub(self._p2p, peer, namespace=self.prefix)
        try:
            answer = await stub.rpc_agree(request, timeout=patience_s)
        except Exception:  # what a lost peer raises depends on where it was lost; the caller decides what it means
            return None
        return answer.code == _YES

    async def _leave(self, group: GroupInfo) -> None:
        """Tells the group that this peer takes no part: one to whom nothing is sent would wait for its silence."""
        others = (peer for peer in group.peer_ids if peer != self.peer_id)
        await asyncio.gather(*(self._ask(peer, _LEFT, group.group_id, _AGAIN_S) for peer in others))

    async def _left(self, group_id: bytes, peer: PeerID) -> None:
        """Ends an all-reduce that `peer` takes no part in."""
        running = self._running_groups.get(group_id)
        if running is not None:
            runner: Any = await running
            if peer in runner.ordered_peer_ids:
                runner._fail(f"{peer} takes no part")

    async def rpc_agree(self, request: AveragingData, context: P2PContext) -> AveragingData:
        """Answers a groupmate that has the whole mean, once it is known here."""
        if request.code == _LEFT:
            await self._left(request.group_id, context.remote_id)
            return AveragingData(code=_YES, group_id=request.group_id)
        ballot = self._ballots.get(request.group_id)
        if ballot is None:
            return AveragingData(code=_NO, group_id=request.group_id)
        if request.code == _WAS_IT_AGREED:
            ballot.doubted = True
            yes = ballot.agreed.done() and ballot.agreed.result()
        elif context.remote_id in ballot.clients:
            heard = ballot.clients[context.remote_id]
            if not heard.done():
                heard.set_result(True)
            yes = await asyncio.shield(ballot.agreed)
        else:
            yes = await asyncio.shield(ballot.whole) and not (ballot.agreed.done() and not ballot.agreed.result())
        return AveragingData(code=_YES if yes else _NO, group_id=request.group_id)


async def _within(answer: "asyncio.Future[bool]", patience_s: float) -> bool | None:
    """The answer, or None when it does not come in time."""
    try:
        return await asyncio.wait_for(asyncio.shield(answer), patience_s)
    except TimeoutError:
        return None
