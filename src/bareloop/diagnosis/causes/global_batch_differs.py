"""The two scripts feed a different number of samples into each optimizer step.

What it is
----------
The samples that one optimizer step consumes, summed over its micro-steps and over all processes, are more in this
script than in the other one. They are counted where they go into the model, not read from an argument: a batch size
is multiplied by accumulation, by processes, and under DataParallel by the number of devices.

Why it costs
------------
A step on twice the samples does twice the work. Iterations per second, and progress bars that show them, are then not
comparable, and a loss at step 1000 is the loss after another amount of data. Public tables have shown two devices as
"slower" that way (C02).

How it is counted
-----------------
Samples per step of all processes together. They count as different from 0.1 % on. Reported once, on the side with more.

How it is ablated
-----------------
Not: it is a difference of work, not a cost inside one script. Compare the time per sample instead.

What to change
--------------
- transformers: `per_device_train_batch_size` (x `gradient_accumulation_steps` x processes).
- lightning: `batch_size` of the DataLoader (x `accumulate_grad_batches` x `devices`).
- accelerate: `batch_size` of the DataLoader (x processes, unless `split_batches=True`).
- plain loop: `batch_size` of the DataLoader.

Example
-------
Sick: a loader with `batch_size=32` against one with `batch_size=16`. Healthy: the same batch size.
`tests/scripts/global_batch_differs_sick.py`, `global_batch_differs_twin.py`.

Source
------
C01 https://github.com/huggingface/transformers/issues/24345,
C02 https://github.com/huggingface/transformers/issues/9371
"""

import math

from bareloop.diagnosis.evidence import Cause, Evidence
from bareloop.diagnosis.settings import framework
from bareloop.trace import Trace

__all__ = ["CAUSE"]

_TOLERANCE = 1e-3
_SETTINGS = {
    "transformers": "per_device_train_batch_size",
    "lightning": "DataLoader(batch_size=...)",
    "accelerate": "DataLoader(batch_size=...)",
    "plain": "DataLoader(batch_size=...)",
}
_FACTORS = {
    "transformers": "per_device_train_batch_size x gradient_accumulation_steps x processes",
    "lightning": "the loader's batch_size x accumulate_grad_batches x devices",
    "accelerate": "the loader's batch_size x accumulation x processes (without split_batches=True)",
    "plain": "the loader's batch_size x accumulation x processes",
}


def contrast(trace: Trace, other: Trace) -> Evidence | None:
    """Evidence when this run has more samples per step than the other one."""
    more, less = trace.work.samples_per_step, other.work.samples_per_step
    if more is None or less is None or more <= less or math.isclose(more, less, rel_tol=_TOLERANCE):
        return None
    return Evidence(
        text=f"{more:g} samples per step against {less:g}: iterations are not comparable, time per sample is",
        counts={"samples_per_step": more, "other_samples_per_step": less},
    )


def fix(trace: Trace, evidence: Evidence) -> str:
    """Names the product that has to come out equal."""
    if trace.work.wrapper == "DataParallel":
        return "Start with torchrun, or set CUDA_VISIBLE_DEVICES=0: DataParallel multiplied the batch by its devices."
    target = evidence.counts["other_samples_per_step"]
    return f"Set {_FACTORS[framework(trace)]} to {target:g} samples, or judge both by time per sample."


CAUSE = Cause(
    code="global_batch_differs",
    title="More samples per step than the other script",
    contrast=contrast,
    no_ablation="A difference of work, not a cost inside one script: time per sample answers it.",
    setting=lambda trace: _SETTINGS[framework(trace)],
    fix=fix,
    changes_math=True,
)
