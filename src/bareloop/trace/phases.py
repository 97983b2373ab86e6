"""Seconds per step, by phase, from a timing window."""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["PHASES", "Phases"]

PHASES = (
    "data wait",
    "transfer",
    "forward",
    "backward",
    "gradient reduction",
    "clip",
    "optimizer",
    "scheduler",
    "other",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Phases:
    """Mean seconds per step in each phase; `other` is what no probe covers, so the phases add up to `step_s`."""

    steps: int
    """Steps that were timed."""
    step_s: float
    seconds: Mapping[str, float]
    """Phase -> seconds per step. On CUDA, from events on the current stream; else the host's clock."""
    probe_s: float = 0.0
    """bareloop's own cost in these steps, seconds per step, measured by timing its hooks in the same process."""
    clock: str = "host"
    """"host" or "cuda events"."""
