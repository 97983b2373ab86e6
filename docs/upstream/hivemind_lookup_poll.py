"""hivemind 1.1.12: a peer that waits for a group asks the DHT for others as often as it can.

    python hivemind_lookup_poll.py

With nobody to ask, `PotentialLeaders.pop_next_leader` has the queue updated and looks again, without a pause: one lookup
ends, the next begins. So a peer that waits for slower ones keeps its own DHT process busy, and those of the peers that its
lookups go to, for as long as it waits.
"""

import multiprocessing
import time

import hivemind
import torch
from hivemind.averaging.key_manager import GroupKeyManager

WAIT_S = 3.0


def main() -> None:
    asked = multiprocessing.Value("i", 0)
    look = GroupKeyManager.get_averagers

    async def counted(self: GroupKeyManager, *arguments: object, **named: object) -> object:
        asked.value += 1
        return await look(self, *arguments, **named)

    GroupKeyManager.get_averagers = counted  # in the process that is forked now too
    dht = hivemind.DHT(start=True, nat_port_map=False)
    averager = hivemind.DecentralizedAverager(
        [torch.ones(4)], dht, prefix="waits", start=True, min_matchmaking_time=WAIT_S, request_timeout=1.0
    )
    began_s = time.monotonic()
    try:
        averager.step(timeout=WAIT_S)
    except Exception:  # nobody came
        pass
    waited_s = time.monotonic() - began_s
    averager.shutdown()
    dht.shutdown()
    print(f"a peer that waited for others for {waited_s:.1f} s looked for them {asked.value} times")
    print("fault: present" if asked.value > 20 * waited_s else "fault: gone")


if __name__ == "__main__":
    main()
