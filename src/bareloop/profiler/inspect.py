"""Counting runs: each script once, all at the same time, since nothing is timed in them."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

from bareloop.profiler.command import Command
from bareloop.profiler.ledger import merged
from bareloop.profiler.options import FIRST_STEPS, PILOT_STEPS, WINDOW_STEPS, Options
from bareloop.profiler.session import Run, Session
from bareloop.trace import ProcessFacts, Trace, decode

__all__ = ["Inspected", "inspect"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspected:
    """A trace, and what the timing launches need to know beforehand."""

    command: Command
    trace: Trace
    optimizers: int
    """Optimizers that step in it."""
    notes: tuple[str, ...] = ()


def inspect(commands: Mapping[str, Command], options: Options, deadline_s: float) -> dict[str, Inspected]:
    """Runs each command once with the heavy probes; name -> what was seen.

    Args:
        deadline_s: On the monotonic clock.

    Raises:
        ScriptFailed, EndedEarly, RunFailed: see `Session.receive`.
    """
    settings = {"role": "inspect", "first_steps": FIRST_STEPS, "window_steps": WINDOW_STEPS}
    with Session(stdin=options.stdin) as session:
        started_s = time.monotonic()
        runs = {name: session.launch(command, name, settings) for name, command in commands.items()}
        session.start(list(runs.values()), deadline_s)
        startup_s = time.monotonic() - started_s
        messages = {name: session.advance(run, "facts", deadline_s) for name, run in runs.items()}
        pilot_s = {name: _pilot(session, run, deadline_s) for name, run in runs.items()}
        session.stop(list(runs.values()))
        notes = {name: _notes(run.others, session.late, run.command.label) for name, run in runs.items()}
    return {
        name: Inspected(
            command=commands[name],
            trace=replace(
                _trace(commands[name], by_rank),
                startup_s=startup_s,
                pilot_s_per_step=pilot_s[name],
            ),
            optimizers=max(message["optimizers"] for message in by_rank.values()),
            notes=notes[name],
        )
        for name, by_rank in messages.items()
    }


def _pilot(session: Session, run: Run, deadline_s: float) -> float:
    """Seconds per step of a few plain steps, while every other run waits at its step boundary."""
    run.send({"command": "turn", "steps": PILOT_STEPS, "discard": 1})
    by_rank = session.receive([run], "turn", deadline_s)[run.participant]
    return median(by_rank[min(by_rank)]["nanoseconds"]) / 1e9


def _trace(command: Command, by_rank: Mapping[int, Mapping[str, object]]) -> Trace:
    processes = tuple(decode(ProcessFacts, by_rank[rank]["facts"]) for rank in sorted(by_rank))
    return Trace(script=command.label, command=command.argv, processes=processes, work=merged(processes))


def _notes(others: int, late: list[str], label: str) -> tuple[str, ...]:
    notes = []
    if others:
        notes.append(
            f"{label} trains in {others + 1} processes that are not ranks of each other; the first one is reported."
        )
    if label in late:
        notes.append(f"{label} did not end by itself after its last step and had to be ended.")
    return tuple(notes)
