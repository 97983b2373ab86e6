"""Gradients to averaged gradients: accumulation at native cost, alone or among peers.

    from bareloop import swarm

    with swarm.join("my-run", target_batch=4096, engine="hivemind", peers=["/ip4/..."]) as run:
        for step in steps(model, optimizer, batches, loss_fn, accumulate=run): ...

Importing this loads neither torch nor hivemind nor torchft: each name loads what it needs when it is first asked for.
The room imports neither `bareloop.trainer` nor `bareloop.data` nor the clinic's rooms.
"""

import importlib
from typing import TYPE_CHECKING, Any

from bareloop.extras import needs

if TYPE_CHECKING:
    from bareloop.swarm.accumulator import FlatAccumulator
    from bareloop.swarm.averager import native_averager
    from bareloop.swarm.door import Swarm, join
    from bareloop.swarm.hivemind_engine import HivemindOptions
    from bareloop.swarm.torchft_engine import TorchFTOptions

__all__ = ["FlatAccumulator", "HivemindOptions", "Swarm", "TorchFTOptions", "join", "native_averager"]

_LAZY = {
    "FlatAccumulator": "bareloop.swarm.accumulator",
    "HivemindOptions": "bareloop.swarm.hivemind_engine",
    "Swarm": "bareloop.swarm.door",
    "TorchFTOptions": "bareloop.swarm.torchft_engine",
    "join": "bareloop.swarm.door",
    "native_averager": "bareloop.swarm.averager",
}
"""Name -> module. None of the modules has the name of what it holds: importing it would put the module in its place."""


def __getattr__(name: str) -> Any:
    """Loads one of the room's names.

    Raises:
        AttributeError: no such name.
        ImportError: what it needs is not installed.
    """
    if name not in _LAZY:
        raise AttributeError(f"module 'bareloop.swarm' has no attribute {name!r}")
    with needs(f"bareloop.swarm.{name}", "swarm"):
        found = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
