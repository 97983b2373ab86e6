"""Who offers to lead a group of peers, as hivemind's matchmaking is told.

Upstream shows every offer in the DHT, and an offer outlives a peer that was cut off: each who asks it waits 2 s for an
answer. Members are known here from the roster, so only their offers are shown.
"""

import asyncio
import time

from hivemind.averaging.key_manager import GroupKeyManager
from hivemind.dht import DHT
from hivemind.p2p import PeerID

__all__ = ["Offers"]

_OFFERS_S = 0.02
"""Seconds between two looks at who offers to lead. Upstream looks again at once where nobody does: 250 times a second, as long
as a round waits."""


class Offers(GroupKeyManager):
    """Who offers to lead a group, of the members alone: the offer of a dead one outlives it, and each who asks it waits."""

    def __init__(self, dht: DHT, prefix: str) -> None:
        super().__init__(dht, prefix, initial_group_bits="", target_group_size=2)
        self.members: frozenset[bytes] = frozenset()
        self._withdrawn: asyncio.Task[bool] | None = None
        self._look_at = 0.0

    async def get_averagers(self, group_key: str, only_active: bool) -> list[tuple[PeerID, float]]:
        await asyncio.sleep(max(0.0, self._look_at - time.monotonic()))
        self._look_at = time.monotonic() + _OFFERS_S
        found = await super().get_averagers(group_key, only_active)
        return [(peer, expires) for peer, expires in found if peer.to_bytes() in self.members]

    async def declare_averager(
        self, group_key: str, peer_id: PeerID, expiration_time: float, looking_for_group: bool = True
    ) -> bool:
        declaring = super().declare_averager(group_key, peer_id, expiration_time, looking_for_group)
        if looking_for_group:
            return await declaring
        # A group that has formed does not wait until the whole DHT knows.
        self._withdrawn = asyncio.create_task(declaring)
        return True
