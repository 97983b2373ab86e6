"""The two scripts plan a different number of passes over the data.

What it is
----------
This script intends to go over its data set more often than the other one: its step budget or its number of epochs is
larger. The classic: `max_steps` multiplied by the number of processes, though it counts optimizer steps and every
process takes a batch of its own in each of them.

Why it costs
------------
A plan of twice the passes takes twice the time at the same speed. No setting of the hot loop can win that back, and
remaining-time displays blame the framework for it.

How it is counted
-----------------
Planned passes = planned steps x samples per step of all processes / size of the data set. When passes are unknown on
one side or equal, planned steps are compared, if the samples per step are equal. From 0.1 % on they differ. Reported
once, on the side with more, with the exact factor and the place where the plan was seen.

How it is ablated
-----------------
Not: it is the length of the run, no cost of a step.

What to change
--------------
- transformers: `num_train_epochs`, or `max_steps` (optimizer steps, not multiplied by processes; it overrides epochs).
- lightning: `max_epochs` or `max_steps`.
- accelerate, plain loop: the range of the epoch loop, or the step at which it breaks.

Example
-------
Sick: 6 epochs over the loader against 3. Healthy: 3 and 3.
`tests/scripts/planned_passes_differ_sick.py`, `planned_passes_differ_twin.py`.

Source
------
C05 https://github.com/huggingface/transformers/issues/36297,
C52 https://github.com/caikit/caikit-nlp/pull/203 and https://github.com/caikit/caikit-nlp/pull/295
"""

import math

from bareloop.diagnosis.evidence import Cause, Evidence
from bareloop.diagnosis.settings import framework
from bareloop.trace import Trace

__all__ = ["CAUSE"]

_TOLERANCE = 1e-3
_SETTINGS = {"transformers": "num_train_epochs or max_steps", "lightning": "max_epochs or max_steps"}


def contrast(trace: Trace, other: Trace) -> Evidence | None:
    """Evidence when this run plans more passes (or, at equal samples per step, more steps) than the other one."""
    mine, theirs = trace.work, other.work
    for name, plural in (("passes", "passes over the data"), ("steps", "steps")):
        more, less = getattr(mine, f"planned_{name}"), getattr(theirs, f"planned_{name}")
        if more is None or less is None or math.isclose(more, less, rel_tol=_TOLERANCE):
            continue
        if more < less or less <= 0 or (name == "steps" and not _same_samples(trace, other)):
            return None
        factor = more / less
        seen = _seen(trace, name, more)
        return Evidence(
            text=f"{more:.6g} {plural} planned against {less:.6g}: {_factor(factor)} the work{seen}",
            counts={
                "factor": factor,
                "planned_passes": mine.planned_passes,
                "other_planned_passes": theirs.planned_passes,
                "planned_steps": mine.planned_steps,
                "other_planned_steps": theirs.planned_steps,
            },
        )
    return None


def _same_samples(trace: Trace, other: Trace) -> bool:
    mine, theirs = trace.work.samples_per_step, other.work.samples_per_step
    return mine is not None and theirs is not None and math.isclose(mine, theirs, rel_tol=_TOLERANCE)


def _factor(factor: float) -> str:
    nearest = round(factor)
    return f"exactly {nearest} times" if math.isclose(factor, nearest, rel_tol=1e-9) else f"{factor:.6g} times"


def _seen(trace: Trace, quantity: str, value: float) -> str:
    """Where the plan was seen: the source of this value, or else of the planned steps."""
    plans = [plan for plan in trace.work.plans if plan.quantity == quantity and plan.value == value]
    plans += [plan for plan in trace.work.plans if plan.quantity == "steps" and plan.value == trace.work.planned_steps]
    return f" ({plans[0].source})" if plans else ""


def fix(trace: Trace, evidence: Evidence) -> str:
    """Names the argument, and the trap of transformers."""
    factor = evidence.counts["factor"]
    if framework(trace) == "transformers":
        return (
            f"Divide max_steps (or num_train_epochs) by {factor:.6g}: max_steps counts optimizer steps, "
            "and each of them takes a batch on every process."
        )
    name = _SETTINGS.get(framework(trace), "the number of epochs or steps of the loop")
    return f"Divide {name} by {factor:.6g}."


CAUSE = Cause(
    code="planned_passes_differ",
    title="More passes over the data planned than in the other script",
    contrast=contrast,
    no_ablation="The length of the run, no cost of a step.",
    setting=lambda trace: _SETTINGS.get(framework(trace)),
    fix=fix,
    changes_math=True,
)
