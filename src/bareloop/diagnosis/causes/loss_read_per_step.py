"""A tensor's value is read into Python in every step, as `loss.item()` for a log line does.

What it is
----------
`.item()`, `float(loss)`, `.tolist()`, `f"{loss:.3f}"` or `if loss < best` outside the model's forward, at least 0.9
times per optimizer step from one line. The optimizer's own step counters, reads inside a `forward`, in the loader, and
those that GradScaler makes are not meant; tests for NaN are a cause of their own (`nan_check_per_step`).

Why it costs
------------
On a GPU the host runs ahead of the device. A read stops it until everything queued so far has been computed, and the
next step's kernels are launched late. On a CPU host there is no queue: a read costs about a microsecond, the finding is
then there but too small to see. Public counts: 348 reads a step, 1.18 times faster with 276 of them gone (C19). A timer
alone blames whichever call waits first (C20), so reads are counted by line.

How it is counted
-----------------
Host reads of kind "value" per step and line, from a window in which nothing is timed.

How it is ablated
-----------------
At the lines found, reading returns the number read there last time, without touching the device; one read in 64 is
real, so that a loop waiting for a value ends. Numbers printed meanwhile are old, and if the script *decides* by the
value (early stopping, a plateau scheduler) it decides by an old one: the math is untouched only where the value goes
to logs. Lines of the script stay as they are.

What to change
--------------
- plain loop, accelerate: keep the loss on the device (`total += loss.detach()`), call `.item()` when a line is logged.
- transformers: `logging_steps=500` when the reads are the Trainer's; `include_num_input_tokens_seen="no"` for its
  token count.
- lightning: `self.log(..., prog_bar=False)` and `log_every_n_steps`; the bar's `refresh_rate`.

Example
-------
Sick: `history.append(loss.item())` after each backward. Healthy: `total += loss.detach()`, read once in 100 steps.
`tests/scripts/loss_read_per_step_sick.py`, `loss_read_per_step_twin.py`.

Source
------
C19 https://github.com/NVIDIA/Megatron-LM/pull/7076,
C20 https://github.com/Lightning-AI/pytorch-lightning/issues/20995
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from bareloop.diagnosis.call_sites import in_every_step, sites_of
from bareloop.diagnosis.evidence import Cause, Evidence
from bareloop.diagnosis.settings import framework
from bareloop.diagnosis.stale_reads import stale_reads
from bareloop.diagnosis.wording import counted, place
from bareloop.trace import HostRead, Trace

__all__ = ["CAUSE"]

_READING = re.compile(r"\.item\(|\.tolist\(|\bfloat\(|\bint\(")
_ENGINE = re.compile(r"\.step\(|backward\(|sigterm")
"""Calls in which torch or a framework reads for its own sake: GradScaler, anomaly mode, Lightning's signal flag."""
_NOT_SCALAR = ("nonzero", "masked_select", "unique")


def _reads(trace: Trace) -> list[HostRead]:
    """The reads that count, most frequent first, the user's own before those of packages."""
    counts = trace.counts
    if counts is None:
        return []
    reads = [read for read in counts.host_reads if in_every_step(read) and _is_value(read)]
    return sorted(reads, key=lambda read: (not read.in_user_code, -read.per_step))


def _is_value(read: HostRead) -> bool:
    if read.kind != "value" or read.phase == "data wait" or any(name in read.op for name in _NOT_SCALAR):
        return False
    if read.function.split(".")[-1] == "forward":
        return False
    reading = bool(_READING.search(read.source))
    if read.in_user_code:
        return reading or not _ENGINE.search(read.source)
    return reading and read.phase != "forward" and not _ENGINE.search(read.source)


def detect(trace: Trace) -> Evidence | None:
    """Evidence when values are read in every step."""
    reads = _reads(trace)
    if not reads:
        return None
    total = sum(read.per_step for read in reads)
    places = ", ".join(f"{read.source or read.function} at {place(read.location)}" for read in reads[:3])
    more = f" and {len(reads) - 3} more" if len(reads) > 3 else ""
    return Evidence(
        text=f"{counted(total, 'value')} per step read into Python: {places}{more}",
        counts={"reads_per_step": total, "lines": len({read.location for read in reads})},
        location=reads[0].location or None,
        data={"sites": sites_of(read.location for read in reads)},
    )


@contextmanager
def ablate(data: Mapping[str, Any]) -> Iterator[None]:
    """Reads at `data["sites"]` ([file, line] pairs) return the value of last time."""
    with stale_reads(data["sites"]):
        yield


def setting(trace: Trace) -> str | None:
    """A setting exists only where the framework does the reading."""
    reads = _reads(trace)
    if not reads or any(read.in_user_code for read in reads):
        return None
    if framework(trace) == "transformers":
        tokens = all("input_tokens" in read.function for read in reads)
        return 'include_num_input_tokens_seen="no"' if tokens else "logging_steps=500"
    return "log_every_n_steps=50" if framework(trace) == "lightning" else None


def fix(trace: Trace, evidence: Evidence) -> str:
    """For the framework's own reads its setting, else the pattern for a loop."""
    name = setting(trace)
    if name is not None and framework(trace) == "lightning":
        return f"Set {name} and log without prog_bar=True, or give the progress bar a refresh_rate of 50."
    if name is not None:
        return f"Set {name}: the Trainer reads these values to log them."
    return "Keep the value on the device (total += loss.detach()) and call .item() only in the steps that log it."


CAUSE = Cause(
    code="loss_read_per_step",
    title="A value is read from the device in every step",
    detect=detect,
    ablate=ablate,
    status="not_examined",
    setting=setting,
    fix=fix,
)
