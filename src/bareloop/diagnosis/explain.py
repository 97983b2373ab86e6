"""`bareloop explain`: where does the time of one script go, and what causes it."""

import time
from collections.abc import Callable, Mapping
from math import log
from statistics import fmean

import bareloop
from bareloop.benchmark import as_ratio, difference, resolution
from bareloop.diagnosis.evidence import Control, Diagnosis, Timing
from bareloop.diagnosis.findings import combined, findings, suspects
from bareloop.diagnosis.measure import Measured, measure
from bareloop.profiler.command import Command
from bareloop.profiler.inspect import inspect
from bareloop.profiler.options import Options
from bareloop.trace import PHASES, Phases

__all__ = ["explain", "phases"]


def explain(command: Command, options: Options, *, progress: Callable[[str], None]) -> Diagnosis:
    """Runs the script a few times and says where its time goes.

    Raises:
        ScriptFailed: the script failed by itself.
        RunFailed: it made too few steps, or none in time.
    """
    started_s = time.monotonic()
    progress("counting run")
    seen = inspect({"a": command}, options, started_s + options.budget_s)["a"]
    found = suspects({"a": seen.trace})
    measured = measure({"a": seen}, {"a": "a"}, found, options, started_s, progress)
    return Diagnosis(
        script=command.label,
        trace=seen.trace,
        work=seen.trace.work,
        phases=phases("a", measured),
        counts=seen.trace.counts,
        timing=_timing(measured),
        findings=findings(found, {"a": seen.trace}, measured),
        combined=combined(found, measured),
        wall_s=time.monotonic() - started_s,
        budget_s=options.budget_s,
        notes=(*seen.notes, *measured.notes),
        version=bareloop.__version__,
    )


def _timing(measured: Measured) -> Timing | None:
    def middle(times: Mapping[str, float]) -> float:
        return fmean([times["a"], times["a:null"]])

    step = difference(measured.paired(middle))
    null = difference(measured.paired(lambda times: log(times["a:null"] / times["a"])), pool=True)
    if step is None:
        return None
    return Timing(
        s_per_step=step.estimate,
        low=step.low,
        high=step.high,
        launches=step.launches,
        rounds=step.rounds,
        steps_per_turn=measured.steps_per_turn,
        control=None if null is None else Control(**dict(zip(("ratio", "low", "high"), as_ratio(null), strict=True))),
        resolution=None if null is None else resolution(null),
    )


def phases(script: str, measured: Measured) -> Phases | None:
    """Seconds per phase over all plain turns of a script."""
    turns = [launch_round[script] for launch in measured.launches for launch_round in launch.rounds]
    if not turns:
        return None
    return Phases(
        steps=sum(turn.steps for turn in turns),
        step_s=fmean(turn.s_per_step for turn in turns),
        seconds={phase: fmean(turn.phases[phase] for turn in turns) for phase in PHASES},
        probe_s=fmean(turn.probe_s for turn in turns),
        clock=turns[0].clock,
    )
