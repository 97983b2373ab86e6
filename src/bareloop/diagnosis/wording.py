"""Numbers in sentences."""

import math

__all__ = ["counted", "milliseconds", "number", "place", "times"]


def number(value: float) -> str:
    """`value` for a reader: "64", "124,439,808", "61.25", "1e-05"."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) < 1e15 and value == round(value):
        return f"{round(value):,}"
    return f"{value:,.1f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def counted(value: float, noun: str) -> str:
    """`value` and its noun, e.g. "1 sample", "64 tokens"."""
    plural = noun if value == 1 else f"{noun}{'es' if noun.endswith('s') else 's'}"
    return f"{number(value)} {plural}"


def times(value: float) -> str:
    """How often: "once", "twice", "3 times"."""
    return "once" if value == 1 else "twice" if value == 2 else f"{number(value)} times"


def place(location: str) -> str:
    """file:line without the file's folder; the finding's `location` has it whole."""
    return location.replace("\\", "/").rpartition("/")[2]


def milliseconds(seconds: float) -> str:
    """A duration in seconds as "12.3 ms"."""
    return f"{seconds * 1e3:.3g} ms"
