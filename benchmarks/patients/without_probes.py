"""An "ablation" whose cause is bareloop itself: its wrappers are away inside, all but the hooks that end a step."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any


@contextmanager
def _ablate(data: Mapping[str, Any]) -> Iterator[None]:
    from bareloop.profiler.probes import agent, patches

    watching = agent._agent
    assert watching is not None
    wrapped = [(owner, name, owner.__dict__[name], before) for owner, name, before in patches._replaced]
    watching.roots.stop()
    for owner, name, _, before in reversed(wrapped):
        if before is patches._MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
    try:
        yield
    finally:
        for owner, name, wrapper, _ in wrapped:
            setattr(owner, name, wrapper)
        watching.roots.settle()


CAUSE = SimpleNamespace(ablate=_ablate)
