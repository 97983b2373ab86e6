"""The two scripts split their optimizer step into a different number of micro-steps.

What it is
----------
This script makes more forward-and-backward passes (micro-steps) before each optimizer step than the other one.

Why it costs
------------
At equal samples per step, more and smaller micro-batches keep the same work but pay the fixed price of a forward and a
backward (Python, kernel launches, in some loops a gradient reduction) that many times more. At equal micro-batches the
step holds more work, and iterations are not comparable. Where each micro-batch averages its own loss, the mean of means
is not the mean of the large batch (C07).

How it is counted
-----------------
Micro-steps per optimizer step of the first process, differing by more than 0.1 %. Reported once, on the side with more.

How it is ablated
-----------------
Not: another number of micro-steps needs other batches, so work and memory change with it.

What to change
--------------
- transformers: `gradient_accumulation_steps`.
- lightning: `accumulate_grad_batches`.
- accelerate: `Accelerator(gradient_accumulation_steps=...)`.
- plain loop: the number of `backward()` calls between two `optimizer.step()`.

Example
-------
Sick: batch 8 with 4 micro-steps a step against batch 32 with one. Healthy: both with one.
`tests/scripts/accumulation_differs_sick.py`, `accumulation_differs_twin.py`.

Source
------
C07 https://github.com/huggingface/trl/issues/2175
"""

import math

from bareloop.diagnosis.evidence import Cause, Evidence
from bareloop.diagnosis.settings import framework
from bareloop.trace import Trace

__all__ = ["CAUSE"]

_TOLERANCE = 1e-3
_SETTINGS = {
    "transformers": "gradient_accumulation_steps",
    "lightning": "accumulate_grad_batches",
    "accelerate": "Accelerator(gradient_accumulation_steps=...)",
}


def contrast(trace: Trace, other: Trace) -> Evidence | None:
    """Evidence when this run has more micro-steps per step than the other one."""
    more, less = trace.work.micro_steps_per_step, other.work.micro_steps_per_step
    if more is None or less is None or more <= less or math.isclose(more, less, rel_tol=_TOLERANCE):
        return None
    samples, other_samples = trace.work.samples_per_step, other.work.samples_per_step
    text = f"{more:g} micro-steps per step against {less:g}"
    if samples is not None and other_samples is not None:
        equal = math.isclose(samples, other_samples, rel_tol=_TOLERANCE)
        text += f", for {samples:g} samples a step" + (" in both" if equal else f" against {other_samples:g}")
    return Evidence(text=text, counts={"micro_steps_per_step": more, "other_micro_steps_per_step": less})


def fix(trace: Trace, evidence: Evidence) -> str:
    """Names the argument and the value of the other side."""
    target = evidence.counts["other_micro_steps_per_step"]
    name = _SETTINGS.get(framework(trace), "the number of backward() calls before optimizer.step()")
    return f"Set {name} to {target:g} and the batch size so that samples per step stay equal."


CAUSE = Cause(
    code="accumulation_differs",
    title="More micro-steps per step than the other script",
    contrast=contrast,
    no_ablation="Another number of micro-steps needs other batches, so the work would change with it.",
    setting=lambda trace: _SETTINGS.get(framework(trace)),
    fix=fix,
    changes_math=True,
)
