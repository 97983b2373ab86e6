"""The steps that two runs both recorded, and what their means per step can tell.

Where the two saw the same samples, means are compared exactly. Where they did not (another shuffle), dynamic padding and random
masking make them differ by chance: then a difference counts only beyond four standard errors of the per-step values, and
a large one inside that noise is "unclear", not equal.
"""

import math
from collections import Counter
from collections.abc import Sequence

from bareloop.diagnosis.wording import counted, number
from bareloop.trace import StepFacts, Trace

__all__ = [
    "CHANCE_ERRORS",
    "EXACT",
    "Pairs",
    "RankSteps",
    "Series",
    "common_steps",
    "judge_means",
    "mean",
    "ratio_series",
    "relative_difference",
    "rows_of",
    "same_samples",
    "same_throughout",
    "series",
    "standard_error",
    "total",
]

EXACT = 1e-6
"""Relative: means of whole numbers over different step counts round differently."""
CHANCE_ERRORS = 4.0
"""Standard errors; with 3, two honest runs of two steps each would be called different one time in ten."""
_LARGE = 0.25
"""A relative difference above this is not waved through as chance."""

RankSteps = tuple[StepFacts, ...]
"""One step, as each rank saw it."""
Pairs = Sequence[tuple[RankSteps, RankSteps]]
"""Steps of two runs with the same index."""
Series = tuple[tuple[float, ...], tuple[float, ...]]
"""A quantity of each common step, for both sides."""


def common_steps(a: Trace, b: Trace) -> tuple[tuple[RankSteps, RankSteps], ...]:
    """Each step that every rank of both runs recorded, in order, as (ranks of a, ranks of b)."""
    by_index: list[dict[int, RankSteps]] = []
    for trace in (a, b):
        ranks = [{step.index: step for step in process.steps} for process in trace.processes]
        shared = set[int].intersection(*(set(rank) for rank in ranks)) if ranks else set[int]()
        by_index.append({index: tuple(rank[index] for rank in ranks) for index in shared})
    return tuple((by_index[0][index], by_index[1][index]) for index in sorted(set(by_index[0]) & set(by_index[1])))


def rows_of(ranks: RankSteps) -> Counter[str] | None:
    """The samples of a step of all ranks, with how often each occurs; None when a rank's samples were not seen."""
    if not all(step.rows for step in ranks):
        return None
    return Counter(row for step in ranks for row in step.rows)


def same_samples(left: RankSteps, right: RankSteps) -> bool | None:
    """Do two steps consume the same samples, in whatever order, micro-batch and rank? None when it can't be told."""
    left_ids, right_ids = [step.batch for step in left], [step.batch for step in right]
    seen = None not in left_ids and None not in right_ids
    if seen and left_ids == right_ids:
        return True
    left_rows, right_rows = rows_of(left), rows_of(right)
    if left_rows is not None and right_rows is not None:
        return left_rows == right_rows
    # Without rows, an identity per rank can only be held against another one of the same share of the step.
    return False if seen and len(left) == len(right) else None


def same_throughout(pairs: Pairs) -> bool:
    """True when there are common steps and all of them consume the same samples."""
    return bool(pairs) and all(same_samples(left, right) for left, right in pairs)


def total(ranks: RankSteps, name: str) -> float | None:
    """The field `name` of a step summed over ranks; None when a rank does not have it."""
    values = [getattr(step, name) for step in ranks]
    return None if None in values else float(sum(values))


def series(pairs: Pairs, name: str) -> Series:
    """The field `name`, summed over ranks, of each common step where both sides have it."""
    totals = [(total(left, name), total(right, name)) for left, right in pairs]
    kept = [(x, y) for x, y in totals if x is not None and y is not None]
    return tuple(x for x, _ in kept), tuple(y for _, y in kept)


def ratio_series(pairs: Pairs, top: str, bottom: str) -> Series:
    """`top` over `bottom` of each common step where both sides have both and `bottom` is not zero."""
    complete = [pair for pair in pairs if all(total(side, top) is not None and total(side, bottom) for side in pair)]
    tops, bottoms = series(complete, top), series(complete, bottom)
    first, second = (tuple(t / s for t, s in zip(tops[side], bottoms[side], strict=True)) for side in (0, 1))
    return first, second


def relative_difference(x: float, y: float) -> float:
    """|x - y| over the larger magnitude; 0 for two NaN, infinity when only one of the two is finite."""
    if x == y or (math.isnan(x) and math.isnan(y)):
        return 0.0
    if not (math.isfinite(x) and math.isfinite(y)):
        return math.inf
    return abs(x - y) / max(abs(x), abs(y))


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean of at least one value."""
    return sum(values) / len(values)


def standard_error(both: Series) -> float:
    """Standard error of the difference of two means of at least two steps each, steps taken as independent."""
    variance = 0.0
    for values in both:
        centre = mean(values)
        variance += sum((value - centre) ** 2 for value in values) / (len(values) - 1) / len(values)
    return math.sqrt(variance)


def judge_means(a: float, b: float, both: Series, same: bool, *, loose: float = 0.0) -> tuple[str, str]:
    """(outcome, note) for two means per step: "equal", "different" or "unclear".

    Args:
        a, b: the ledgers' means, which may run over more steps than the two have in common.
        both: the same counts of each common step.
        same: the common steps consume the same samples.
        loose: relative tolerance where samples differ and there are too few common steps to know the noise.
    """
    if relative_difference(a, b) <= EXACT:
        return "equal", ""
    # A ledger that takes ranks fed the same data as one is not the sum of its ranks: then only its own mean speaks.
    adds_up = all(
        values and relative_difference(mean(values), own) < _LARGE for values, own in zip(both, (a, b), strict=True)
    )
    if adds_up:
        first, second = mean(both[0]), mean(both[1])
        steps = len(both[0])
        if relative_difference(first, second) <= EXACT:
            return "equal", f"equal over the {counted(steps, 'step')} that both recorded"
        if same:
            return "different", ""
        if steps > 1:
            if abs(first - second) > CHANCE_ERRORS * standard_error(both):
                return "different", ""
            values = f"{number(first)} and {number(second)} over {steps} steps of other samples"
            if relative_difference(first, second) <= _LARGE:
                return "equal", f"{values} differ by no more than chance"
            return "unclear", f"{values}, too few to tell a difference from chance"
    if not same and relative_difference(a, b) <= loose:
        return "equal", f"{number(a)} and {number(b)}, within the {loose:.0%} that other samples can make"
    return "different", ""
