"""What a peer on torchft can be told, and where its lighthouse is.

Every timeout trades the time that a dead peer costs the living against the chance to take a slow one for dead.
"""

import ipaddress
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from bareloop.swarm.addresses import host_and_port, listening

__all__ = ["LIGHTHOUSE_DEFAULTS", "TorchFTOptions", "require_answer"]

LIGHTHOUSE_DEFAULTS: Mapping[str, int] = MappingProxyType(
    {
        "min_replicas": 1,
        "join_timeout_ms": 30_000,
        "quorum_tick_ms": 50,
        "heartbeat_timeout_ms": 1_500,
    }
)
"""Arguments of torchft's LighthouseServer. Peers send a heartbeat each 0.1 s, so 15 in a row are missing when one counts as
dead: that is what survivors wait after a kill. The join timeout is for one that lives and does not come: a peer whose
micro-batch takes 30 s longer than was planned is left behind, and downloads the state of the others when it comes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchFTOptions:
    """How a peer takes part.

    There is no authentication in torchft: who reaches a peer's ports or the lighthouse can join the run, and end a process
    (its "kill" request). Leave `host` on the loopback, or on a network of your own. States and gradients come without
    pickle: a liar can send wrong numbers, but no code.
    """

    host: str = "127.0.0.1"
    """IP address of this machine that the other peers reach it at; all ports that the peer opens are opened there, and
    only there. (NCCL, where gradients are on CUDA, chooses its own: see NCCL_SOCKET_IFNAME.)"""
    min_peers: int = 1
    """Peers without which no mean is made, at the start and later; micro-batches go on and accumulate."""
    connect_timeout_s: float = 5.0
    """Seconds until a lighthouse that does not answer is an error."""
    start_timeout_s: float = 600.0
    """Seconds until a start that did not find `min_peers`, or a round of the others to enter after, is an error."""
    silence_timeout_s: float = 1.0
    """Seconds without a byte after which a collective has failed: what a partition costs. A killed peer is noticed at once. Raise
    it below 10 Mbit/s or where a network or machine stalls: a false alarm costs another attempt, and no gradient."""
    state_timeout_s: float = 300.0
    """Seconds that the donor of a state may take to gather it."""

    def __post_init__(self) -> None:
        try:
            ipaddress.ip_address(self.host)
            listening(self.host).close()
        except (ValueError, OSError) as error:
            raise ValueError(
                f"host={self.host!r}: must be an IP address of this machine, such as '127.0.0.1' ({error})"
            ) from error
        if isinstance(self.min_peers, bool) or not isinstance(self.min_peers, int) or self.min_peers < 1:
            raise ValueError(f"min_peers={self.min_peers!r}: must be a number of peers, 1 or more")
        for name in ("connect_timeout_s", "start_timeout_s", "silence_timeout_s", "state_timeout_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
                raise ValueError(f"{name}={value!r}: must be seconds, above 0 and below 1e6")


def require_answer(host: str, port: int, seconds: float) -> None:
    """Waits until somebody listens there.

    Raises:
        RuntimeError: nobody does.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), max(0.1, deadline - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise RuntimeError(
                    f"no lighthouse answers at {host_and_port(host, port)} ({error}): start one with `bareloop swarm serve --engine"
                    " torchft`, and give the address that it prints"
                ) from error
            time.sleep(0.1)
