"""Timing launches: scripts that wait for each other at their step boundaries and run turn and turn about.

Everything that is compared with anything runs in the same rounds: a and b, a again (the control), and each script
with one cause taken away. An ablation is entered at a step boundary of a running process and left at another one, so
both halves of its pair come from one process, in one launch, a second apart.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from bareloop.profiler.command import Command
from bareloop.profiler.failures import RunFailed, ScriptFailed
from bareloop.profiler.session import EndedEarly, Run, Session
from bareloop.trace import PHASES

__all__ = ["AblationBroke", "Launched", "Participant", "Timed", "TurnKind", "time_launch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Participant:
    """A script that takes turns."""

    command: Command
    warmup: int
    optimizers: int
    """Optimizers that step in it, as the counting run saw."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnKind:
    """One kind of turn in a round."""

    key: str
    participant: str
    steps: int
    discard: int
    """Steps at the start of the turn that are not timed."""
    ablation: Mapping[str, Any] | None = None
    """`{"causes": [{"module": ..., "data": ...}]}`: causes that are taken away in this turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """One turn's result."""

    s_per_step: float
    """Mean over the timed steps: what the script takes, what it does every tenth step included."""
    median_s_per_step: float
    """Median: blind to what few steps have, so to most of the machine's hiccups; for causes that act in every step."""
    steps: int
    phases: Mapping[str, float]
    """Phase -> seconds per step; scaled so that they add up to `s_per_step` where steps were left out."""
    probe_s: float
    clock: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """What one launch gave."""

    rounds: tuple[Mapping[str, Timed], ...]
    """Complete rounds, in order: key -> turn."""
    errors: Mapping[str, str] = field(default_factory=dict)
    """Key -> why that ablation could not be entered."""
    notes: tuple[str, ...] = ()


class AblationBroke(RunFailed):
    """The script failed in a turn with a cause taken away: the ablation's fault, not the script's."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def time_launch(
    participants: Mapping[str, Participant],
    kinds: Sequence[TurnKind],
    orders: Sequence[Sequence[str]],
    *,
    deadline_s: float,
    together: bool = True,
    stdin: str | None = None,
) -> Launched:
    """Starts every participant anew and runs the rounds.

    Args:
        kinds: The turns of a round.
        orders: Keys of the kinds, `[round][turn]`.
        deadline_s: On the monotonic clock.
        together: False runs one participant after the other, each with all its turns ("whole runs").

    Raises:
        AblationBroke: the script failed in a turn with an ablation.
        ScriptFailed, EndedEarly, RunFailed: see `Session.receive`.
    """
    by_key = {kind.key: kind for kind in kinds}
    groups = [list(participants)] if together else [[name] for name in participants]
    turns: list[dict[str, Timed]] = [{} for _ in orders]
    errors: dict[str, str] = {}
    notes: list[str] = []
    for group in groups:
        with Session(stdin=stdin) as session:
            runs = {name: _start(session, name, participants[name]) for name in group}
            session.start(list(runs.values()), deadline_s)
            for run in runs.values():
                session.advance(run, "ready", deadline_s)
            notes += _rounds(session, runs, by_key, orders, turns, errors, deadline_s)
            session.stop(list(runs.values()))
            notes += [
                f"{label} did not end by itself after its last step and had to be ended." for label in session.late
            ]
    wanted = set(by_key) - set(errors)
    complete = tuple(turn for turn in turns if wanted <= set(turn))
    return Launched(rounds=complete, errors=errors, notes=tuple(notes))


def _start(session: Session, name: str, participant: Participant) -> Run:
    settings = {"role": "time", "first_steps": participant.warmup, "optimizers": participant.optimizers}
    return session.launch(participant.command, name, settings)


def _rounds(
    session: Session,
    runs: Mapping[str, Run],
    by_key: Mapping[str, TurnKind],
    orders: Sequence[Sequence[str]],
    turns: list[dict[str, Timed]],
    errors: dict[str, str],
    deadline_s: float,
) -> list[str]:
    """Runs the rounds, filling `turns` and `errors`. A script that runs out of steps ends the launch, with a note."""
    for number, keys in enumerate(orders):
        for key in keys:
            kind = by_key[key]
            run = runs.get(kind.participant)
            if run is None or key in errors:
                continue
            try:
                message = _turn(session, run, kind, deadline_s)
            except EndedEarly:
                return [f"{run.command.label} ran out of steps in a timing launch: fewer rounds were timed."]
            if "error" in message:
                errors[key] = message["error"]
            else:
                turns[number][key] = _timed(message)
    return []


def _turn(session: Session, run: Run, kind: TurnKind, deadline_s: float) -> dict[str, Any]:
    run.send({"command": "turn", "steps": kind.steps, "discard": kind.discard, "ablation": kind.ablation})
    try:
        by_rank = session.receive([run], "turn", deadline_s, confirm=kind.ablation is None)[run.participant]
    except ScriptFailed as failure:
        if kind.ablation is None:
            raise
        last = failure.output.strip().splitlines()[-1:] or [str(failure)]
        raise AblationBroke(kind.key, last[0]) from failure
    # Ranks move in lockstep; where one could not enter the ablation, the turn counts for none.
    failed = [message for message in by_rank.values() if "error" in message]
    return failed[0] if failed else by_rank[min(by_rank)]


def _timed(message: Mapping[str, Any]) -> Timed:
    """A turn's message, in seconds per step. Steps with an evaluation or a checkpoint are left out, unless most are."""
    pairs = list(zip(message["nanoseconds"], message["excluded"], strict=True))
    plain = [value for value, excluded in pairs if not excluded]
    used = plain if len(plain) * 2 > len(pairs) else [value for value, _ in pairs]
    seconds = fmean(used) / 1e9
    total = sum(message["phases"].values()) or 1.0
    return Timed(
        s_per_step=seconds,
        median_s_per_step=median(used) / 1e9,
        steps=len(used),
        phases={phase: message["phases"].get(phase, 0.0) / total * seconds for phase in PHASES},
        probe_s=message["probe_ns"] / len(pairs) / 1e9,
        clock=message["clock"],
    )


def memory_allows(resident_bytes: Sequence[int]) -> bool:
    """Whether processes of these sizes fit into the free memory, with a fifth to spare. True where unknown."""
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        available = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return True  # not Linux: the run itself will tell
    return sum(resident_bytes) < 0.8 * available


def deadline(budget_s: float) -> float:
    """`budget_s` from now on the monotonic clock."""
    return time.monotonic() + budget_s
