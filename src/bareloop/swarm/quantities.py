"""Quantities as people write them on a command line: 124M, 100Mbit, 20ms, 20x8.

Strict: a unit that is missing or could be read two ways (100M, 12MB/s) is refused with the spelling that is meant.
"""

import re
from collections.abc import Callable
from typing import TypeVar

__all__ = ["bandwidths", "count", "rates", "seconds"]

_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "bps": 1.0, "kbps": 1e3, "mbps": 1e6, "gbps": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)")
_TIMES = re.compile(r"(.+?)[x*](\d+)")
_MOST_PEERS = 100_000

Value = TypeVar("Value")


def count(text: str, *, name: str) -> float:
    """ "124M" as 124e6.

    Raises:
        ValueError: not a number above 0 with K, M, B (or G) or T, or none of them.
    """
    return _quantity(text, _COUNTS, name, "a number above 0, such as 124M or 1.5B")


def seconds(text: str, *, name: str) -> float:
    """ "20ms" as 0.02; 0 needs no unit.

    Raises:
        ValueError: not a time with us, ms or s.
    """
    if text.strip() == "0":
        return 0.0
    return _quantity(text, _SECONDS, name, "a time with its unit, such as 20ms or 0.2s", zero=True)


def rates(text: str, *, name: str) -> tuple[float, ...]:
    """ "20x7,5" as seven times 20 and one 5: one value a peer.

    Raises:
        ValueError: no list of numbers above 0.
    """
    example = "one number a peer, such as 20,20,5 or 20x8"
    return _listed(text, lambda one: _quantity(one, _COUNTS, name, example), name, example)


def bandwidths(text: str, *, name: str) -> tuple[tuple[float, float], ...]:
    """ "200Mbit/20Mbit,1Gbitx3" as four pairs of bit/s: down, up.

    Raises:
        ValueError: no list of bandwidths.
    """
    example = "bits a second such as 100Mbit, or 200Mbit/20Mbit for down/up, one for all or one a peer"

    def pair(one: str) -> tuple[float, float]:
        down, slash, up = one.partition("/")
        parsed = _quantity(down, _BITS, name, example)
        return parsed, _quantity(up, _BITS, name, example) if slash else parsed

    return _listed(text, pair, name, example)


def _listed(text: str, parse: Callable[[str], Value], name: str, example: str) -> tuple[Value, ...]:
    found: list[Value] = []
    for item in text.split(","):
        repeated = _TIMES.fullmatch(item.strip())
        word, times = (repeated[1], int(repeated[2])) if repeated else (item, 1)
        if not 1 <= times <= _MOST_PEERS - len(found):
            raise ValueError(f"{name}={text!r}: must be {example}, for 1 to {_MOST_PEERS:,} peers")
        found += [parse(word)] * times
    return tuple(found)


def _quantity(text: str, units: dict[str, float], name: str, example: str, *, zero: bool = False) -> float:
    parts = _NUMBER.fullmatch(text.strip())
    unit = parts[2].lower() if parts else ""
    value = float(parts[1]) * units[unit] if parts and unit in units else -1.0
    if not (value > 0 or (zero and value == 0)) or value == float("inf"):
        raise ValueError(f"{name}={text.strip()!r}: must be {example}")
    return value
