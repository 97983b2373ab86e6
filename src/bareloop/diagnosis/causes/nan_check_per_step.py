"""Every step asks the device whether the loss is NaN or infinite.

What it is
----------
`if torch.isnan(loss)`, `assert torch.isfinite(loss)`, `math.isnan(loss.item())`, or a framework's guard, at least 0.9
times per optimizer step. transformers.Trainer does it on every micro-step unless told otherwise: two reads, one for
isnan and one for isinf. Autograd's anomaly mode does it for each node of the graph.

Why it costs
------------
The answer is needed by Python, so the host waits until the device has computed the loss, and launches nothing
meanwhile. 74 of Megatron's 142 synchronising calls per iteration were such checks (C19); one Lightning user measured a
third of the time (C23). On a CPU host the read itself costs microseconds and this run will probably not resolve it.
The Trainer's filter also hides broken steps: their loss is replaced by an average in the log.

How it is counted
-----------------
Host reads of kind "nan_check" per step, and per micro-step. Reads that pick elements by a mask (nonzero) are not meant.

How it is ablated
-----------------
- The Trainer's filter: `args.logging_nan_inf_filter` is False on the live Trainer, which reads it at every micro-step.
- Other lines: there torch.isnan / isinf / isfinite and the methods answer "finite" without asking the device, and a
  number read for `math.isnan` is that of last time.
- Anomaly mode: off.
Results stay as long as the loss is finite.

What to change
--------------
- transformers: `logging_nan_inf_filter=False`.
- lightning: `Trainer(detect_anomaly=False)` (`terminate_on_nan=False` in version 1).
- plain loop, accelerate: test the value that is logged anyway, once per log line.

Example
-------
Sick: a Trainer with its defaults. Healthy: the same with `logging_nan_inf_filter=False`.
`tests/scripts/nan_check_per_step_sick.py`, `nan_check_per_step_twin.py`.

Source
------
C19 https://github.com/NVIDIA/Megatron-LM/pull/7076,
C23 https://github.com/Lightning-AI/pytorch-lightning/issues/3329 and
https://github.com/huggingface/transformers/pull/13896
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from bareloop.diagnosis.call_sites import EVERY_STEP, CallSites, sites_of
from bareloop.diagnosis.evidence import Cause, Evidence
from bareloop.diagnosis.known_check import KnownCheck
from bareloop.diagnosis.live_trainers import live_trainers
from bareloop.diagnosis.settings import framework, major
from bareloop.diagnosis.stale_reads import stale_reads
from bareloop.diagnosis.substitution import NothingToReplace, replaced
from bareloop.trace import HostRead, Trace

__all__ = ["CAUSE"]

_CHECKS = {"isnan": False, "isinf": False, "isfinite": True}
_TRAINER = "transformers/trainer.py"


def _reads(trace: Trace) -> list[HostRead]:
    counts = trace.counts
    if counts is None:
        return []
    reads = [read for read in counts.host_reads if _is_check(read) and read.in_every_step and "nonzero" not in read.op]
    return sorted(reads, key=lambda read: -read.per_step)


def _is_check(read: HostRead) -> bool:
    return read.kind == "nan_check" or _is_anomaly_mode(read)


def _is_anomaly_mode(read: HostRead) -> bool:
    """Anomaly mode reads inside backward, so its line is the one that called backward."""
    return read.kind in ("value", "nan_check") and "backward(" in read.source and "isnan" not in read.source


def _is_trainers(read: HostRead) -> bool:
    return not read.in_user_code and _TRAINER in read.location.replace("\\", "/")


def detect(trace: Trace) -> Evidence | None:
    """Evidence when all checks together make at least one read per step."""
    reads = _reads(trace)
    total = sum(read.per_step for read in reads)
    if trace.counts is None or total < EVERY_STEP:
        return None
    micro_steps = max(trace.counts.micro_steps_per_step, 1.0)
    others = [read for read in reads if not _is_trainers(read) and not _is_anomaly_mode(read)]
    return Evidence(
        text=f"{total / micro_steps:g} host reads per micro-step test for NaN or infinity ({total:g} per step)",
        counts={"reads_per_step": total, "reads_per_micro_step": total / micro_steps},
        location=reads[0].location or None,
        data={
            "trainer_filter": any(_is_trainers(read) for read in reads),
            "anomaly_mode": any(_is_anomaly_mode(read) for read in reads),
            "sites": sites_of(read.location for read in others),
        },
    )


@contextmanager
def ablate(data: Mapping[str, Any]) -> Iterator[None]:
    """Takes away the checks that `detect` found: the Trainer's filter, anomaly mode, and those at single lines.

    Raises:
        NothingToReplace: the Trainer's filter was counted, but no Trainer is to be found in this process.
    """
    with ExitStack() as stack:
        if data.get("trainer_filter"):
            trainers = live_trainers()
            if not trainers:
                raise NothingToReplace("no live transformers.Trainer found to turn its NaN filter off")
            stack.enter_context(replaced((trainer.args, "logging_nan_inf_filter", False) for trainer in trainers))
        if data.get("anomaly_mode"):
            stack.enter_context(_anomaly_mode_off())
        if data.get("sites"):
            stack.enter_context(_known_checks(data["sites"]))
            stack.enter_context(stale_reads(data["sites"]))
        yield


@contextmanager
def _known_checks(sites: Iterable[tuple[str, int]]) -> Iterator[None]:
    import torch

    lines = CallSites(sites)
    changes = [
        (owner, name, _known(getattr(owner, name), answer, lines))
        for owner in (torch, torch.Tensor)
        for name, answer in _CHECKS.items()
    ]
    with replaced(changes):
        yield


def _known(original: Callable[..., Any], answer: bool, lines: CallSites) -> Callable[..., Any]:
    def check(*args: Any, **kwargs: Any) -> Any:
        if lines.find(sys._getframe(1)) is None:
            return original(*args, **kwargs)
        tensor = args[0] if args else kwargs["input"]
        return KnownCheck(answer, tensor.numel(), lambda: original(*args, **kwargs))

    return check


@contextmanager
def _anomaly_mode_off() -> Iterator[None]:
    """Off inside, also for a script that turns it on anew in each step; after it, what the script asked for last."""
    import torch

    switch = torch.set_anomaly_enabled
    wanted = (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())

    def remember(mode: bool, check_nan: bool = True) -> None:
        nonlocal wanted
        wanted = (mode, check_nan)

    switch(False, wanted[1])
    try:
        with replaced([(torch, "set_anomaly_enabled", remember)]):
            yield
    finally:
        switch(*wanted)


def setting(trace: Trace) -> str | None:
    """A setting exists only where the framework does the check."""
    reads = _reads(trace)
    if any(_is_trainers(read) for read in reads):
        return "logging_nan_inf_filter=False"
    if any(_is_anomaly_mode(read) for read in reads):
        lightning = framework(trace) == "lightning"
        return "Trainer(detect_anomaly=False)" if lightning else "torch.autograd.set_detect_anomaly(False)"
    if framework(trace) == "lightning" and any(not read.in_user_code for read in reads):
        return "terminate_on_nan=False" if (major(trace, "lightning") or 2) < 2 else "Trainer(detect_anomaly=False)"
    return None


def fix(trace: Trace, evidence: Evidence) -> str:
    """The setting, or the pattern for a loop."""
    name = setting(trace)
    if name is not None:
        return f"Set {name}."
    return "Test for NaN only the value that is logged anyway, once per log line and not in every step."


CAUSE = Cause(
    code="nan_check_per_step",
    title="A NaN test reads from the device in every step",
    detect=detect,
    ablate=ablate,
    status="not_examined",
    setting=setting,
    fix=fix,
)
