"""hivemind 1.1.12: a retried all-reduce starts from tensors that the failed attempt half averaged.

    python hivemind_half_averaged_retry.py

Two peers hold two tensors, one all zeros and the other all eights; the mean is 4. Each reduces one of the tensors. In the
first attempt both lose their replies, as when the link drops after the data went out: each applies the part that it
reduced itself, in place, and not the other's. The retry averages those again, and both peers call the round a success.
"""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import AsyncIterator  # noqa: UP035 (hivemind compares with this one)

import hivemind
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.p2p import P2PContext
from hivemind.proto import averaging_pb2

Parts = AsyncIterator[averaging_pb2.AveragingData]


class RepliesLostOnce(DecentralizedAverager):
    attempts = 0

    async def rpc_aggregate_part(self, stream: Parts, context: P2PContext) -> Parts:  # type: ignore[override]
        self.attempts += 1
        lost = self.attempts == 1
        async for message in super().rpc_aggregate_part(stream, context):
            if lost:
                await asyncio.sleep(3600)
            yield message


def main() -> None:
    logging.getLogger("hivemind").setLevel(logging.CRITICAL)
    first = hivemind.DHT(start=True, nat_port_map=False)
    second = hivemind.DHT(initial_peers=[str(a) for a in first.get_visible_maddrs()], start=True, nat_port_map=False)
    averagers = [
        RepliesLostOnce(
            [torch.full((8,), value), torch.full((8,), value)], dht, prefix="retry", start=True, target_group_size=2,
            min_matchmaking_time=1.0, request_timeout=0.5, allreduce_timeout=1.0,
        )
        for dht, value in ((first, 0.0), (second, 8.0))
    ]  # fmt: skip
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda averager: averager.step(timeout=30), averagers))
    results = []
    for averager, group in zip(averagers, groups, strict=True):
        with averager.get_tensors() as tensors:
            results.append([tensor[0].item() for tensor in tensors])
        print(f"round of {len(group)} peers reported a success: tensors hold {results[-1]}, their true mean is 4.0")
        averager.shutdown()
    second.shutdown()
    first.shutdown()
    print("fault: present" if any(abs(value - 4) > 1e-3 for values in results for value in values) else "fault: gone")


if __name__ == "__main__":
    main()
