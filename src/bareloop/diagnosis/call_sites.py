"""Lines of a script, and the question whether a call came from one of them.

Asked in the user's process on every call of a replaced function, so an answer is remembered per instruction: a
dictionary look-up per frame.
"""

import functools
import os
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any, Protocol

from bareloop.profiler.probes.sites import origin

__all__ = [
    "EVERY_STEP",
    "CallSites",
    "Instruction",
    "in_every_step",
    "is_installed",
    "same_file",
    "sites_of",
    "split_location",
]

EVERY_STEP = 0.9
"""Calls per step from which something counts as done in every step: 1, less what a window cut off at its edges."""


class Counted(Protocol):
    """A count of a trace: a host read, a function, a builtin."""

    @property
    def per_step(self) -> float: ...

    @property
    def in_every_step(self) -> bool: ...


def in_every_step(count: Counted) -> bool:
    """Whether it is done once a step at least, and not in bursts with steps between."""
    return count.per_step >= EVERY_STEP and count.in_every_step


Instruction = tuple[CodeType, int]
"""A place in code: the code object and the offset of the instruction that called."""

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_OPTIMIZERS = f"{os.sep}torch{os.sep}optim{os.sep}"


def sites_of(locations: Iterable[str]) -> list[list[Any]]:
    """[file, line] of each location, once and in order; those without a file ("" in a trace) are left out."""
    return [list(site) for site in sorted({split_location(location) for location in locations if location})]


def split_location(location: str) -> tuple[str, int]:
    """("dir/train.py", 12) of "dir/train.py:12".

    Raises:
        ValueError: no line number after the last colon.
    """
    file, colon, line = location.rpartition(":")
    if not colon or not line.isdigit():
        raise ValueError(f"location must be file:line, got {location!r}")
    return file, int(line)


@functools.lru_cache(maxsize=4096)
def same_file(one: str, other: str) -> bool:
    """True when two paths name one file; a relative path matches any absolute one that ends in it."""
    if one == other:
        return True
    shorter, longer = sorted((os.path.normpath(one), os.path.normpath(other)), key=len)
    if longer.endswith(os.sep + shorter):
        return True
    # Asked for every module of a process: the file system is asked only where the names allow it.
    return os.path.basename(one) == os.path.basename(other) and os.path.realpath(one) == os.path.realpath(other)


def is_installed(file: str) -> bool:
    """True for a file of an installed package or of Python itself, False for a file of the user.

    Asked where a trace is judged, which must not need torch, so it goes by the path alone.
    """
    parts = file.replace("\\", "/").split("/")
    if "site-packages" in parts or "dist-packages" in parts or file.startswith("<"):
        return True
    library = os.path.dirname(os.__file__)
    return file.startswith((library + os.sep, _OURS))


class CallSites:
    """A set of lines. Frames inside torch (but its optimizers) and inside bareloop are passed over on the way up,
    as the probe does that recorded the lines.
    """

    def __init__(self, sites: Iterable[tuple[str, int]]) -> None:
        self._sites = [(str(file), int(line)) for file, line in sites]
        self._lines: dict[CodeType, frozenset[int] | None] = {}
        self._answers: dict[Instruction, bool] = {}

    def __bool__(self) -> bool:
        return bool(self._sites)

    def find(self, frame: FrameType | None) -> Instruction | None:
        """The instruction in `frame` or above it that stands on one of the lines; None when the call is another's."""
        while frame is not None:
            code = frame.f_code
            lines = self._lines[code] if code in self._lines else self._classify(code)
            if lines is None:
                frame = frame.f_back
                continue
            if not lines:
                return None
            place = (code, frame.f_lasti)
            if place not in self._answers:
                self._answers[place] = frame.f_lineno in lines
            return place if self._answers[place] else None
        return None

    def _classify(self, code: CodeType) -> frozenset[int] | None:
        """Lines of interest in a code object; None for code to pass over."""
        file = code.co_filename
        if _OPTIMIZERS in file or origin(file) not in ("torch", "own", "wrapper"):
            lines = frozenset(line for name, line in self._sites if same_file(name, file))
        else:
            lines = None
        self._lines[code] = lines
        return lines
