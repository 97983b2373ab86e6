"""Operators from profiler events, written by hand: nesting, other threads, events without an end."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bareloop.profiler.probes.operators import OperatorCounter


@dataclass
class Event:
    _kind: str
    _name: str = ""
    _handle: int = 0
    at_us: float = 0.0

    def kind(self) -> str:
        return self._kind

    def name(self) -> str:
        return self._name

    def handle(self) -> int:
        return self._handle

    def cpu_elapsed_us(self, later: "Event") -> float:
        return later.at_us - self.at_us


def operator(name: str, handle: int, *inside: Event, at_us: float = 0.0) -> list[Event]:
    return [Event("push", name, handle, at_us), *inside, Event("pop", "", handle, at_us)]


def mark(phase: str, at_us: float = 0.0) -> Event:
    return Event("push", f"bareloop.phase:{phase}", 0, at_us)


def counted(*threads: list[Event]) -> Mapping[str, int]:
    counter = OperatorCounter()
    counter._events = [list[Any](thread) for thread in threads]
    counts = counter.by_phase()
    assert counts is not None
    return counts


def test_operators_inside_operators_count() -> None:
    inside = [*operator("aten::empty", 2), *operator("aten::fill_", 3)]
    assert counted([mark("forward"), *operator("aten::ones", 1, *inside)]) == {"forward": 3}


def test_an_overload_that_only_calls_another_is_one_operator() -> None:
    assert counted([mark("p"), *operator("aten::mul", 1, *operator("aten::mul", 2))]) == {"p": 1}
    twice = [*operator("aten::mul", 2), *operator("aten::mul", 3)]
    assert counted([mark("p"), *operator("aten::mul", 1, *twice)]) == {"p": 3}


def test_what_is_no_operator_does_not_count() -> None:
    others = [*operator("autograd::engine", 1), *operator("aten::_version", 2), *operator("c10d::allreduce_", 3)]
    assert counted([mark("p"), *others]) == {"p": 0}


def test_an_autograd_thread_counts_in_the_phase_of_its_time() -> None:
    main = [mark("forward", 0.0), *operator("aten::mm", 1, at_us=1.0), mark("backward", 10.0), mark("optimizer", 20.0)]
    autograd = [*operator("aten::mm", 2, at_us=12.0), *operator("aten::mm", 3, at_us=19.0)]
    assert counted(main, autograd) == {"forward": 1, "backward": 2}
    assert counted(autograd, main) == {"forward": 1, "backward": 2}


def test_an_operator_whose_end_is_missing_does_not_take_in_the_rest() -> None:
    events = [mark("p"), *operator("aten::add", 1, Event("push", "aten::mul", 2)), *operator("aten::mul", 3)]
    assert counted([*events, Event("pop", "", 99)]) == {"p": 3}
