"""From a Python frame to the place in a script that a reader recognises.

A count is only useful with the line that caused it. That line is the nearest frame which is neither PyTorch's
nor ours: a script's own, or one of a framework that drives it (transformers, lightning, tqdm count as places).
"""

import dis
import functools
import linecache
import os
import sys
import sysconfig
from dataclasses import dataclass
from itertools import islice
from types import CodeType, FrameType

__all__ = ["Site", "caller_outside_torch", "calling_place", "expression", "function_name", "origin", "site_at"]

_PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
# The loop's rooms are no part of the probes: a script that trains with bareloop.Trainer pays for them as for any library.
_THE_LOOP = tuple(_PACKAGE_ROOT + room + os.sep for room in ("data", "swarm", "trainer"))
_STDLIB_ROOTS = tuple(
    {sysconfig.get_path(name).rstrip(os.sep) + os.sep for name in ("stdlib", "platstdlib") if sysconfig.get_path(name)}
)
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
# Generated code without a line of its own, and the standard library's wrappers: the line that matters is above them.
_NO_PLACE = ("<frozen ", "<eval_with_key>", "<__array_function__", "<attrs generated")
_WRAPPERS = ("contextlib.py", "functools.py")
# Code that prints, logs or draws on behalf of the line that matters.
_ON_BEHALF = ("logging", "tqdm")
_TESTS = ("POP_JUMP", "JUMP_IF", "TO_BOOL")
_MAX_TEXT = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """A place in the code that was running."""

    location: str
    """file:line, "" when no Python frame outside torch was on the stack."""
    function: str
    """Qualified name of the function that holds the line (plain name before Python 3.11)."""
    source: str
    """Text of the running expression on one line, "" when the source is not at hand."""
    in_user_code: bool
    """False when the line belongs to an installed package or the standard library."""


@functools.cache
def origin(filename: str) -> str:
    """Whose code a file is: "own" (the probes), "torch", "wrapper" (no place of its own), "library" or "user"."""
    if filename.startswith(_PACKAGE_ROOT):
        return "library" if filename.startswith(_THE_LOOP) else "own"
    if filename.startswith(_torch_root()):
        return "torch"
    if filename.startswith(_NO_PLACE):
        return "wrapper"
    if any(part in filename for part in _INSTALLED):
        return "library"
    if filename.startswith(_STDLIB_ROOTS):
        return "wrapper" if os.path.basename(filename) in _WRAPPERS else "library"
    return "user"


@functools.cache
def _torch_root() -> str:
    import torch

    return os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


def caller_outside_torch(frame: FrameType | None) -> tuple[FrameType | None, list[FrameType]]:
    """The nearest frame that is a place, and torch's frames passed on the way to it, innermost first."""
    passed: list[FrameType] = []
    while frame is not None:
        whose = origin(frame.f_code.co_filename)
        if whose in ("user", "library"):
            return frame, passed
        if whose == "torch":
            passed.append(frame)
        frame = frame.f_back
    return None, passed


def calling_place(frame: FrameType) -> FrameType | None:
    """The nearest place that called this frame's function for a purpose of its own.

    Passes over frames of the same name (an override that calls `super().train()`) and over tqdm and logging, which
    work for the line that called them; where nothing else is left, the nearest place of any kind.
    """
    name = frame.f_code.co_name
    nearest = place = caller_outside_torch(frame.f_back)[0]
    while place is not None and (place.f_code.co_name == name or _on_behalf(place.f_code.co_filename)):
        place = caller_outside_torch(place.f_back)[0]
    return place or nearest


@functools.cache
def _on_behalf(filename: str) -> bool:
    return origin(filename) == "library" and os.path.basename(os.path.dirname(filename)) in _ON_BEHALF


def function_name(code: CodeType) -> str:
    """Qualified name (Class.method) where this Python knows it, else the plain name."""
    return getattr(code, "co_qualname", code.co_name)


def site_at(frame: FrameType | None) -> Site:
    """The place where `frame` is now."""
    if frame is None:
        return Site(location="", function="", source="", in_user_code=False)
    code = frame.f_code
    return Site(
        location=f"{code.co_filename}:{frame.f_lineno}",
        function=function_name(code),
        source=expression(frame),
        in_user_code=origin(code.co_filename) == "user",
    )


def expression(frame: FrameType) -> str:
    """Text of the expression that `frame` is evaluating, on one line and cut at 200 characters.

    The whole source line before Python 3.11 or under `-X no_debug_ranges`, which do not record columns.
    """
    code = frame.f_code
    first, last, start, end = _span(code, frame.f_lasti)
    if first is None or last is None or start is None or end is None:
        return _line(frame, frame.f_lineno).decode("utf-8", "replace").strip()[:_MAX_TEXT]
    # Columns are byte offsets in the UTF-8 source.
    rows = [_line(frame, number) for number in range(first, last + 1)]
    rows[-1] = rows[-1][:end]
    rows[0] = rows[0][start:]
    return " ".join(b" ".join(rows).decode("utf-8", "replace").split())[:_MAX_TEXT]


def _span(code: CodeType, instruction: int) -> tuple[int | None, int | None, int | None, int | None]:
    if sys.version_info < (3, 11) or instruction < 0:
        return None, None, None, None
    index = instruction // 2  # instructions are two bytes wide
    names = dis.opname
    raw = code.co_code
    if names[raw[2 * index]].startswith(_TESTS):
        # `if a or b:` tests a value in a jump whose position is the whole statement: what made the value comes before.
        index -= 1
        while index > 0 and names[raw[2 * index]].startswith(("CACHE", "COPY", *_TESTS)):
            index -= 1
    return next(islice(code.co_positions(), index, None), (None, None, None, None))


def _line(frame: FrameType, number: int) -> bytes:
    linecache.lazycache(frame.f_code.co_filename, frame.f_globals)
    return linecache.getline(frame.f_code.co_filename, number, frame.f_globals).rstrip("\n").encode("utf-8", "replace")
