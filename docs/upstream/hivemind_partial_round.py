"""hivemind 1.1.12: when a reducer dies in mid all-reduce, its part keeps each peer's local values, and the round counts.

    python hivemind_partial_round.py

Two peers hold a tensor each for peer A to reduce and for peer B to reduce, A's all zeros, B's all eights. B is killed
(SIGKILL, with all of its processes) when A's data reaches it. A's `step` returns a group of two, its usual sign of success,
while one tensor holds an average, or B's half of it did not come, and the other one A's own values.
"""

import logging
import multiprocessing
import os
import signal
from typing import AsyncIterator  # noqa: UP035 (hivemind compares with this one)

import hivemind
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.p2p import P2PContext
from hivemind.proto import averaging_pb2

Parts = AsyncIterator[averaging_pb2.AveragingData]

OPTIONS = {"prefix": "partial", "start": True, "target_group_size": 2, "min_matchmaking_time": 1.0,
           "request_timeout": 0.5, "next_chunk_timeout": 1.0}  # fmt: skip


class Averager(DecentralizedAverager):  # one class for both: its name is a part of the names of the calls
    dies = False

    async def rpc_aggregate_part(self, stream: Parts, context: P2PContext) -> Parts:  # type: ignore[override]
        if self.dies:
            os.killpg(0, signal.SIGKILL)
        async for message in super().rpc_aggregate_part(stream, context):
            yield message


def doomed(address: str) -> None:
    os.setsid()
    Averager.dies = True
    dht = hivemind.DHT(initial_peers=[address], start=True, nat_port_map=False)
    Averager([torch.full((8,), 8.0), torch.full((8,), 8.0)], dht, **OPTIONS).step(timeout=30)


def main() -> None:
    logging.getLogger("hivemind").setLevel(logging.CRITICAL)
    dht = hivemind.DHT(start=True, nat_port_map=False)
    peer = multiprocessing.get_context("fork").Process(target=doomed, args=(str(dht.get_visible_maddrs()[0]),))
    peer.start()
    averager = Averager([torch.zeros(8), torch.zeros(8)], dht, **OPTIONS)
    try:
        group = averager.step(timeout=30)
    finally:
        peer.join(10)
        peer.kill()
    with averager.get_tensors() as tensors:
        values = [tensor[0].item() for tensor in tensors]
    averager.shutdown()
    dht.shutdown()
    print(
        f"peer exit code {peer.exitcode}; step() returned a group of {len(group)}, tensors hold {values}; true mean 4.0"
    )
    print("fault: present" if group and values != [4.0, 4.0] else "fault: gone")


if __name__ == "__main__":
    main()
