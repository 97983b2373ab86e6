"""How a peer takes part in a run on hivemind, and what of it becomes an argument of hivemind's DHT.

Loopback only, and no router is asked to open a port, unless you say so: hivemind's own defaults ask for UPnP and relays.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hivemind.compression import CompressionBase, NoCompression, ScaledFloat16Compression, Uniform8BitQuantization
from hivemind.compression.serialization import _BASE_COMPRESSION_TYPES
from hivemind.dht import DHT
from hivemind.dht.validation import RecordValidatorBase
from hivemind.p2p import P2PDaemonError
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.utils.auth import AuthorizerBase
from torch import Tensor

__all__ = ["HivemindOptions", "compression_of", "mend_8bit", "open_dht"]


class _Uniform8Bit(Uniform8BitQuantization):
    """hivemind's, of which version 1.1.12 can't read what it wrote with numpy 2.4 and newer."""

    def extract(self, serialized_tensor: Any) -> Tensor:
        buffer = serialized_tensor.buffer
        size = int.from_bytes(buffer[:8], "little")
        codebook = torch.frombuffer(bytearray(buffer[8 : 8 + 4 * size]), dtype=torch.float32)
        indices = torch.frombuffer(bytearray(buffer[8 + 4 * size :]), dtype=torch.uint8)
        values = codebook[indices.long()].reshape(tuple(serialized_tensor.size))
        return values.to(getattr(torch, serialized_tensor.dtype))


_COMPRESSIONS: dict[str, type[CompressionBase]] = {
    "none": NoCompression,
    "fp16": ScaledFloat16Compression,
    "8bit": _Uniform8Bit,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class HivemindOptions:
    """How this peer takes part. What is sent and how (`compression`) must be the same for all peers; the rest may differ."""

    host: str = "127.0.0.1"
    """Address to listen at. "0.0.0.0" lets other machines in: read the threat model first."""
    port: int = 0
    """TCP port to listen at; 0 takes a free one."""
    announce: Sequence[str] = ()
    """Addresses at which others reach this peer, as hivemind writes them ("/ip4/1.2.3.4/tcp/31337"), where `host` does not
    tell: behind a router or in a container. Empty announces what it listens at."""
    client: bool = False
    """Only reach out, never be reached: for a peer behind a router that lets nothing in. It can neither reduce parts of a
    mean nor hand over the state; a run needs peers that can."""
    nat: bool = False
    """Ask the router to map a port (UPnP), and use relays of libp2p."""
    identity_path: str | None = None
    """File of the private key that this peer's name comes from; written if missing. None makes a new name each time."""
    compression: str = "none"
    """Of gradients on the wire: "none", "fp16" (scaled by mean and deviation of each part; 5e-4 off) or "8bit" (256 steps
    over six deviations: the few values beyond lose much). State is never compressed."""
    min_peers: int = 1
    """Peers that a round needs, this one included; it waits for more. Above half of all peers, a cut network can't go on
    in two parts, of which one would be thrown away later."""
    forget_after_s: float = 5.0
    """Silence after which a peer counts as gone, in seconds. The survivors' round goes on then, so this bounds their wait.
    Raise it where peers' machines stall: one that is given up by mistake has to download the state."""
    patience_s: float = 10.0
    """Least time to wait for a peer that lives but isn't done with its micro-batch, in seconds; grows to three times the
    longest micro-batch that any peer has had lately. Then the others go on, and it downloads their state."""
    state_timeout_s: float = 120.0
    """Longest time to download the state, in seconds; as long the others wait for one who does."""
    authorizer: AuthorizerBase | None = None
    """Signs and checks what peers say in the DHT (`hivemind.utils.auth`). It does not cover the all-reduce."""
    record_validators: Sequence[RecordValidatorBase] = ()
    """Further checks of records in the DHT."""

    def __post_init__(self) -> None:
        if not isinstance(self.host, str) or not self.host or "/" in self.host:
            raise ValueError(f"host={self.host!r}: must be an address to listen at, such as '127.0.0.1' or '0.0.0.0'")
        if not isinstance(self.port, int) or not 0 <= self.port < 65536:
            raise ValueError(f"port={self.port!r}: must be a TCP port, or 0 for a free one")
        if isinstance(self.announce, str):
            raise ValueError(f"announce={self.announce!r}: must be a list of addresses, such as announce=[...]")
        if self.compression not in _COMPRESSIONS:
            raise ValueError(
                f"compression={self.compression!r}: must be one of {', '.join(map(repr, _COMPRESSIONS))}; hivemind's"
                " others lose more or need bitsandbytes, and PowerSGD is a method of its own"
            )
        if not isinstance(self.min_peers, int) or self.min_peers < 1:
            raise ValueError(f"min_peers={self.min_peers!r}: must be a number of peers, 1 or more")
        for name, least in (("forget_after_s", 1.0), ("patience_s", 0.0), ("state_timeout_s", 1.0)):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not least <= value < float("inf"):
                raise ValueError(f"{name}={value!r}: must be a number of seconds, {least:g} or more")
        if self.authorizer is not None and not isinstance(self.authorizer, AuthorizerBase):
            raise ValueError(f"authorizer={self.authorizer!r}: must be a hivemind.utils.auth.AuthorizerBase, or None")
        if self.client and self.announce:
            raise ValueError(f"announce={self.announce!r} with client=True: a client can't be reached; leave one out")


def compression_of(options: HivemindOptions) -> CompressionBase:
    """What hivemind compresses gradients with."""
    return _COMPRESSIONS[options.compression]()


def mend_8bit() -> None:
    """Lets this process read what "8bit" sends. For the averager's process: what the user's own reads stays as it is."""
    _BASE_COMPRESSION_TYPES["UNIFORM_8BIT"] = _Uniform8Bit()
    warnings.filterwarnings("ignore", message="torch.quantize_per_tensor")  # hivemind calls it for each part


def _arguments(options: HivemindOptions) -> dict[str, Any]:
    """Arguments for `hivemind.DHT`, all but `start`, `initial_peers` and the validators."""
    family = "ip6" if ":" in options.host else "ip4"
    arguments: dict[str, Any] = {
        "host_maddrs": [f"/{family}/{options.host}/tcp/{options.port}"],
        "client_mode": options.client,
        "no_listen": options.client,
        "nat_port_map": options.nat,
        "auto_nat": options.nat,
        "use_relay": options.nat,
        "use_auto_relay": options.nat and not options.client,
        "identity_path": options.identity_path,
        "authorizer": options.authorizer,
        # A look at the roster must end within the silence that it measures, also where a node of the DHT is cut off: upstream's
        # 3 s, waited for twice, made a partition cost 11 s.
        "wait_timeout": 0.3 * options.forget_after_s,
        # Upstream leaves a node that did not answer alone for 5 s, then 10, then 20: so a peer that was cut off is back sooner.
        "backoff_rate": 1.0,
        "startup_timeout": 60.0,
        "shutdown_timeout": 10.0,
    }
    if options.announce:
        arguments["announce_maddrs"] = list(options.announce)
    return arguments


def open_dht(addresses: Sequence[str], options: HivemindOptions, validators: Sequence[RecordValidatorBase]) -> DHT:
    """A started DHT, which knows the peers at `addresses`.

    Raises:
        RuntimeError: none of them answers, or this peer can't listen.
    """
    try:
        return DHT(addresses or None, start=True, record_validators=validators, **_arguments(options))
    except (RuntimeError, OSError, P2PDaemonError, ControlFailure) as error:
        here = f"hivemind can't listen at {options.host}, port {options.port}"
        where = f"no peer answers at {', '.join(addresses)}" if addresses else here
        raise RuntimeError(f"{where}: {error}") from error
