"""`Behaviour`: one thing that people rely on the Trainer for, and the check that shows it."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import transformers

__all__ = ["Behaviour", "in_area"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Behaviour:
    """A sentence about `transformers.Trainer` that holds for every trainer that replaces it.

    `check(trainer_class)` raises AssertionError (or whatever the trainer raised) where the sentence does not hold. It
    runs in an empty folder that is its own, after seeding, so that two classes can be compared bit by bit.
    """

    area: str
    check: Callable[[type[Any]], None]
    base: type = transformers.Trainer
    """The class that the sentence is about; its lean subclass has to keep it."""

    falls_back: str | None = None
    """Words of the reason for which lean declares that it runs the stock loop here; None where it must run lean."""

    @property
    def name(self) -> str:
        """Name of the check, which is the test's id."""
        return self.check.__name__

    @property
    def says(self) -> str:
        """The sentence: the check's docstring on one line."""
        text = inspect.getdoc(self.check)
        assert text is not None, f"{self.name} says nothing"
        return " ".join(text.split())


def in_area(
    area: str, *checks: Callable[[type[Any]], None], base: type = transformers.Trainer
) -> tuple[Behaviour, ...]:
    """One Behaviour of `area` for each of `checks`, in that order."""
    return tuple(Behaviour(area=area, check=check, base=base) for check in checks)
