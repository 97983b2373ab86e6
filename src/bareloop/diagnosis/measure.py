"""Timing launches of the scripts and of their ablations, planned into the budget.

A round holds one turn of each script, one more of each (the null ablation, or for a comparison a second process of a:
the control), one turn per cause that can be taken away, and one with all causes of a script away where it has several.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from bareloop.benchmark import Plan, order, plan
from bareloop.diagnosis.evidence import Cause, Evidence
from bareloop.profiler.failures import RunFailed
from bareloop.profiler.inspect import Inspected
from bareloop.profiler.options import Options
from bareloop.profiler.turns import AblationBroke, Launched, Participant, Timed, TurnKind, memory_allows, time_launch

__all__ = ["Measured", "Suspect", "all_key", "measure"]

Value = Callable[[Mapping[str, float]], float | None]
"""A function of a round's step times: key of a turn -> seconds per step."""
MOST_DISCARDED = 16
STOP_S = 1.0
"""What ending a launch takes, beside its start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspect:
    """A cause that was seen in a script and may be taken away in a turn."""

    script: str
    cause: Cause
    evidence: Evidence

    @property
    def key(self) -> str:
        """Key of its turns."""
        return f"{self.script}:{self.cause.code}"


def all_key(script: str) -> str:
    """Key of the turns with all causes of a script away."""
    return f"{script}:all"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """All timing launches."""

    launches: tuple[Launched, ...]
    steps_per_turn: int
    together: bool
    errors: Mapping[str, str] = field(default_factory=dict)
    """Key of an ablation -> why it was not examined."""
    ablated: bool = True
    """False when ablations were switched off."""
    notes: tuple[str, ...] = ()

    def paired(self, value: Value) -> list[list[float]]:
        """`value` of each complete round's mean step times, by launch; None leaves a round out."""
        return self._by_launch(value, lambda turn: turn.s_per_step)

    def paired_medians(self, value: Value) -> list[list[float]]:
        """The same of median step times: for causes that act in every step."""
        return self._by_launch(value, lambda turn: turn.median_s_per_step)

    def _by_launch(self, value: Value, time_of: Callable[[Timed], float]) -> list[list[float]]:
        rounds = [[{key: time_of(turn) for key, turn in r.items()} for r in launch.rounds] for launch in self.launches]
        return [[found for times in launch if (found := value(times)) is not None] for launch in rounds]


def measure(
    inspected: Mapping[str, Inspected],
    participants: Mapping[str, str],
    suspects: Sequence[Suspect],
    options: Options,
    started_s: float,
    progress: Callable[[str], None],
) -> Measured:
    """Times the scripts in fresh launches, turn and turn about.

    Args:
        inspected: Script ("a", "b") -> what its counting run saw.
        participants: Participant -> the script that it runs; {"a": "a", "b": "b", "control": "a"} for a comparison.
        suspects: Causes to take away, in turns of the participant named like their script.
        started_s: When the budget began, on the monotonic clock.

    Raises:
        ScriptFailed, RunFailed: as `time_launch`, when no launch gave a round.
    """
    run = _Launches(inspected, participants, suspects, options, started_s, progress)
    return run.all()


class _Launches:
    """The state of a measurement: what is left of the budget, which ablations broke."""

    def __init__(
        self,
        inspected: Mapping[str, Inspected],
        participants: Mapping[str, str],
        suspects: Sequence[Suspect],
        options: Options,
        started_s: float,
        progress: Callable[[str], None],
    ) -> None:
        self.inspected = inspected
        self.participants = participants
        self.suspects = [suspect for suspect in suspects if options.ablate and suspect.cause.ablate is not None]
        self.options = options
        self.started_s = started_s
        self.progress = progress
        self.errors: dict[str, str] = {}
        self.notes: list[str] = []
        sizes = [p.environment.resident_bytes for s in participants.values() for p in inspected[s].trace.processes]
        self.together = memory_allows(sizes)
        if not self.together:
            self.notes.append("The scripts do not fit in memory together: whole runs alternated instead of turns.")

    def all(self) -> Measured:
        plan = self._plan()
        done: list[Launched] = []
        while len(done) < plan.launches and self._time_for_another(plan, len(done)):
            self.progress(f"timing launch {len(done) + 1} of {plan.launches}")
            launched = self._launch(self._kinds(plan), plan, len(done))
            if launched is not None:
                done.append(launched)
                self._broke(launched.errors)
        if not any(launch.rounds for launch in done):
            raise RunFailed("no round of turns was completed within the budget; raise --budget or lower --steps.")
        self.notes += [note for launch in done for note in launch.notes]
        return Measured(
            launches=tuple(done),
            steps_per_turn=max(plan.steps.values()),
            together=self.together,
            errors=self.errors,
            ablated=self.options.ablate,
            notes=tuple(dict.fromkeys(self.notes)),
        )

    def _launch(self, kinds: Sequence[TurnKind], plan: Plan, number: int) -> Launched | None:
        """One launch; None when a broken ablation spoiled it. What is broken is not tried again."""
        orders = order([kind.key for kind in kinds], plan.rounds, self.options.seed + number)
        participants = {
            name: Participant(
                command=self.inspected[script].command,
                warmup=self.options.warmup,
                optimizers=self.inspected[script].optimizers,
            )
            for name, script in self.participants.items()
        }
        try:
            return time_launch(
                participants,
                kinds,
                orders,
                deadline_s=max(self._left_s(), 2 * plan.launch_s) + time.monotonic(),
                together=self.together,
                stdin=self.options.stdin,
            )
        except AblationBroke as broken:
            self._broke({broken.key: f"the script failed with this cause taken away: {broken}"})
            return None

    def _broke(self, errors: Mapping[str, str]) -> None:
        """Notes which ablations broke. One that fails alone fails among all too: the others get another try together."""
        self.errors.update(errors)
        for script in {suspect.script for suspect in self.suspects if suspect.key in errors}:
            self.errors.pop(all_key(script), None)

    def _left_s(self) -> float:
        return self.options.budget_s - (time.monotonic() - self.started_s)

    def _time_for_another(self, plan: Plan, done: int) -> bool:
        return done < 2 or self._left_s() > 0.8 * plan.launch_s

    def _plan(self) -> Plan:
        step_s = {
            name: self.inspected[script].trace.pilot_s_per_step or 0.01 for name, script in self.participants.items()
        }
        keys = self._turns()
        launches = self.options.launches
        found = plan(
            budget_s=self.options.budget_s,
            spent_s=time.monotonic() - self.started_s,
            startup_s=max(seen.trace.startup_s for seen in self.inspected.values()) + STOP_S,
            step_s=step_s,
            turns_per_round=[participant for _, participant in keys],
            steps=self.options.steps,
            discard={name: self._discard(script) for name, script in self.participants.items()},
            launches=launches,
            startup_parallel=self._crowding(),
        )
        if not found.fits:
            self.notes.append(
                f"The budget of {self.options.budget_s:g} s is too short for two launches: it was exceeded."
            )
        return self._within_the_scripts_steps(found, keys)

    def _turns(self) -> list[tuple[str, str]]:
        """(key, participant) of each turn in a round."""
        keys = [(name, name) for name in self.participants]
        ablated = {suspect.script for suspect in self.suspects}
        if "control" not in self.participants:
            ablated.add("a")
        keys += [(f"{script}:null", script) for script in sorted(ablated)]
        keys += [(suspect.key, suspect.script) for suspect in self.suspects]
        keys += [(all_key(script), script) for script in sorted(ablated) if len(self._together(script)) > 1]
        return [(key, script) for key, script in keys if key not in self.errors]

    def _together(self, script: str) -> list[Suspect]:
        """The causes of a script that can be taken away at once."""
        return [one for one in self.suspects if one.script == script and one.key not in self.errors]

    def _kinds(self, plan: Plan) -> list[TurnKind]:
        ablations = {suspect.key: _ablation([suspect]) for suspect in self.suspects}
        ablations |= {all_key(script): _ablation(self._together(script)) for script in self.participants}
        return [
            TurnKind(
                key=key,
                participant=participant,
                steps=plan.steps[participant],
                discard=self._discard(self.participants[participant]),
                ablation=ablations.get(key),
            )
            for key, participant in self._turns()
        ]

    def _discard(self, script: str) -> int:
        """The step that woke, and those fed by batches that workers prepared while the script waited."""
        trace = self.inspected[script].trace
        prefetched = trace.first.environment.prefetched_batches
        micro_steps = trace.work.micro_steps_per_step or 1.0
        return min(MOST_DISCARDED, 1 + ceil(prefetched / micro_steps))

    def _crowding(self) -> float:
        """How much longer a launch takes to start than the counting run did, since more processes share the cores."""
        cores = os.cpu_count() or 1
        counted = sum(len(seen.trace.processes) for seen in self.inspected.values())
        timed = sum(len(self.inspected[script].trace.processes) for script in self.participants.values())
        return max(1.0, timed / cores) / max(1.0, counted / cores)

    def _within_the_scripts_steps(self, found: Plan, keys: Sequence[tuple[str, str]]) -> Plan:
        """Fewer rounds, then shorter turns, where a script plans fewer steps than the rounds take."""
        rounds, steps = found.rounds, dict(found.steps)
        for name, script in self.participants.items():
            planned = self.inspected[script].trace.work.planned_steps
            if planned is None:
                continue
            turns = sum(participant == name for _, participant in keys)
            room = int(planned) - self.options.warmup - 1
            while rounds > 2 and rounds * turns * (steps[name] + self._discard(script)) > room:
                rounds -= 1
            while steps[name] > 1 and rounds * turns * (steps[name] + self._discard(script)) > room:
                steps[name] -= 1
        return replace(found, rounds=rounds, steps=steps)


def _ablation(suspects: Sequence[Suspect]) -> dict[str, Any]:
    """What the script's process is told: each cause is one file, named like its code."""
    return {
        "causes": [
            {"module": f"bareloop.diagnosis.causes.{one.cause.code}", "data": dict(one.evidence.data)}
            for one in suspects
        ]
    }
