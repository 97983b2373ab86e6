"""Names to engines, each loaded when it is asked for: hivemind takes 3 s to import, and few have both installed."""

import importlib
import re
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from bareloop.extras import needs
from bareloop.swarm.engine import Engine

__all__ = ["ENGINES", "engine_of"]

ENGINES = MappingProxyType(
    {
        "hivemind": ("bareloop.swarm.hivemind_engine", "HivemindEngine", "HivemindOptions"),
        "torchft": ("bareloop.swarm.torchft_engine", "TorchFTEngine", "TorchFTOptions"),
    }
)
"""Name -> module, class of engine, class of options."""

_MULTIADDRESS = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/[^/\s]+/(tcp|udp)/\d+(/[^/\s]+)*/p2p/\w+")
_HOST_AND_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:/\s]+):\d{1,5}")


def engine_of(name: str, run_id: str, target_batch: float, peers: Sequence[str], options: Any) -> Engine:
    """The engine `name`, not started.

    Raises:
        ValueError: no such engine; an address that it can't use; options that are not its own.
        ImportError: its package is not installed.
    """
    if name not in ENGINES:
        raise ValueError(f"engine={name!r}: must be one of {', '.join(map(repr, ENGINES))}")
    addresses = _addresses(name, peers)
    module, engine, kind = ENGINES[name]
    with needs(f"engine={name!r}", "swarm"):
        loaded = importlib.import_module(module)
    options_class = getattr(loaded, kind)
    if options is not None and not isinstance(options, options_class):
        raise ValueError(f"options={options!r}: engine={name!r} takes a {kind}, or None for its defaults")
    return getattr(loaded, engine)(run_id, target_batch, addresses, options_class() if options is None else options)


def _addresses(name: str, peers: Any) -> list[str]:
    """`peers` as a list of addresses of the form that the engine takes."""
    if isinstance(peers, str | bytes) or not isinstance(peers, Sequence | set | frozenset):
        raise ValueError(f"peers={peers!r}: must be a list of addresses, such as peers=[{peers!r}]")
    addresses = list(peers)
    form, example, many = {
        "hivemind": (_MULTIADDRESS, "/ip4/127.0.0.1/tcp/31337/p2p/12D3Koo...", True),
        "torchft": (_HOST_AND_PORT, "127.0.0.1:29510", False),
    }[name]
    for address in addresses:
        if not isinstance(address, str) or not form.fullmatch(address):
            raise ValueError(
                f"peers has {address!r}: engine={name!r} takes addresses such as {example!r}; `bareloop swarm serve --engine"
                f" {name}` prints one"
            )
    if not many and len(addresses) != 1:
        raise ValueError(
            f"peers has {len(addresses)} addresses: engine={name!r} takes that of one lighthouse, such as {example!r};"
            f" `bareloop swarm serve --engine {name}` runs one and prints it"
        )
    return addresses
