"""The number of aten operators, those that operators call inside themselves included.

Counted by PyTorch's record functions, the events that its profilers are made of: exact, on this thread and on the
autograd threads that work for it. The older of its profilers is used because it collects them in silence (the
newer one writes lines to the script's stderr), without device activity, and beside no file.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["OperatorCounter"]

_MARK = "bareloop.phase:"
# Attribute reads that autograd makes through the dispatcher; torch's own tables leave them out too.
_NOT_OPERATORS = frozenset({"aten::is_leaf", "aten::output_nr", "aten::_version"})


class OperatorCounter:
    """Counts between `start()` and `stop()`; `mark(phase)` tells where a phase begins.

    There is one profiler per thread. Where the script runs its own, this counter stands back and says so in `note`.
    """

    def __init__(self) -> None:
        self.note = ""
        """Why there are no counts, "" when there are."""
        self._running = False
        self._enable_profiler: Any = None
        self._events: list[list[Any]] = []

    def start(self, phase: str) -> None:
        """Begins to count, in `phase`."""
        import torch

        autograd: Any = torch.autograd
        if not hasattr(autograd, "_enable_profiler_legacy"):
            self.note = f"torch {torch.__version__} has no silent profiler: operators inside operators were not counted"
        elif _profiler_enabled():
            self.note = "the script's own profiler was running: operators inside operators were not counted"
        elif torch._C._current_graph_task_id() != -1:
            self.note = "the window began inside backward, which puts back the profiler's state at its end"
        if self.note:
            return
        autograd._enable_profiler_legacy(_config())
        self._running = True
        self._stand_back_for_the_script()
        self.mark(phase)

    def mark(self, phase: str) -> None:
        """From here on operators belong to `phase`."""
        if self._running:
            from torch._C._profiler import _RecordFunctionFast

            with _RecordFunctionFast(_MARK + phase):
                pass

    def stop(self) -> None:
        """Ends counting; a second call does nothing."""
        import torch

        autograd: Any = torch.autograd
        if self._enable_profiler is not None:
            autograd.profiler._enable_profiler = self._enable_profiler
            self._enable_profiler = None
        if not self._running:
            return
        self._running = False
        if _profiler_enabled():
            self._events = autograd._disable_profiler_legacy()
        else:  # this thread's state was restored to what it was before start()
            self.note = "torch's profiler was gone before the window ended: operators were not counted"

    def by_phase(self) -> Mapping[str, int] | None:
        """Phase -> operators in the whole window; None when `note` says why."""
        if self.note:
            return None
        counts: Counter[str] = Counter()
        phase_at = _phase_at(self._events)
        for events in self._events:
            counts.update(_count(events, phase_at))
        return dict(counts)

    def _stand_back_for_the_script(self) -> None:
        """A profiler that the script starts inside the window would be refused while ours is on: ours gives way."""
        import torch

        module: Any = torch.autograd.profiler
        self._enable_profiler = module._enable_profiler

        def enable(*args: Any, **kwargs: Any) -> Any:
            self.stop()
            self.note = "the script started its own profiler: operators inside operators were not counted"
            return module._enable_profiler(*args, **kwargs)

        module._enable_profiler = enable


def _config() -> Any:
    from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

    # No shapes, memory, stacks, flops or modules: names alone.
    return ProfilerConfig(ProfilerState.CPU, False, False, False, False, False, _ExperimentalConfig())


def _profiler_enabled() -> bool:
    import torch

    bindings: Any = torch._C
    return bindings._autograd._profiler_enabled()


def _phase_at(threads: Sequence[Sequence[Any]]) -> Callable[[Any], str]:
    """The phase that an event of any thread falls in, by the clock: autograd's threads set no marks of their own."""
    marks = [
        event for events in threads for event in events if event.kind() == "push" and event.name().startswith(_MARK)
    ]
    if not marks:
        return lambda event: ""
    times = [marks[0].cpu_elapsed_us(mark) for mark in marks]
    names = [mark.name().removeprefix(_MARK) for mark in marks]
    return lambda event: names[max(bisect_right(times, marks[0].cpu_elapsed_us(event)) - 1, 0)]


def _count(events: Sequence[Any], phase_at: Callable[[Any], str]) -> Counter[str]:
    """Operators of one thread by phase."""
    counts: Counter[str] = Counter()
    here: str | None = None
    # Open operators: [handle, name, children, name of the last child, phase].
    stack: list[list[Any]] = []
    for event in events:
        kind, name = event.kind(), event.name()
        if kind == "push" and name.startswith(_MARK):
            here = name.removeprefix(_MARK)
        elif kind == "push":
            if stack:
                stack[-1][2] += 1
                stack[-1][3] = name
            phase = phase_at(event) if here is None else here
            stack.append([event.handle(), name, 0, "", phase])
            counts[phase] += _is_operator(name)
        elif kind == "pop":
            _close(stack, event.handle(), counts)
    return counts


def _close(stack: list[list[Any]], handle: int, counts: Counter[str]) -> None:
    """Ends the operator `handle`, and those inside it whose end was not recorded on this thread."""
    if not any(entry[0] == handle for entry in stack):
        return
    while stack:
        closed, name, children, child, phase = stack.pop()
        # One overload that only calls another of the same name (mul by a number) is one operator.
        if children == 1 and child == name:
            counts[phase] -= _is_operator(name)
        if closed == handle:
            return


def _is_operator(name: str) -> bool:
    return name.startswith("aten::") and name not in _NOT_OPERATORS
