"""Numbers of a record as a reader wants them: seconds become milliseconds here and nowhere else."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["count", "decimals", "interval", "milliseconds", "pair", "percent", "plain", "ratio", "span", "value"]


def decimals(seconds: float) -> int:
    """Decimals that leave about three digits of `seconds` in milliseconds."""
    size = abs(seconds) * 1e3
    return 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.1 else 3


def milliseconds(seconds: float, *, unit: str = " ms", digits: int | None = None) -> str:
    """Seconds as "7.40 ms"."""
    text = f"{seconds * 1e3:,.{decimals(seconds) if digits is None else digits}f}{unit}"
    return text[1:] if text.startswith("-") and not text.strip("-0.,ms ") else text


def interval(low: float | None, high: float | None, *, like: float | None = None, unit: str = "") -> str:
    """An interval of seconds as "[7.31, 7.52]" in milliseconds with the decimals of `like`; "" without one."""
    if low is None or high is None:
        return ""
    digits = decimals(like if like is not None else max(abs(low), abs(high)))
    return f"[{milliseconds(low, unit='', digits=digits)}, {milliseconds(high, unit='', digits=digits)}]{unit}"


def percent(share: float) -> str:
    """A share (0..1) as "7.0 %" or "46 %"."""
    return f"{share * 100:.{1 if abs(share) < 0.0995 else 0}f} %"


def ratio(number: float, *, digits: int = 2) -> str:
    """A ratio as "0.82x"."""
    return f"{number:.{digits}f}x"


def span(low: float | None, high: float | None, *, digits: int = 2) -> str:
    """An interval of ratios as "[0.79, 0.86]"; "" without one."""
    return "" if low is None or high is None else f"[{low:.{digits}f}, {high:.{digits}f}]"


def count(number: float, noun: str = "", plural: str = "") -> str:
    """A count as "1,807" or "2.5", with its noun in the right number: "1 micro-step", "2 micro-steps"."""
    text = f"{number:,.0f}" if abs(number - round(number)) < 5e-3 else f"{number:,.2f}".rstrip("0")
    return f"{text} {noun if text == '1' else plural or noun + 's'}" if noun else text


def value(thing: Any, *, digits: int = 6) -> str:
    """Any value of a quantity, short: hashes cut to 12 characters, long lists to their first four items."""
    if thing is None:
        return "none"
    if isinstance(thing, float):
        whole = math.isfinite(thing) and thing == round(thing) and abs(thing) < 1e15
        return count(thing) if whole else _float(thing, digits)
    if isinstance(thing, int) and not isinstance(thing, bool):
        return f"{thing:,}"
    if isinstance(thing, Mapping):
        return ", ".join(f"{key} {value(item, digits=digits)}" for key, item in thing.items())
    if isinstance(thing, Sequence) and not isinstance(thing, str):
        shown = ", ".join(value(item, digits=digits) for item in thing[:4])
        return shown + (f", ... ({len(thing)})" if len(thing) > 4 else "")
    text = plain(str(thing))
    is_hash = len(text) > 16 and all(character in "0123456789abcdef" for character in text)
    return text[:12] if is_hash else text


def pair(a: Any, b: Any) -> tuple[str, str]:
    """Two values with as many digits as it takes to see that they differ."""
    for digits in (6, 9, 12):
        shown = value(a, digits=digits), value(b, digits=digits)
        if shown[0] != shown[1]:
            return shown
    return value(a, digits=17), value(b, digits=17)


def plain(text: str) -> str:
    """`text` on one line, without control characters: it may come from a script's source."""
    return "".join(character if character.isprintable() else " " for character in text)


def _float(number: float, digits: int) -> str:
    return {math.inf: "infinity", -math.inf: "-infinity"}.get(number, f"{number:.{digits}g}")
