"""Python calls of a step, by function and by phase, and the aten operators below them.

Counted by the interpreter's profile function on the training thread; a profile function that the script had set is
called on from ours and put back. C calls are not in the number of Python calls. bareloop's own frames are not either,
but what a hook of ours calls in another library is: hooks must stay plain while a window is open.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from bareloop.profiler.probes.every_step import EveryStep
from bareloop.profiler.probes.lifetime import Lifetime
from bareloop.profiler.probes.operators import OperatorCounter
from bareloop.profiler.probes.sites import Site, caller_outside_torch, calling_place, function_name, origin, site_at
from bareloop.trace import Builtin, FunctionCount

if TYPE_CHECKING:
    import torch

__all__ = ["CallsFacts", "CallsWindow"]

_MOST_FREQUENT = 300
_WATCHED_FUNCTIONS = re.compile(
    r"(?:.*\.)?(?:num_parameters|floating_point_ops|\w*flops?\w*|refresh|display|set_postfix(?:_str)?|update_to"
    r"|add_scalars?|log|log_\w+|on_log)|Logger\.(?:_log|handle)",
    re.IGNORECASE,
)
_WATCHED_BUILTINS = frozenset({"print", "write", "flush", "numel", "tolist", "numpy"})


@dataclass(frozen=True, kw_only=True, slots=True)
class CallsFacts:
    """What a window of `CallsWindow` saw, per step."""

    python_calls_per_step: float | None
    """None when `notes` says why they were not counted."""
    python_calls_by_phase: Mapping[str, float]
    ops_per_step: float | None
    """aten operators, those that operators call inside themselves included; None when `notes` says why."""
    ops_by_phase: Mapping[str, float]
    modules: int
    """Modules in the model's tree, a shared one once; 0 without a model."""
    module_train_calls_per_step: float
    module_train_in_every_step: bool
    functions: tuple[FunctionCount, ...]
    """Most frequent first."""
    builtins: tuple[Builtin, ...]
    """Calls of print, write, flush, numel, tolist and numpy, most frequent first."""
    notes: tuple[str, ...] = ()
    """What could not be counted, in a sentence each."""


_ASKED_BY_OUR_WRAPPERS = frozenset({"is_compiling", "is_scripting"})
"""Python functions of torch that the wrapper around the outermost module calls, once per forward."""


class CallsWindow:
    """Counts calls between `start()` and `stop()`, both called in the training thread at step boundaries.

    `phase()` is asked at each call and return; frames that are on the stack already are seen as well.
    """

    def __init__(self, phase: Callable[[], str], model: "torch.nn.Module | None" = None) -> None:
        self._phase = phase
        self._model = model
        self._lifetime = Lifetime("CallsWindow", close=self._close)
        self._operators = OperatorCounter()
        self._previous: Any = None
        self._here = ""
        self._hook: Any = None
        self._note = ""
        self._failure = ""
        self._by_phase: Counter[str] = Counter()
        self._functions: Counter[CodeType] = Counter()
        # (function, code of its caller outside torch, instruction in it) -> calls
        self._callers: Counter[tuple[CodeType, CodeType, int]] = Counter()
        self._lines: dict[tuple[CodeType, int], str] = {}
        self._builtins: Counter[tuple[str, Site]] = Counter()
        self._every_step = EveryStep(self._functions, self._builtins)

    def start(self) -> None:
        """Begins to count in this thread.

        Raises:
            RuntimeError: the window was started before.
        """
        self._lifetime.start()
        self._here = self._phase()
        self._operators.start(self._here)
        self._previous = sys.getprofile()
        if self._previous is not None and not callable(self._previous):
            # cProfile and its like hook in below Python: replacing them would lose the script's own measurement.
            self._note = f"the script runs {type(self._previous).__name__}: Python calls were not counted"
            return
        self._hook = _out_of_dynamo(self._event)
        sys.setprofile(self._hook)

    def step_ended(self) -> None:
        """Marks a step boundary within the window."""
        self._every_step.mark()

    def stop(self) -> None:
        """Ends counting and puts back the script's own profile function.

        Raises:
            RuntimeError: the window is not open, or another thread started it.
        """
        self._lifetime.stop()

    def result(self, steps: int) -> CallsFacts:
        """The counts divided by the `steps` optimizer steps that ran in the window.

        Raises:
            ValueError: steps is below one.
            RuntimeError: the window is still open, or counting broke off; training went on undisturbed.
        """
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        self._lifetime.require_stopped()
        if self._failure:
            raise RuntimeError(f"Python calls were not counted to the end: {self._failure}")
        operators = self._operators.by_phase()
        return CallsFacts(
            python_calls_per_step=None if self._note else self._by_phase.total() / steps,
            python_calls_by_phase={} if self._note else _per_step(self._by_phase, steps),
            ops_per_step=None if operators is None else sum(operators.values()) / steps,
            ops_by_phase=_per_step(operators or {}, steps),
            modules=0 if self._model is None else sum(1 for _ in self._model.modules()),
            module_train_calls_per_step=self._functions[_module_train()] / steps,
            module_train_in_every_step=self._every_step.grew(self._functions, _module_train()),
            functions=() if self._note else self._function_counts(steps),
            builtins=tuple(
                Builtin(
                    name=name,
                    location=site.location,
                    function=site.function,
                    per_step=count / steps,
                    source=site.source,
                    in_every_step=self._every_step.grew(self._builtins, (name, site)),
                )
                for (name, site), count in self._builtins.most_common()
            ),
            notes=tuple(note for note in (self._note, self._operators.note) if note),
        )

    def _close(self) -> None:
        self._operators.stop()
        if self._hook is None:
            return
        if sys.getprofile() is self._hook:
            sys.setprofile(self._previous)
        else:
            self._note = self._note or "the script set a profile function of its own: Python calls were not counted"

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        try:
            self._count(frame, event, argument)
        except Exception as error:  # an exception here would surface in the user's step: it is raised by result()
            self._failure = self._failure or f"{type(error).__name__}: {error}"
        if self._previous is not None:
            self._previous(frame, event, argument)

    def _count(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call":
            name = getattr(argument, "__name__", "")
            # What torch's own Python asks of a tensor (numel before a backward) is no work of the script's.
            if name in _WATCHED_BUILTINS and origin(frame.f_code.co_filename) not in ("own", "torch"):
                self._builtins[name, site_at(caller_outside_torch(frame)[0])] += 1
            return
        if event not in ("call", "return"):
            return
        # Phases change inside Python functions, so each change lies before the next call or at a return.
        phase = self._phase()
        if phase != self._here:
            self._here = phase
            self._operators.mark(phase)
        if event == "call" and origin(frame.f_code.co_filename) != "own":
            self._called(frame)

    def _called(self, frame: FrameType) -> None:
        if frame.f_code.co_name in _ASKED_BY_OUR_WRAPPERS and _for_us(frame):
            return
        self._by_phase[self._here] += 1
        self._functions[frame.f_code] += 1
        caller = calling_place(frame)
        if caller is None:
            return
        place = caller.f_code, caller.f_lasti
        self._callers[frame.f_code, place[0], place[1]] += 1
        if place not in self._lines:
            self._lines[place] = f"{caller.f_code.co_filename}:{caller.f_lineno}"

    def _function_counts(self, steps: int) -> tuple[FunctionCount, ...]:
        callers: dict[CodeType, str] = {}
        for (code, caller, instruction), _ in self._callers.most_common():
            callers.setdefault(code, self._lines[caller, instruction])
        ranked = self._functions.most_common()
        kept = [code for code, count in ranked if count >= steps][:_MOST_FREQUENT]
        kept_set = set(kept)
        watched = [code for code, _ in ranked if code not in kept_set and _watched(code)]
        return tuple(
            FunctionCount(
                file=code.co_filename,
                line=code.co_firstlineno,
                function=function_name(code),
                per_step=self._functions[code] / steps,
                caller=callers.get(code, ""),
                in_every_step=self._every_step.grew(self._functions, code),
            )
            for code in [*kept, *watched]
        )


def _for_us(frame: FrameType) -> bool:
    """Whether a wrapper of ours asked, in one call or by way of another."""
    asking = frame.f_back
    while asking is not None and asking.f_code.co_name in _ASKED_BY_OUR_WRAPPERS:
        asking = asking.f_back
    return asking is not None and origin(asking.f_code.co_filename) == "own"


def _watched(code: CodeType) -> bool:
    return _WATCHED_FUNCTIONS.fullmatch(function_name(code)) is not None


def _per_step(counts: Mapping[str, int], steps: int) -> dict[str, float]:
    return {phase: count / steps for phase, count in counts.items() if count}


def _out_of_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, never compiled itself: torch.compile looks at every Python frame that runs in its regions."""
    dynamo = sys.modules.get("torch._dynamo")
    # A fresh function also without dynamo, so that it can be told apart by identity.
    return (lambda *event: function(*event)) if dynamo is None else dynamo.disable(function)


def _module_train() -> CodeType:
    import torch

    return torch.nn.Module.train.__code__
