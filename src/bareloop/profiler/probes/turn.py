"""One turn: a few steps timed by the light probe, with a cause taken away or not."""

import functools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from bareloop.profiler.probes.phase_clock import PhaseClock, phase_index
from bareloop.trace import PHASES

__all__ = ["Turn", "cost_of_a_phase_change_ns"]


class Turn:
    """Times `steps` optimizer steps after `discard` ones that are not timed.

    The steps fed by batches that loader workers prepared while the script waited are among the discarded.
    """

    def __init__(self, clock: PhaseClock, *, steps: int, discard: int) -> None:
        self.clock = clock
        self.discard = discard
        self.left = steps + discard
        self.durations: list[int] = []
        self.excluded: list[bool] = []
        self._mark = 0
        self._ablation: AbstractContextManager[Any] | None = None

    def start(self, ablation: Callable[[], AbstractContextManager[Any]] | None) -> str | None:
        """Begins at a step boundary. Returns what went wrong when the ablation could not be entered, else None."""
        if ablation is not None:
            try:
                self._ablation = ablation()
                self._ablation.__enter__()
            except Exception as error:
                self._ablation = None
                return f"{type(error).__name__}: {error}"
        self.clock.reset()
        self._mark = time.perf_counter_ns()
        return None

    def step_done(self, evaluated: bool) -> bool:
        """Notes the end of a step; True when the turn is over. `evaluated` marks a step that held an evaluation."""
        now = time.perf_counter_ns()
        self.left -= 1
        if self.discard:
            self.discard -= 1
            if not self.discard:
                self.clock.reset()
                now = time.perf_counter_ns()
        else:
            self.durations.append(now - self._mark)
            self.excluded.append(evaluated)
        self._mark = now
        return self.left == 0

    def finish(self) -> dict[str, Any]:
        """The turn as a message. Puts back what the ablation took away."""
        phases = self.clock.resolve()
        if self.clock.clock != "host":
            # The host runs ahead of the device; the events' span is the turn's length, shared evenly.
            self.durations = [int(sum(phases) / len(self.durations))] * len(self.durations)
        if self._ablation is not None:
            self._ablation.__exit__(None, None, None)
        return {
            "type": "turn",
            "nanoseconds": self.durations,
            "excluded": self.excluded,
            "phases": dict(zip(PHASES, phases, strict=True)),
            "clock": self.clock.clock,
            "probe_ns": self.clock.changes * cost_of_a_phase_change_ns(),
        }


@functools.cache
def cost_of_a_phase_change_ns() -> float:
    """What one entry or exit of a phase costs here, wrapper included, in nanoseconds."""
    from bareloop.profiler.probes.patches import _in_phase

    class _Silent:
        clock = PhaseClock()

    def bare() -> None: ...

    watched = _in_phase(bare, _Silent(), "clip")  # type: ignore[arg-type]
    repeats = 2000

    def took(function: Callable[[], None]) -> int:
        start = time.perf_counter_ns()
        for _ in range(repeats):
            function()
        return time.perf_counter_ns() - start

    best = min(took(watched) - took(bare) for _ in range(3))
    return max(0.0, best / repeats / 2)


assert phase_index("other") == len(PHASES) - 1
