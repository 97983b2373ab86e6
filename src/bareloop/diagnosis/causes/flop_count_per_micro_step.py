"""The parameters are counted again in every step, to estimate floating-point operations or tokens.

What it is
----------
transformers.Trainer calls `floating_point_ops` after each micro-step; it walks all modules and all parameters to
arrive at a number that does not change. Hand-written loops do the same with
`6 * tokens * sum(p.numel() for p in model.parameters())` for a utilisation figure.

Why it costs
------------
Python per module and per parameter: 0.17 ms per micro-step for a 2-layer GPT-2, 1.2 ms for 24 layers. Nothing of it
touches a device, so it delays the launch of the next micro-step's kernels.

How it is counted
-----------------
Per step, at least 0.9 calls of a function named after such a count (floating_point_ops, num_parameters, flops,
estimate_tokens, count_parameters), or as many calls of `numel` from one line as the optimizer has parameter tensors
(half of them at least, for models with frozen parts counted by another filter).

How it is ablated
-----------------
The functions return the number they returned last time. On a line that sums `p.numel()` over `model.parameters()`,
`parameters()` yields one stand-in that has the total: the sum comes out the same. Other forms can't be taken away from
outside, and the finding is then not examined.

What to change
--------------
- transformers: no setting. `bareloop.Trainer` counts once; or override `floating_point_ops` in a subclass to return a number
  computed once (or 0).
- lightning, accelerate, plain loop: count the parameters once before the loop.

Example
-------
Sick: `flops += 6 * x.numel() * count_parameters(model)` in the batch loop. Healthy: `n = count_parameters(model)`
before it.
`tests/scripts/flop_count_per_micro_step_sick.py`, `flop_count_per_micro_step_twin.py`.

Source
------
No public thread with a measured cost was found; the counts and times above are this project's (transformers 5.24,
`Trainer._run_epoch` and `Trainer.floating_point_ops`). C41 is the same kind of cost:
https://github.com/unslothai/unsloth/pull/11238
"""

import linecache
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from bareloop.diagnosis.call_sites import CallSites, in_every_step, is_installed, sites_of, split_location
from bareloop.diagnosis.evidence import Cause, Evidence
from bareloop.diagnosis.settings import framework, versioned
from bareloop.diagnosis.substitution import NothingToReplace, places, replaced
from bareloop.diagnosis.wording import place, times
from bareloop.trace import Builtin, FunctionCount, Trace

__all__ = ["CAUSE"]

_COUNTING = re.compile(r"(^|_)(floating_point_ops|(num|count|n)_param(eter)?s|flops?|estimate_tokens)(_|$)")
_NUMEL = ("numel", "nelement")
_PARAMETER_SHARE = 0.5
_SUM = re.compile(
    r"(?P<p>\w+)\.(numel|nelement)\(\) for (\w+, ?)?(?P=p) in [\w.]+\.(named_)?parameters\(\)"
    r"( if (?P=p)\.requires_grad)?\s*\)"
)
_LAST: dict[Any, Any] = {}
"""Function or line -> what it gave last time; kept from turn to turn."""


def _functions(trace: Trace) -> list[FunctionCount]:
    calls = trace.counts.functions if trace.counts is not None else ()
    found = [call for call in calls if _COUNTING.search(call.function.split(".")[-1]) and in_every_step(call)]
    return sorted(found, key=lambda call: -call.per_step)


def _lines(trace: Trace) -> list[Builtin]:
    tensors = sum(group.tensors for optimizer in trace.first.work.optimizers for group in optimizer.groups)
    calls = trace.counts.builtins if trace.counts is not None else ()
    if not tensors:
        return []
    enough = max(2.0, _PARAMETER_SHARE * tensors)
    return [
        call
        for call in calls
        if call.name in _NUMEL and call.per_step >= enough and call.in_every_step and not _is_package(call)
    ]


def _is_package(call: Builtin) -> bool:
    return not call.location or is_installed(split_location(call.location)[0])


def detect(trace: Trace) -> Evidence | None:
    """Evidence when a count is made in every step."""
    functions, lines = _functions(trace), _lines(trace)
    if trace.counts is None or not (functions or lines):
        return None
    micro_steps = max(trace.counts.micro_steps_per_step, 1.0)
    said = [f"{call.function} is called {times(call.per_step / micro_steps)} per micro-step" for call in functions[:2]]
    said += [
        f"{place(call.location)} calls numel {times(call.per_step / micro_steps)} per micro-step" for call in lines[:2]
    ]
    first = functions[0] if functions else None
    location = (first.caller or f"{first.file}:{first.line}") if first else lines[0].location
    return Evidence(
        text=", ".join(said),
        counts={
            "calls_per_step": functions[0].per_step if functions else 0.0,
            "calls_per_micro_step": functions[0].per_step / micro_steps if functions else 0.0,
            "numel_calls_per_step": sum(call.per_step for call in lines),
        },
        location=location,
        data={
            "functions": [[call.file, call.function] for call in functions],
            "lines": sites_of(call.location for call in lines),
        },
    )


@contextmanager
def ablate(data: Mapping[str, Any]) -> Iterator[None]:
    """Counts return what they returned last time.

    Raises:
        NothingToReplace: neither a function nor a line has a form that can be taken away.
    """
    changes = [
        (owner, name, _remembering(vars(owner)[name]))
        for file, function in data.get("functions", ())
        for owner, name in places(file, function)
    ]
    sums = [(file, line) for file, line in data.get("lines", ()) if _SUM.search(linecache.getline(file, line))]
    if not changes and not sums:
        raise NothingToReplace("the count is made in a form that can't be replaced from outside (a nested function)")
    with ExitStack() as stack:
        stack.enter_context(replaced(changes))
        if sums:
            stack.enter_context(_summed_parameters(sums))
        yield


def _remembering(function: Any) -> Any:
    """The same kind of thing (function, property, static or class method), computed once."""
    if isinstance(function, property):
        return property(_remembering(function.fget))
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(_remembering(function.__func__))
    return _once(function)


def _once(function: Callable[..., Any]) -> Callable[..., Any]:
    def count(*args: Any, **kwargs: Any) -> Any:
        if function not in _LAST:
            _LAST[function] = function(*args, **kwargs)
        return _LAST[function]

    return count


class _Total:
    """One stand-in for many parameters: it has their number of elements."""

    def __init__(self, elements: int, requires_grad: bool) -> None:
        self.elements = elements
        self.requires_grad = requires_grad

    def numel(self) -> int:
        """Elements of all parameters it stands for."""
        return self.elements

    nelement = numel


@contextmanager
def _summed_parameters(sites: list[tuple[str, int]]) -> Iterator[None]:
    import torch

    lines = CallSites(sites)
    original, original_named = torch.nn.Module.parameters, torch.nn.Module.named_parameters

    def totals(module: Any, place: Any) -> list[_Total]:
        key = (place, id(module))
        if key not in _LAST:
            parameters = [p for _, p in original_named(module)]
            _LAST[key] = [
                _Total(sum(p.numel() for p in parameters if p.requires_grad is trained), trained)
                for trained in (True, False)
            ]
        return _LAST[key]

    def parameters(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        place = lines.find(sys._getframe(1))
        return original(self, *args, **kwargs) if place is None else iter(totals(self, place))

    def named_parameters(self: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        place = lines.find(sys._getframe(1))
        if place is None:
            return original_named(self, *args, **kwargs)
        return iter([("", total) for total in totals(self, place)])

    module = torch.nn.Module
    with replaced([(module, "parameters", parameters), (module, "named_parameters", named_parameters)]):
        yield


def fix(trace: Trace, evidence: Evidence) -> str:
    """The pattern for a loop; for transformers that no setting exists."""
    if framework(trace) == "transformers" and any("Trainer." in name for _, name in evidence.data["functions"]):
        return (
            f"Use bareloop.Trainer, or override floating_point_ops in a subclass to return a number computed once: "
            f"no setting of {versioned(trace)} exists."
        )
    return "Count the parameters once before the loop and keep the number."


CAUSE = Cause(
    code="flop_count_per_micro_step",
    title="Parameters are counted again in every step",
    detect=detect,
    ablate=ablate,
    status="not_examined",
    fix=fix,
)
