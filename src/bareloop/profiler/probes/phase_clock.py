"""Which phase the training thread is in, and for how long.

The light probe: two clock reads per phase change. Phases nest (a clip inside an optimizer's closure); time goes to
the innermost one. On CUDA an event is recorded in place of the clock read and resolved when the turn is over, so the
host never waits inside a turn.
"""

import threading
import time
from typing import Any

from bareloop.trace import PHASES

__all__ = ["OTHER", "PhaseClock", "phase_index"]

OTHER = PHASES.index("other")


def phase_index(name: str) -> int:
    """Index of a phase in `PHASES`."""
    return PHASES.index(name)


class PhaseClock:
    """Accumulates nanoseconds per phase on the thread that created it."""

    __slots__ = ("_charges", "_event", "_mark", "changes", "nanoseconds", "stack", "thread")

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.stack = [OTHER]
        self.nanoseconds = [0] * len(PHASES)
        self.changes = 0
        self._mark = time.perf_counter_ns()
        self._event: Any = None
        self._charges: list[tuple[int, Any]] = []

    def push(self, phase: int) -> None:
        """Enters a phase. Calls from other threads (pin-memory, DataParallel replicas) are not ours to time."""
        if threading.get_ident() == self.thread:
            self._charge()
            self.stack.append(phase)

    def pop(self) -> None:
        """Leaves the innermost phase."""
        if threading.get_ident() == self.thread and len(self.stack) > 1:
            self._charge()
            self.stack.pop()

    def name(self) -> str:
        """Name of the phase that the training thread is in."""
        return PHASES[self.stack[-1]]

    def use_cuda(self) -> None:
        """From here on phases are bounded by CUDA events on the current stream."""
        import torch

        self._event = torch.cuda.Event

    @property
    def clock(self) -> str:
        """Name of the clock, as `trace.Phases.clock` wants it."""
        return "host" if self._event is None else "cuda events"

    def reset(self) -> None:
        """Forgets what was accumulated; the phases that are open stay open."""
        self.nanoseconds = [0] * len(PHASES)
        self.changes = 0
        self._charges.clear()
        self._charge()
        self.nanoseconds = [0] * len(PHASES)

    def _charge(self) -> None:
        self.changes += 1
        if self._event is None:
            now = time.perf_counter_ns()
            self.nanoseconds[self.stack[-1]] += now - self._mark
            self._mark = now
        else:
            event = self._event(enable_timing=True)
            event.record()
            self._charges.append((self.stack[-1], event))

    def resolve(self) -> list[float]:
        """Nanoseconds per phase since `reset`. On CUDA waits for the device: call it between turns only."""
        self._charge()
        if self._event is not None and self._charges:
            self._charges[-1][1].synchronize()
            before = self._charges[0][1]
            for phase, event in self._charges[1:]:
                self.nanoseconds[phase] += int(before.elapsed_time(event) * 1e6)
                before = event
            self._charges.clear()
        return [float(value) for value in self.nanoseconds]
