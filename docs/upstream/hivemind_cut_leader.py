"""hivemind 1.1.12: followers of a leader that falls silent wait until its offer runs out, and do not find each other.

    python hivemind_cut_leader.py

Three peers want to average. One leads, one follows; the leader is stopped (SIGSTOP: as when a network is cut, its
connections stay open and nothing comes any more), and then the third one comes. The follower waits for the leader's next
word until the leader's offer and `request_timeout` have run out, and the offer stays in the DHT, so that the third one asks
the silent leader too. Without the leader the two would have met when the follower's own offer, of 6 s, ran out; where it is
killed instead (SIGKILL breaks its connections) they mostly do, after 5.5 s.
"""

import os
import signal
import time

import hivemind
import torch

MATCHMAKING_S = 6.0
LIMIT_S = 25.0


def left_to_themselves_s(nodes: list[hivemind.DHT]) -> float:
    """Seconds until the two that are left have averaged, from the moment when the leader fell silent."""
    leader, follower, third = (
        hivemind.DecentralizedAverager(
            [torch.ones(4)],
            node,
            prefix="cut",
            start=True,
            min_matchmaking_time=MATCHMAKING_S,
            request_timeout=1.0,
            min_group_size=2,
            target_group_size=3,
        )
        for node in nodes
    )
    leader.step(timeout=LIMIT_S, wait=False)
    time.sleep(0.5)
    waiting = [follower.step(timeout=LIMIT_S, wait=False)]
    time.sleep(0.5)
    os.kill(leader.pid, signal.SIGSTOP)
    began_s = time.monotonic()
    waiting.append(third.step(timeout=LIMIT_S, wait=False))
    for step in waiting:
        try:
            step.result(LIMIT_S)
        except Exception:  # they did not find each other at all
            pass
    took_s = time.monotonic() - began_s
    os.kill(leader.pid, signal.SIGKILL)
    for peer in (follower, third):
        peer.shutdown()
    return took_s


def main() -> None:
    options = {"start": True, "nat_port_map": False, "use_relay": False, "auto_nat": False}
    first = hivemind.DHT(**options)
    addresses = [str(address) for address in first.get_visible_maddrs()]
    nodes = [first, *(hivemind.DHT(initial_peers=addresses, **options) for _ in range(2))]
    took_s = left_to_themselves_s(nodes)
    for node in nodes:
        node.shutdown()
    print(
        f"the two that were left had averaged {took_s:.1f} s after the leader fell silent; an offer lasts {MATCHMAKING_S:g} s"
    )
    print("fault: present" if took_s > 1.5 * MATCHMAKING_S else "fault: gone")


if __name__ == "__main__":
    main()
