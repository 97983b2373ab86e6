"""How long and how often a script is run."""

from dataclasses import dataclass

from bareloop.profiler.failures import UsageError

__all__ = ["FIRST_STEPS", "PILOT_STEPS", "STEPS_NEEDED", "WINDOW_STEPS", "Options"]

FIRST_STEPS = 6
"""Steps that a counting run observes number by number before its windows."""
WINDOW_STEPS = 3
"""Steps in each of its two counting windows."""
PILOT_STEPS = 4
"""Plain steps at its end, from which the timing launches are planned."""
STEPS_NEEDED = FIRST_STEPS + 2 * WINDOW_STEPS + PILOT_STEPS + 1
"""Optimizer steps that a script must make to be looked at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The measuring options of `explain` and `compare`; the command's flags are these fields."""

    steps: int | None = None
    """Timed optimizer steps in a turn; None chooses so that a turn lasts about 0.25 s."""
    warmup: int = 4
    """Optimizer steps of each launch that are never timed."""
    budget_s: float = 120.0
    """Seconds for everything: counting runs, timing launches, ablations."""
    launches: int | None = None
    """Fresh launches of each script for timing; None takes as many as fit the budget (at most 64)."""
    ablate: bool = True
    """False counts causes but does not try taking them away."""
    stdin: str | None = None
    """File that the script gets as standard input; None gives it an empty one."""
    seed: int = 0
    """Seed of the order of turns."""

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise UsageError(f"steps must be at least 1, got {self.steps}")
        if self.warmup < 1:
            raise UsageError(f"warmup must be at least 1 step, got {self.warmup}")
        if not self.budget_s > 0:
            raise UsageError(f"budget must be more than 0 seconds, got {self.budget_s:g}")
        if self.launches is not None and self.launches < 2:
            raise UsageError(f"launches must be at least 2 for an interval, got {self.launches}")
