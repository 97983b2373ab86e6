"""`bareloop compare`: equal work, equal math, equal speed, and what causes each difference."""

import time
from collections.abc import Callable
from math import exp, log
from statistics import fmean

import bareloop
from bareloop.benchmark import Difference, as_ratio, difference, resolution, speed_verdict
from bareloop.diagnosis.equal_math import equal_math
from bareloop.diagnosis.equal_work import equal_work, per_unit
from bareloop.diagnosis.evidence import Comparison, Control, SpeedVerdict
from bareloop.diagnosis.explain import phases
from bareloop.diagnosis.findings import combined, findings, suspects
from bareloop.diagnosis.measure import Measured, measure
from bareloop.diagnosis.ranking import unexplained
from bareloop.profiler.command import Command
from bareloop.profiler.inspect import inspect
from bareloop.profiler.options import Options
from bareloop.trace import Ledger, Trace

__all__ = ["compare", "equal_speed"]

PARTICIPANTS = {"a": "a", "b": "b", "control": "a"}


def compare(a: Command, b: Command, options: Options, *, progress: Callable[[str], None]) -> Comparison:
    """Runs both scripts, one counting run and several timing launches each, and compares them.

    Raises:
        ScriptFailed: one of them failed by itself.
        RunFailed: one made too few steps, or none in time.
    """
    started_s = time.monotonic()
    progress("counting runs")
    seen = inspect({"a": a, "b": b}, options, started_s + options.budget_s)
    traces = {name: one.trace for name, one in seen.items()}
    found = suspects(traces)
    measured = measure(seen, PARTICIPANTS, found, options, started_s, progress)
    all_findings = findings(found, traces, measured)
    together = combined(found, measured)
    speed = equal_speed(traces["a"], traces["b"], measured)
    return Comparison(
        a=traces["a"],
        b=traces["b"],
        work=equal_work(traces["a"], traces["b"]),
        math=equal_math(traces["a"], traces["b"]),
        speed=speed,
        findings=all_findings,
        unexplained=unexplained(speed, all_findings, together),
        combined=together,
        phases={"a": phases("a", measured), "b": phases("b", measured)},
        wall_s=time.monotonic() - started_s,
        budget_s=options.budget_s,
        notes=tuple(dict.fromkeys((*seen["a"].notes, *seen["b"].notes, *measured.notes))),
        version=bareloop.__version__,
    )


def equal_speed(a: Trace, b: Trace, measured: Measured) -> SpeedVerdict:
    """Time of b over time of a, per step, sample or token, with the control of the same turns."""
    per = per_unit(a, b)
    ratio = difference(measured.paired(lambda times: log(times["b"] / times["a"])))
    control = difference(measured.paired(lambda times: log(times["control"] / times["a"])))
    times = {name: _mean_s(name, measured) for name in ("a", "b")}
    if ratio is None or control is None:
        return SpeedVerdict(per=per, ratio=None, low=None, high=None, verdict="undecided", control=None)
    shifts = {unit: _shift(unit, a.work, b.work) for unit in ("step", "sample", "token")}
    shifted = _shifted(ratio, shifts[per] or 0.0)
    value, low, high = as_ratio(shifted)
    return SpeedVerdict(
        per=per,
        ratio=value,
        low=low,
        high=high,
        verdict=speed_verdict(shifted, control),
        control=Control(**dict(zip(("ratio", "low", "high"), as_ratio(control), strict=True))),
        launches=ratio.launches,
        rounds=ratio.rounds,
        steps_per_turn=measured.steps_per_turn,
        a_s_per_step=times["a"],
        b_s_per_step=times["b"],
        resolution=resolution(ratio, control),
        mode="turns" if measured.together else "whole runs",
        per_step_ratio=exp(ratio.estimate),
        per_sample_ratio=None if shifts["sample"] is None else exp(ratio.estimate + shifts["sample"]),
        per_token_ratio=None if shifts["token"] is None else exp(ratio.estimate + shifts["token"]),
    )


def _mean_s(name: str, measured: Measured) -> float:
    return fmean([value for launch in measured.paired(lambda times: times[name]) for value in launch])


def _shift(unit: str, a: Ledger, b: Ledger) -> float | None:
    """What to add to the log of the ratio per step so that it is per `unit`; None when the unit was not observed."""
    names = {"sample": ("samples_per_step",), "token": ("real_tokens_per_step", "tokens_per_step")}
    if unit == "step":
        return 0.0
    for name in names[unit]:
        of_a, of_b = getattr(a, name), getattr(b, name)
        if of_a and of_b:
            return log(of_a / of_b)
    return None


def _shifted(ratio: Difference, shift: float) -> Difference:
    return Difference(
        estimate=ratio.estimate + shift,
        low=ratio.low + shift,
        high=ratio.high + shift,
        launches=ratio.launches,
        rounds=ratio.rounds,
        dof=ratio.dof,
        method=ratio.method,
    )
