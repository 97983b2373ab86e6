"""Pairs of timings to a difference with an interval; knows nothing of training."""

from bareloop.benchmark.paired import Difference, as_ratio, difference
from bareloop.benchmark.schedule import Plan, order, plan
from bareloop.benchmark.verdict import NEGLIGIBLE_SHARE, resolution, saving_status, speed_verdict

__all__ = [
    "NEGLIGIBLE_SHARE",
    "Difference",
    "Plan",
    "as_ratio",
    "difference",
    "order",
    "plan",
    "resolution",
    "saving_status",
    "speed_verdict",
]
