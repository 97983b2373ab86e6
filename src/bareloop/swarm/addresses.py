"""Addresses that peers start from, as `bareloop swarm serve` prints them: hivemind's multiaddresses, a lighthouse's HOST:PORT."""

import re
import socket
from collections.abc import Sequence
from typing import Any

__all__ = ["checked", "family", "host_and_port", "lighthouse", "listening"]

_MULTIADDRESS = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/[^/\s]+/(tcp|udp)/\d+(/[^/\s]+)*/p2p/\w+")
_HOST_AND_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:/\s]+):(\d{1,5})")


def checked(engine: str, peers: Any) -> list[str]:
    """`peers` as a list.

    Raises:
        ValueError: no list, one is not of the form that `engine` takes, or torchft has another number than one.
    """
    if isinstance(peers, str | bytes) or not isinstance(peers, Sequence | set | frozenset):
        raise ValueError(
            f"peers={peers!r}: must be a list of addresses, such as peers=[{peers!r}]; `bareloop swarm serve` prints one"
        )
    addresses = list(peers)
    if engine == "torchft":
        lighthouse(addresses)
    for address in addresses if engine == "hivemind" else ():
        if not isinstance(address, str) or not _MULTIADDRESS.fullmatch(address):
            raise ValueError(_no_address(address, engine, "/ip4/127.0.0.1/tcp/31337/p2p/12D3Koo..."))
    return addresses


def lighthouse(peers: Sequence[str]) -> tuple[str, int]:
    """Host, without brackets, and port of torchft's one lighthouse.

    Raises:
        ValueError: not one, or not HOST:PORT with a port that leaves one for the records after it.
    """
    if len(peers) != 1:
        raise ValueError(
            f"peers has {len(peers)} addresses: engine='torchft' takes that of one lighthouse, such as '127.0.0.1:29510';"
            " `bareloop swarm serve --engine torchft` runs one and prints it"
        )
    found = _HOST_AND_PORT.fullmatch(peers[0]) if isinstance(peers[0], str) else None
    if found is None or not 0 < int(found[2]) < 65_535:
        raise ValueError(_no_address(peers[0], "torchft", "127.0.0.1:29510"))
    return found[1].strip("[]"), int(found[2])


def _no_address(address: object, engine: str, example: str) -> str:
    return (
        f"peers has {address!r}: engine={engine!r} takes addresses such as {example!r}; `bareloop swarm serve --engine"
        f" {engine}` prints one"
    )


def host_and_port(host: str, port: int) -> str:
    """What `lighthouse` takes apart; an IPv6 address gets brackets."""
    return f"[{host}]:{port}" if ":" in host.strip("[]") and not host.startswith("[") else f"{host}:{port}"


def family(host: str) -> socket.AddressFamily:
    """Of an IP address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def listening(host: str, port: int = 0) -> socket.socket:
    """A socket that listens on `host` alone. As for servers, connections that ended a minute ago don't count as taken.

    Raises:
        OSError: `host` is not an address of this machine, or the port is taken.
        OverflowError: no such port.
    """
    return socket.create_server((host, port), family=family(host), backlog=128)
