"""A record in hivemind's roster, for tests that make one by hand."""

from typing import Any

from bareloop.swarm.hivemind_roster import PeerRecord

__all__ = ["record"]


def record(peer: bytes, **fields: Any) -> PeerRecord:
    """Of a peer that has begun and gathered nothing, but for `fields`."""
    begun: dict[str, Any] = {
        "round": 0,
        "lineage": "L0",
        "samples": 0.0,
        "rate": 0.0,
        "pace_s": 0.0,
        "waiting": False,
        "loading": False,
        "schema": "s",
        "client": False,
        "left": False,
        "beat": 1,
    }
    return PeerRecord(peer=peer, **(begun | fields))
