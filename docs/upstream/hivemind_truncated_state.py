"""hivemind 1.1.12: a state download that breaks off in the middle is taken for the whole state (see hivemind issue 504).

    python hivemind_truncated_state.py

A donor of 8 tensors is killed after it has sent 3 of them. The stream ends like a complete one, since `P2P` takes a closed
connection for the end of the stream, and `load_state_from_peers` returns what there is. `hivemind.Optimizer` then fails with
"list index out of range", or keeps its old state, depending on where the cut is.
"""

import asyncio
import logging
import multiprocessing
import os
import signal
import time
from typing import AsyncIterator  # noqa: UP035 (hivemind compares with this one)

import hivemind
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.p2p import P2PContext
from hivemind.proto import averaging_pb2 as pb


class Averager(DecentralizedAverager):
    async def rpc_download_state(
        self, _request: pb.DownloadRequest, _context: P2PContext
    ) -> AsyncIterator[pb.DownloadData]:
        sent = 0
        async for part in super().rpc_download_state(_request, _context):
            yield part
            sent += 1
            if sent == 3:
                await asyncio.sleep(0.5)  # the three arrive
                os.killpg(0, signal.SIGKILL)


def averager(dht: hivemind.DHT) -> Averager:
    return Averager([torch.ones(4) for _ in range(8)], dht, prefix="state", start=True)


def donor(address: str) -> None:
    os.setsid()
    dht = hivemind.DHT(initial_peers=[address], start=True, nat_port_map=False)
    held = averager(dht)
    time.sleep(60)
    del held


def main() -> None:
    logging.getLogger("hivemind").setLevel(logging.CRITICAL)
    dht = hivemind.DHT(start=True, nat_port_map=False)
    peer = multiprocessing.get_context("fork").Process(target=donor, args=(str(dht.get_visible_maddrs()[0]),))
    peer.start()
    joiner = averager(dht)
    deadline = time.monotonic() + 30
    while len((dht.get("state.all_averagers", latest=True) or ({},))[0]) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    state = joiner.load_state_from_peers(timeout=20)
    peer.join(10)
    peer.kill()
    joiner.shutdown()
    dht.shutdown()
    print(
        f"donor exit code {peer.exitcode}; received {None if state is None else len(state[1])} of 8 tensors, without an error"
    )
    print("fault: present" if state is not None and len(state[1]) < 8 else "fault: gone")


if __name__ == "__main__":
    main()
