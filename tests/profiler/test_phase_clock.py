"""Time goes to the innermost phase, and all of it somewhere."""

import threading
import time

from bareloop.profiler.probes.phase_clock import OTHER, PhaseClock, phase_index
from bareloop.trace import PHASES


def test_time_goes_to_the_innermost_phase(monkeypatch) -> None:
    now = iter([0, 10, 13, 20, 27, 30, 31])
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(now))
    clock = PhaseClock()
    clock.push(phase_index("optimizer"))  # 10 ns of other
    clock.push(phase_index("forward"))  # 3 of optimizer
    clock.pop()  # 7 of forward
    clock.pop()  # 7 more of optimizer
    spent = dict(zip(PHASES, clock.resolve(), strict=True))
    assert {name: value for name, value in spent.items() if value} == {"other": 13.0, "optimizer": 10.0, "forward": 7.0}


def test_reset_forgets_but_keeps_open_phases() -> None:
    clock = PhaseClock()
    clock.push(phase_index("backward"))
    clock.reset()
    assert clock.name() == "backward"
    assert clock.nanoseconds == [0] * len(PHASES)
    assert clock.changes == 1


def test_other_threads_are_not_timed() -> None:
    clock = PhaseClock()
    thread = threading.Thread(target=lambda: clock.push(phase_index("clip")))
    thread.start()
    thread.join()
    assert clock.stack == [OTHER]


def test_a_pop_too_many_leaves_other() -> None:
    clock = PhaseClock()
    clock.pop()
    assert clock.name() == "other"
