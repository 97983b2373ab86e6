"""The model runs inside torch.nn.DataParallel.

What it is
----------
One process drives several devices through `nn.DataParallel`. transformers.Trainer does this by itself when it is
started with plain `python` and sees more than one device, and multiplies the batch by the number of devices.

Why it costs
------------
Each forward copies all parameters to every device, scatters the batch and gathers the outputs on the first device,
under one Python interpreter lock. And the work changes silently: per-device batch x devices samples go into each step,
so a run has fewer and larger steps than its arguments say (C01).

How it is counted
-----------------
The class of the wrapper around the trained model, as seen at its forward. On a machine without devices DataParallel
passes straight through: the wrapper and the batch are then real, the copying is not.

How it is ablated
-----------------
Not: without the wrapper the batch of a step changes too, so times per step would compare unequal work.

What to change
--------------
- any framework: start with `torchrun --nproc-per-node N train.py` (or `accelerate launch`), or show the script one
  device with `CUDA_VISIBLE_DEVICES=0`.
- plain loop: DistributedDataParallel in place of DataParallel.

Example
-------
Sick: a Trainer that sees two devices and was started with `python`. Healthy: the same with one device.
`tests/scripts/data_parallel_wrapper_sick.py`, `data_parallel_wrapper_twin.py`.

Source
------
C01 https://github.com/huggingface/transformers/issues/24345
"""

from bareloop.diagnosis.evidence import Cause, Evidence
from bareloop.diagnosis.settings import framework
from bareloop.trace import Trace

__all__ = ["CAUSE"]

_NAME = "DataParallel"


def detect(trace: Trace) -> Evidence | None:
    """Evidence when the trained model of any process is wrapped in DataParallel."""
    if trace.work.wrapper != _NAME and all(process.work.wrapper != _NAME for process in trace.processes):
        return None
    samples = trace.work.samples_per_step
    text = "The model is wrapped in DataParallel"
    if samples is not None:
        text += f"; {samples:g} samples go into each step, the batch of all devices together"
    return Evidence(
        text=text, counts={"wrapper": _NAME, "samples_per_step": samples, "world_size": trace.work.world_size}
    )


def fix(trace: Trace, evidence: Evidence) -> str:
    """The two ways out."""
    silent = (
        " (Trainer chose it because plain python saw several devices)" if framework(trace) == "transformers" else ""
    )
    return (
        f"Start the script with torchrun --nproc-per-node N, or show it one device with CUDA_VISIBLE_DEVICES=0{silent}."
    )


CAUSE = Cause(
    code="data_parallel_wrapper",
    title="DataParallel: one process, several devices, a multiplied batch",
    detect=detect,
    no_ablation="Without the wrapper the batch of a step changes too: times per step would compare unequal work.",
    setting=lambda trace: "CUDA_VISIBLE_DEVICES=0, or torchrun --nproc-per-node N",
    fix=fix,
    changes_math=True,
)
