"""Every step writes a line, redraws a progress bar or hands values to a logger.

What it is
----------
At least 0.9 times per optimizer step: a `print`, `write` or `flush` of the script itself, a record through `logging`, a
redraw of a tqdm or rich bar, `SummaryWriter.add_scalar`, wandb's log, or `Trainer.log` of transformers. A plain
`for batch in tqdm(loader)` redraws ten times per second at most and is not reported unless steps take longer than that;
`set_postfix` redraws on every call and is.

Why it costs
------------
Formatting and system calls on the host between two steps, a terminal or a network file system that blocks, and often a
host read of the value to print (`loss_read_per_step`). One library went from 5.2 to 1.3 minutes by another progress bar
and to 55 s without (C44); a Lightning run from 90 to 53 s an epoch with fewer redraws and another change (C17).

How it is counted
-----------------
Calls per step of the functions named above, and of `print`, `write`, `flush` by line of the user's code.

How it is ablated
-----------------
At the lines found print, write and flush do nothing; the functions found do nothing (logging: records below ERROR);
for transformers the live Trainer's logging interval is set out of reach, as `logging_steps` would. What was not
printed meanwhile stays unprinted.

What to change
--------------
- transformers: `logging_steps=500`; `disable_tqdm=True` for the bar.
- lightning: `TQDMProgressBar(refresh_rate=50)`, `log_every_n_steps=50`.
- accelerate, plain loop: print every N steps, `set_postfix(..., refresh=False)`, `tqdm(..., mininterval=1)`.

Example
-------
Sick: `bar.set_postfix(lr=...)` and a `logger.info` in each step. Healthy: both every 100 steps.
`tests/scripts/logging_per_step_sick.py`, `logging_per_step_twin.py`.

Source
------
C44 https://github.com/ourownstory/neural_prophet/issues/949,
C17 https://github.com/Lightning-AI/pytorch-lightning/issues/7093
"""

import builtins
import io
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from bareloop.diagnosis.call_sites import CallSites, in_every_step, is_installed, same_file, sites_of, split_location
from bareloop.diagnosis.evidence import Cause, Evidence
from bareloop.diagnosis.live_trainers import live_trainers
from bareloop.diagnosis.settings import framework
from bareloop.diagnosis.substitution import NothingToReplace, places, replaced
from bareloop.diagnosis.wording import place
from bareloop.trace import Builtin, FunctionCount, Trace

__all__ = ["CAUSE"]

_BUILTINS = ("print", "write", "flush")
_BARS = re.compile(
    r"(^|\.)(tqdm\w*\.(refresh|display|write|set_(postfix|description)(_str)?)|Live\.refresh|Progress\.refresh)$"
)
_LOGS = re.compile(
    r"(^|\.)(Logger\.(_log|handle)|SummaryWriter\.add_\w+|\w*Trainer\.log|Run\.log|\w+Logger\.log_metrics"
    r"|Console\.print|Accelerator\.(print|log))$"
)
_TIMED = re.compile(r"(^|\.)tqdm\w*\.(refresh|display)$")
_ASKED = re.compile(r"(^|\.)tqdm\w*\.set_(postfix|description)(_str)?$")
_REDRAWS_EVERY_S = 0.1
"""tqdm's own interval. Steps are slow in a counting window, so its clock redraws there more often than it would."""
_LEVELS = re.compile(r"^Logger\.(debug|info|warning|error|critical|exception|log)$")
_TRAINER = "transformers/trainer.py"
_OUT_OF_REACH = 1 << 60
"""An interval in steps that no run completes."""


def _functions(trace: Trace) -> list[FunctionCount]:
    calls = trace.counts.functions if trace.counts is not None else ()
    found = [call for call in calls if in_every_step(call) and _is_logging(call.function)]
    asked = any(_ASKED.search(call.function) for call in found)
    if not asked and trace.pilot_s_per_step is not None and trace.pilot_s_per_step < _REDRAWS_EVERY_S:
        found = [call for call in found if not _TIMED.search(call.function)]
    return sorted(found, key=lambda call: -call.per_step)


def _is_logging(function: str) -> bool:
    return bool(_BARS.search(function) or _LOGS.search(function))


def _lines(trace: Trace) -> list[Builtin]:
    calls = trace.counts.builtins if trace.counts is not None else ()
    found = [call for call in calls if call.name in _BUILTINS and in_every_step(call) and call.location]
    return [call for call in found if not is_installed(split_location(call.location)[0])]


def detect(trace: Trace) -> Evidence | None:
    """Evidence when something is written or redrawn in every step."""
    functions, lines = _functions(trace), _lines(trace)
    if not functions and not lines:
        return None
    said = [f"{call.name} at {place(call.location)} {call.per_step:g}" for call in lines[:2]]
    said += [f"{call.function} {call.per_step:g}" for call in functions[:3]]
    return Evidence(
        text=f"Calls per step that write or redraw: {', '.join(said)}",
        counts={f"{call.function}_per_step": call.per_step for call in functions}
        | {f"{name}_per_step": sum(call.per_step for call in lines if call.name == name) for name in _names(lines)},
        location=lines[0].location if lines else _caller(trace),
        data={
            "functions": [[call.file, call.function] for call in functions],
            "lines": sites_of(call.location for call in lines),
            "names": _names(lines),
        },
    )


def _caller(trace: Trace) -> str | None:
    """The user's line that logs (through logging's info, warning, ... too); else the line of a package."""
    calls = trace.counts.functions if trace.counts is not None else ()
    entries = [call for call in calls if in_every_step(call) and call.caller]
    entries = [call for call in entries if _is_logging(call.function) or _LEVELS.search(call.function)]
    entries.sort(key=lambda call: is_installed(split_location(call.caller)[0]))
    return entries[0].caller if entries else None


def _names(lines: list[Builtin]) -> list[str]:
    return sorted({call.name for call in lines})


@contextmanager
def ablate(data: Mapping[str, Any]) -> Iterator[None]:
    """What `detect` found writes nothing.

    Raises:
        NothingToReplace: none of it is where it was looked for.
    """
    changes: list[tuple[Any, str, Any]] = []
    for file, function in data.get("functions", ()):
        if file.replace("\\", "/").endswith(_TRAINER):
            changes += [(trainer.state, "logging_steps", _OUT_OF_REACH) for trainer in live_trainers()]
        else:
            changes += [(owner, name, _silent(vars(owner)[name])) for owner, name in places(file, function)]
    lines = CallSites(data.get("lines", ()))
    if lines:
        names = set(data.get("names", _BUILTINS))
        if "print" in names:
            changes.append((builtins, "print", _silent_at(builtins.print, lines, None)))
        for stream in _streams(data["lines"]) if names - {"print"} else ():
            changes += [(stream, name, _silent_at(getattr(stream, name), lines, 0)) for name in ("write", "flush")]
    if not changes:
        raise NothingToReplace("the calls that write are in a form that can't be replaced from outside")
    with replaced(changes):
        yield


def _silent(function: Any) -> Callable[..., Any]:
    """Does nothing; a logging record of ERROR or worse goes its way."""
    if getattr(function, "__module__", "") != "logging":
        return lambda *args, **kwargs: None

    def log(logger: Any, level: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(level, "levelno", level) >= logging.ERROR:
            if function.__name__ == "_log":  # looks up the stack for the caller's file and line: not this frame
                kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
            return function(logger, level, *args, **kwargs)
        return None

    return log


def _silent_at(original: Callable[..., Any], lines: CallSites, result: Any) -> Callable[..., Any]:
    def write(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if lines.find(sys._getframe(1)) is None else result

    return write


def _streams(lines: list[list[Any]]) -> list[Any]:
    """Standard output and error, and the open text files among the variables of the functions on those lines."""
    found = [stream for stream in (sys.stdout, sys.stderr) if hasattr(stream, "__dict__")]
    frame = sys._getframe(1)
    while frame is not None:
        if any(same_file(file, frame.f_code.co_filename) for file, _ in lines):
            values = [*frame.f_locals.values(), *frame.f_globals.values()]
            found += [value for value in values if isinstance(value, io.TextIOBase) and hasattr(value, "__dict__")]
        frame = frame.f_back
    return list({id(stream): stream for stream in found}.values())


def setting(trace: Trace) -> str | None:
    """A setting exists only where a framework does the writing."""
    functions = _functions(trace)
    bars = any(_BARS.search(call.function) for call in functions)
    if framework(trace) == "transformers" and any(call.function == "Trainer.log" for call in functions):
        return "logging_steps=500"
    if framework(trace) == "transformers" and bars and not _lines(trace):
        return "disable_tqdm=True"
    if framework(trace) == "lightning" and functions and not _lines(trace):
        return "callbacks=[TQDMProgressBar(refresh_rate=50)]" if bars else "log_every_n_steps=50"
    return None


def fix(trace: Trace, evidence: Evidence) -> str:
    """The setting, or the pattern for a loop."""
    name = setting(trace)
    if name is not None:
        return f"Set {name}."
    if any(_BARS.search(function) for _, function in evidence.data["functions"]):
        return (
            "Update the bar's text every 100 steps, or with set_postfix(..., refresh=False), and print no more often."
        )
    return "Print or log every 100 steps in place of every step."


CAUSE = Cause(
    code="logging_per_step",
    title="Something is printed, logged or redrawn in every step",
    detect=detect,
    ablate=ablate,
    status="not_examined",
    setting=setting,
    fix=fix,
)
