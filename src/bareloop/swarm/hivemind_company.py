"""Who is to be in a peer's next mean, and how long to wait for whom.

A dead peer is known by its silence (`forget_after_s`), and then the others go on at once. A peer that finds most of the
last mean's peers gone may be the one that was cut off: it waits half of that time longer, so that the larger side of a cut
network is the one that is further when the network heals, and whose state all take.
"""

import logging
import time
from dataclasses import replace

from bareloop.swarm.hivemind_options import HivemindOptions
from bareloop.swarm.hivemind_roster import PeerRecord, Roster
from bareloop.swarm.hivemind_rounds import Mean

__all__ = ["Company"]

_log = logging.getLogger(__name__)

_JOINING_S = 3.0
"""Seconds for which a donor holds its round until the peer that it serves is seen in the roster."""


class Company:
    """The others, as this peer sees them from one mean to the next."""

    def __init__(self, roster: Roster, options: HivemindOptions) -> None:
        self._roster, self._options = roster, options
        self.before = ""
        """Name of the parameters before the last mean was applied."""
        self._group: frozenset[bytes] = frozenset()
        """Who has that mean, this peer included."""
        self._hold_until, self._held_for = 0.0, 0
        self._few_since: float | None = None
        """When this peer found itself among the few."""

    def hold(self, lineage: str) -> None:
        """A peer was handed the state: no mean without it, until it is seen or was waited for."""
        self._held_for = len(self._roster.view.beside(self._roster.mine.round, lineage))
        self._hold_until = time.monotonic() + _JOINING_S

    def met(self, round: int, mean: Mean | None) -> None:
        """Takes in who was in the mean of `round`; None when this peer was alone. Says who was not."""
        group = frozenset({self._roster.mine.peer} if mean is None else mean.samples)
        gone = self._group - group - self._known()
        if gone:
            _log.warning(
                "round %d goes on without %d of %d peers: they are silent", round + 1, len(gone), len(self._group)
            )
        self._group, self._few_since = group, None

    def members(self, lineage: str, waited_s: float) -> frozenset[bytes]:
        """Who must be in the group, told the seconds waited so far: see `Meeting`."""
        beside = self.beside(lineage)
        there = [p for p in beside if p.waiting or waited_s < self._patience_s(p)]
        if len(there) + 1 < self._options.min_peers:
            return frozenset()
        if time.monotonic() < self._hold_until and len(beside) <= self._held_for:
            return frozenset()
        members = frozenset({self._roster.mine.peer, *(p.peer for p in there)})
        return frozenset() if self._may_be_cut_off(members) else members

    def patience_s(self, lineage: str) -> float:
        """Longest wait for any of the others, in seconds."""
        return max((self._patience_s(p) for p in self.beside(lineage)), default=0.0)

    def _may_be_cut_off(self, members: frozenset[bytes]) -> bool:
        if 2 * len(self._group & (members | self._known())) >= len(self._group):
            self._few_since = None
            return False
        if self._few_since is None:
            self._few_since = time.monotonic()
            _log.warning("most peers of the last round are silent: waiting for them a little longer")
        return time.monotonic() - self._few_since < self._options.forget_after_s / 2

    def _known(self) -> frozenset[bytes]:
        """Peers who are alive, or have said that they leave."""
        view = self._roster.view
        return view.left | {peer.peer for peer in view.others}

    def beside(self, lineage: str) -> list[PeerRecord]:
        """Peers who are to average with this one, those included who have not applied the last mean yet."""
        mine, view = self._roster.mine, self._roster.view
        coming = [p for p in view.beside(mine.round - 1, self.before) if p.peer in self._group]
        return [*view.beside(mine.round, lineage), *(replace(p, waiting=False) for p in coming)]

    def _patience_s(self, peer: PeerRecord) -> float:
        """Longest wait for `peer`, in seconds, while it lives."""
        if peer.loading:
            return self._options.state_timeout_s
        return max(self._options.patience_s, 3 * peer.pace_s)
