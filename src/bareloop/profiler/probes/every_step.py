"""Which counts of a window grew in each of its steps.

A script that logs every tenth step may do so within a window; a mean over the window then looks like "in every step".
"""

from collections import Counter
from collections.abc import Hashable
from itertools import pairwise
from typing import Any

__all__ = ["EveryStep"]


class EveryStep:
    """Watches counters from one step boundary to the next."""

    def __init__(self, *counters: "Counter[Any]") -> None:
        self._counters = counters
        self._seen: list[list[Counter[Any]]] = [[Counter(counter)] for counter in counters]

    def mark(self) -> None:
        """A step has ended."""
        for seen, counter in zip(self._seen, self._counters, strict=True):
            seen.append(Counter(counter))

    def grew(self, counter: "Counter[Any]", key: Hashable) -> bool:
        """Whether the count of `key` grew in every step that was marked; True when none was."""
        which = next(index for index, known in enumerate(self._counters) if known is counter)
        return all(later[key] > earlier[key] for earlier, later in pairwise(self._seen[which]))
