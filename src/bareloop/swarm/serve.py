"""The address that peers of a run start from: a node of hivemind's DHT, or torchft's lighthouse with a store for records.

It trains nothing and holds no gradients: a run goes on without the DHT node once its peers know each other, but not
without the lighthouse. Open to this machine only unless told otherwise, since neither engine asks a stranger for a
password: who reaches the port can join, and what a peer sends is averaged into everybody's model.
"""

import ipaddress
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from bareloop.extras import needs
from bareloop.swarm.addresses import family, host_and_port, listening
from bareloop.swarm.engines import ENGINES

__all__ = ["DEFAULT_PORTS", "ServeFailed", "ServeOptions", "Served", "ended_by_signal", "serving"]

DEFAULT_PORTS = {"hivemind": 31337, "torchft": 29510}
_LAST_PORT = 65_535


class ServeFailed(RuntimeError):
    """The engine would not start; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """What to serve, and where.

    Raises:
        ValueError: a field out of range, or one that the engine can't honour.
    """

    engine: str = "hivemind"
    """ "hivemind" or "torchft"."""
    host: str = "127.0.0.1"
    """Address or name of this machine to listen at; 0.0.0.0 (or ::) is every one it has, and opens the run to strangers."""
    port: int | None = None
    """Port; torchft takes the next one too. 0 is any free one, None the engine's own: 31337, 29510."""
    announce: str | None = None
    """Address or name that others reach this machine by, where it is not `host`: behind NAT, or for 0.0.0.0."""
    identity: Path | None = None
    """File of hivemind's private key, made when it is not there: with it the address stays the same. None: a new one."""
    peers: tuple[str, ...] = ()
    """hivemind: addresses of a DHT to become a part of; none begins a new one."""

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ValueError(f"engine={self.engine!r}: must be one of {', '.join(map(repr, ENGINES))}")
        last = _LAST_PORT if self.engine == "hivemind" else _LAST_PORT - 1
        if self.port is not None and not 0 <= self.port <= last:
            raise ValueError(f"port={self.port}: must be 0 (any free one) to {last}")
        if self.engine == "torchft" and self.identity is not None:
            raise ValueError(
                f"identity={str(self.identity)!r}: a lighthouse has none, its address is HOST:PORT; leave it out"
            )
        if self.engine == "torchft" and self.peers:
            raise ValueError(f"peers={self.peers!r}: there is one lighthouse in a run, it joins no other; leave it out")
        if self.identity is not None and not self.identity.parent.is_dir():
            raise ValueError(f"identity={str(self.identity)!r}: there is no such folder; make it first")
        _resolved("host", self.host)
        if self.announce is not None:
            address = _resolved("announce", self.announce)
            if ipaddress.ip_address(address).is_unspecified:
                raise ValueError(
                    f"announce={self.announce!r}: must be an address that others can reach, not all of them"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """What now runs."""

    engine: str
    addresses: tuple[str, ...]
    """For `peers=` of `swarm.join`."""
    loopback: bool
    """Whether only this machine can reach it."""
    records_port: int | None
    """torchft: where the store for `bareloop swarm watch` listens."""


@contextmanager
def serving(options: ServeOptions) -> Iterator[Served]:
    """A block in which the engine's entry point runs in the background; leaving it ends all its processes and threads.

    Raises:
        ServeFailed: a taken port, an address that is not this machine's, an engine that did not start.
        ImportError: the engine's package is not installed.
    """
    start = {"hivemind": _serve_hivemind, "torchft": _serve_torchft}[options.engine]
    with ExitStack() as undo:
        with needs(f"engine={options.engine!r}", "swarm"):
            served = start(options, undo)
        yield served


@contextmanager
def ended_by_signal() -> Iterator[threading.Event]:
    """A block in which Ctrl-C and SIGTERM set the event and do nothing else, so that what runs can be ended in order.

    Children that are forked in the block keep the signals' usual effect.
    """
    ended = threading.Event()
    owner = os.getpid()

    def note(number: int, frame: FrameType | None) -> None:
        if os.getpid() == owner:
            ended.set()
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _serve_hivemind(options: ServeOptions, undo: ExitStack) -> Served:
    from hivemind.utils.logging import use_hivemind_log_handler

    from bareloop.swarm.watch_hivemind import AsideDHT

    use_hivemind_log_handler("nowhere")
    host = _resolved("host", options.host)
    port = _free_port(host, _port(options), count=1)
    try:
        dht = AsideDHT(
            start=True,
            initial_peers=list(options.peers),
            host_maddrs=[_multiaddress(host, port)],
            announce_maddrs=None if options.announce is None else [_multiaddress(options.announce, port)],
            identity_path=None if options.identity is None else str(options.identity),
            use_relay=False,
            auto_nat=False,
            nat_port_map=False,
            startup_timeout=30,
        )
    except Exception as error:  # hivemind hands on what its child raised, of any kind
        why = f" (is one of {', '.join(options.peers)} running?)" if options.peers else ""
        raise ServeFailed(f"hivemind's DHT did not start at {host}:{port}{why}: {_told(error)}") from error
    undo.callback(dht.shutdown)
    addresses = tuple(map(str, dht.get_visible_maddrs()))
    return Served(engine="hivemind", addresses=addresses, loopback=_is_loopback(host), records_port=None)


def _serve_torchft(options: ServeOptions, undo: ExitStack) -> Served:
    os.environ.setdefault("RUST_LOG", "warn")  # else the lighthouse tells of each quorum on standard error
    from torchft.coordination import LighthouseServer

    from bareloop.swarm.torchft_engine import LIGHTHOUSE_DEFAULTS
    from bareloop.swarm.torchft_group import bound_store

    host = _resolved("host", options.host)
    port = _free_port(host, _port(options), count=2)  # the lighthouse panics where a port is taken
    try:
        store = bound_store(host, port + 1)
        lighthouse = LighthouseServer(bind=host_and_port(host, port), **LIGHTHOUSE_DEFAULTS)
    except (OSError, RuntimeError) as error:
        raise ServeFailed(
            f"torchft's lighthouse did not start at {host_and_port(host, port)}: {_told(error)}"
        ) from error
    undo.callback(lighthouse.shutdown)
    undo.push(lambda *_: _drop(store))
    address = host_and_port(options.announce or _reachable(host), port)
    return Served(engine="torchft", addresses=(address,), loopback=_is_loopback(host), records_port=port + 1)


def _drop(store: object) -> None:
    """Keeps the store alive until the block ends: it has no close, it ends with its last reference."""


def _port(options: ServeOptions) -> int:
    return DEFAULT_PORTS[options.engine] if options.port is None else options.port


def _free_port(host: str, port: int, *, count: int) -> int:
    """`port`, or any free one for 0, found free together with the `count` - 1 after it.

    Raises:
        ServeFailed: taken, or `host` is not an address of this machine.
    """
    for _ in range(50):
        try:
            with closing(listening(host, port)) as first:
                found = first.getsockname()[1]
                with ExitStack() as rest:
                    for offset in range(1, count):
                        rest.enter_context(closing(listening(host, found + offset)))
                    return found
        except (OSError, OverflowError) as error:
            if port:
                raise ServeFailed(_why_not(host, port, count, error)) from error
    raise ServeFailed(f"no {count} free ports in a row at {host}")


def _why_not(host: str, port: int, count: int, error: Exception) -> str:
    ports = f"port {port}" if count == 1 else f"ports {port} and {port + 1} (the store for `bareloop swarm watch`)"
    return f"can't listen at {host}, {ports}: {_told(error)}; choose another with --port, or --port 0 for any free one"


def _resolved(name: str, host: str) -> str:
    """An IP address of `host`.

    Raises:
        ValueError: there is none.
    """
    try:
        return str(socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{name}={host!r}: is no address and no known name of a machine ({_told(error)})") from error


def _reachable(host: str) -> str:
    """`host`, or for "every address" the one that this machine is seen by from outside."""
    if not ipaddress.ip_address(host).is_unspecified:
        return host
    with socket.socket(family(host), socket.SOCK_DGRAM) as probe:
        try:  # asks the routing table; nothing is sent. The addresses are those reserved for documentation.
            probe.connect(("2001:db8::1", 9) if ":" in host else ("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback


def _multiaddress(host: str, port: int) -> str:
    bare = host.strip("[]")
    try:
        kind = f"ip{ipaddress.ip_address(bare).version}"
    except ValueError:
        kind = "dns"
    return f"/{kind}/{bare}/tcp/{port}"


def _told(error: BaseException) -> str:
    """The first line of what an error says; its kind where it says nothing."""
    text = str(error.strerror) if isinstance(error, OSError) and error.strerror else str(error)
    return (text.strip().splitlines() or [type(error).__name__])[0][:300]
