"""Whole or nothing: what peers have after an all-reduce, when one of them dies at each of its points."""

import os
import warnings
from collections.abc import Iterator
from typing import Any, AsyncIterator  # noqa: UP035, hivemind reads the hints and knows this one only

import pytest
import torch

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)
    import hivemind
    from hivemind.p2p import P2PContext
    from hivemind.proto.averaging_pb2 import AveragingData

    from bareloop.swarm.allreduce import WholeAverager

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings(
        "ignore:path is deprecated. Use files:DeprecationWarning"
    ),  # how hivemind finds its daemon
    pytest.mark.filterwarnings("ignore:.*interior-point:DeprecationWarning"),  # of its load balancing
]

SIZE = 50_000
WEIGHTS = (1.0, 2.0, 5.0)
LIMIT_S = 60
"""Ends a test that hangs."""


class Mortal(WholeAverager):
    """Ends its process at a point of the all-reduce."""

    dies = ""
    spares = b""
    """The groupmate that is still answered."""

    async def _agree(self, *args: Any) -> bool:
        if self.dies == "when it has the mean":
            os._exit(9)
        return await super()._agree(*args)

    async def rpc_agree(self, request: AveragingData, context: P2PContext) -> AveragingData:
        if self.dies == "after one answer" and context.remote_id.to_bytes() != self.spares:
            os._exit(9)
        return await super().rpc_agree(request, context)

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[AveragingData], context: P2PContext
    ) -> AsyncIterator[AveragingData]:
        answered = 0
        async for message in super().rpc_aggregate_part(stream, context):
            yield message
            answered += 1
            if self.dies == "between two parts" and answered == 2:
                os._exit(9)


Mortal.__name__ = WholeAverager.__name__  # which hivemind makes part of the address


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[hivemind.DHT]]:
    options: dict[str, Any] = {"host_maddrs": ["/ip4/127.0.0.1/tcp/0"], "use_ipfs": False, "start": True}
    first = hivemind.DHT(**options)
    address = [str(address) for address in first.get_visible_maddrs()]
    started = [first, *(hivemind.DHT(initial_peers=address, **options) for _ in range(2))]
    yield started
    for node in started:
        node.shutdown()


def averagers(nodes: list[hivemind.DHT], prefix: str, dies: str = "") -> list[Mortal]:
    """One for each node, with tensors full of its index; the last one dies."""
    started = []
    for index, node in enumerate(nodes):
        Mortal.dies = dies if node is nodes[-1] else ""  # read by the process that is forked now
        Mortal.spares = nodes[0].peer_id.to_bytes()
        tensors = [torch.full((SIZE,), float(index)), torch.full((3, 2), float(index))]
        started.append(
            Mortal(
                tensors,
                node,
                start=True,
                prefix=prefix,
                min_matchmaking_time=1.5,
                request_timeout=1.0,
                next_chunk_timeout=10,
                part_size_bytes=2**14,
                allow_state_sharing=False,
            )
        )
    return started


def averaged(peers: list[Mortal], timeout_s: float = 30) -> list[Any]:
    """What one step gives each: the size of its group, or what it raised."""
    steps = [
        peer.step(weight=weight, timeout=timeout_s, wait=False) for peer, weight in zip(peers, WEIGHTS, strict=False)
    ]
    results: list[Any] = []
    for peer, step in zip(peers, steps, strict=True):
        if peer.is_alive() and (peer is not peers[-1] or not peer.dies):
            try:
                results.append(len(step.result(LIMIT_S)))
            except Exception as error:
                results.append(error)
    return results


def values(peer: Mortal) -> set[float]:
    """The distinct values in its tensors, rounded to float32's last digits."""
    with peer.get_tensors() as tensors:
        return {round(value, 5) for tensor in tensors for value in tensor.unique().tolist()}


def mean_of(count: int) -> float:
    return round(sum(index * WEIGHTS[index] for index in range(count)) / sum(WEIGHTS[:count]), 5)


def test_all_have_the_weighted_mean(nodes: list[hivemind.DHT]) -> None:
    peers = averagers(nodes, "all")
    try:
        assert averaged(peers) == [3, 3, 3]
        assert [values(peer) for peer in peers] == [{mean_of(3)}] * 3
        assert [peer.means for peer in peers] == [1, 1, 1]
    finally:
        close(peers)


@pytest.mark.parametrize("dies", ["between two parts", "when it has the mean"])
def test_survivors_have_their_own_mean(nodes: list[hivemind.DHT], dies: str) -> None:
    """Upstream they keep parts of the failed attempt, and average those."""
    peers = averagers(nodes, dies.replace(" ", "_"), dies)
    try:
        assert averaged(peers) == [2, 2]
        assert [values(peer) for peer in peers[:2]] == [{mean_of(2)}] * 2
        assert not peers[2].is_alive()
    finally:
        close(peers)


def test_survivors_agree_when_one_alone_had_an_answer(nodes: list[hivemind.DHT]) -> None:
    peers = averagers(nodes, "one_answer", "after one answer")
    try:
        averaged(peers)
        assert values(peers[0]) == values(peers[1])
        assert values(peers[0]) in ({mean_of(2)}, {mean_of(3)})
    finally:
        close(peers)


def test_the_last_survivor_keeps_its_tensors(nodes: list[hivemind.DHT]) -> None:
    peers = averagers(nodes[1:], "last", "between two parts")
    try:
        (result,) = averaged(peers, timeout_s=4)
        assert isinstance(result, Exception)
        assert values(peers[0]) == {0.0}
        assert peers[0].means == 0
    finally:
        close(peers)


def close(peers: list[Mortal]) -> None:
    for peer in peers:
        if peer.is_alive():
            peer.shutdown()
