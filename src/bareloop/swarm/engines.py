"""Names to engines, each loaded when it is asked for: hivemind takes 3 s to import, and few have both installed."""

import importlib
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from bareloop.extras import needs
from bareloop.swarm.addresses import checked
from bareloop.swarm.engine import Engine

__all__ = ["ENGINES", "engine_of"]

ENGINES = MappingProxyType(
    {
        "hivemind": ("bareloop.swarm.hivemind_engine", "HivemindEngine", "HivemindOptions"),
        "torchft": ("bareloop.swarm.torchft_engine", "TorchFTEngine", "TorchFTOptions"),
    }
)
"""Name -> module, class of engine, class of options."""


def engine_of(name: str, run_id: str, target_batch: float, peers: Sequence[str], options: Any) -> Engine:
    """The engine `name`, not started.

    Raises:
        ValueError: no such engine; an address that it can't use; options that are not its own.
        ImportError: its package is not installed.
    """
    if name not in ENGINES:
        raise ValueError(f"engine={name!r}: must be one of {', '.join(map(repr, ENGINES))}")
    addresses = checked(name, peers)
    module, engine, kind = ENGINES[name]
    with needs(f"engine={name!r}", "swarm"):
        loaded = importlib.import_module(module)
    options_class = getattr(loaded, kind)
    if options is not None and not isinstance(options, options_class):
        raise ValueError(f"options={options!r}: engine={name!r} takes a {kind}, or None for its defaults")
    return getattr(loaded, engine)(run_id, target_batch, addresses, options_class() if options is None else options)
