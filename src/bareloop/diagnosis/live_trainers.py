"""The transformers.Trainer objects that are training in this process now."""

import gc
import sys
import weakref
from typing import Any

__all__ = ["live_trainers"]

_known: list["weakref.ref[Any]"] = []


def live_trainers() -> list[Any]:
    """Every Trainer that is the `self` of a function on the stack; when none is, every one that exists.

    An ablation is entered at an optimizer step, which a Trainer makes inside its own method, so the stack knows it.
    Looking through all objects takes a tenth of a second and is done once.
    """
    module = sys.modules.get("transformers.trainer")
    kind = getattr(module, "Trainer", None)
    if kind is None:
        return []
    found: list[Any] = []
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",):
            owner = frame.f_locals.get("self")
            if isinstance(owner, kind) and not any(owner is known for known in found):
                found.append(owner)
        frame = frame.f_back
    if found:
        return found
    if not any(reference() is not None for reference in _known):
        _known[:] = [weakref.ref(thing) for thing in gc.get_objects() if issubclass(type(thing), kind)]
    return [trainer for reference in _known if (trainer := reference()) is not None]
