"""Means and spreads of noisy repeats: heavy tails, autocorrelation, few values.

A shared machine gives step times with outliers (a neighbour wakes up) and with memory (the neighbour stays for a
while). The mean is therefore trimmed, its error comes from the winsorized values, and the error is inflated by what
the autocorrelation takes away from the number of values. Values are plain numbers in any unit: seconds or log ratios.

Sources:
    Trimmed mean, its standard error SSD_w / (h (h - 1)) and h - 1 degrees of freedom: Tukey and McLaughlin (1963),
    Sankhya A 25:331; Yuen (1974), Biometrika 61:165. Trimming by parts of a value: Andrews et al. (1972), Robust
    Estimates of Location, ch. 2.
    Variance of a mean of autocorrelated values: Bayley and Hammersley (1946), J. R. Stat. Soc. Suppl. 8:184.
    The lag-1 correlation of n values around their own mean is too low by about (1 + 4 rho) / n: Marriott and Pope
    (1954), Biometrika 41:390. With 3 to 12 values that series is useless, so the exact expectations are matched.
"""

import math
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

__all__ = [
    "TRIM_SHARE",
    "autocorrelation",
    "f_tail",
    "inflation",
    "kept",
    "lag1",
    "t_quantile",
    "trimmed_mean",
    "variance_factor",
    "winsorized",
]

TRIM_SHARE = 0.2
"""Share of the values that is taken off at each end."""
_RHO_GRID = tuple(step / 20 for step in range(15))
"""0 to 0.7. More can't be told from a drift with so few values; drift is the turn order's to cancel."""


def trimmed_mean(values: Sequence[float], share: float = TRIM_SHARE) -> float:
    """Mean of `values` without `share` of them at each end; a value may be taken off in part.

    With whole values only, 4 rounds at a share of 0.2 would not be trimmed at all.

    Raises:
        ValueError: no values, or a share outside 0 <= share < 0.5.
    """
    ordered = _ordered(values, share)
    cut = share * len(ordered)
    total = 0.0
    for index, value in enumerate(ordered):
        rank = min(index, len(ordered) - 1 - index)
        total += value * _weight(rank, cut, middle=2 * index + 1 == len(ordered))
    return total / (len(ordered) - 2 * cut)


def winsorized(values: Sequence[float], share: float = TRIM_SHARE) -> tuple[float, ...]:
    """`values` in their order, the outermost `share` at each end pulled in to the outermost values that are kept.

    Between two order statistics the limit is interpolated, so that it fits the parts that `trimmed_mean` takes off.

    Raises:
        ValueError: no values, or a share outside 0 <= share < 0.5.
    """
    ordered = _ordered(values, share)
    whole, part = divmod(share * len(ordered), 1.0)
    at, inner = int(whole), min(int(whole) + 1, len(ordered) - 1)
    low = ordered[at] + part * (ordered[inner] - ordered[at])
    high = ordered[-1 - at] + part * (ordered[-1 - inner] - ordered[-1 - at])
    if low > high:  # Fewer than two values are kept whole.
        low = high = (low + high) / 2
    return tuple(min(max(value, low), high) for value in values)


def kept(count: float, share: float = TRIM_SHARE) -> float:
    """How many of `count` values a trimmed mean keeps: h, whose h - 1 are its degrees of freedom."""
    return count * (1 - 2 * share)


def lag1(values: Sequence[float]) -> float:
    """Lag-1 autocorrelation of `values` around their mean, -1..1; 0 for fewer than 3 values or constant ones."""
    products, squares = _lag1_sums(values)
    return products / squares if squares > 0 else 0.0


def autocorrelation(series: Sequence[Sequence[float]]) -> float:
    """Lag-1 correlation, 0..0.7, of an AR(1) process seen in several short series that each have their own mean.

    The smallest rho of a grid whose expected lag-1 ratio, over series of these lengths, is not below the observed
    one. Negative correlation counts as none: it would make an interval narrower on weak evidence.
    """
    sums = [_lag1_sums(values) for values in series]
    products, squares = sum(pair[0] for pair in sums), sum(pair[1] for pair in sums)
    if squares <= 0:
        return 0.0
    lengths = [len(values) for values in series if len(values) >= 3]
    for rho in _RHO_GRID:
        expected = [_expected_sums(length, rho) for length in lengths]
        if sum(pair[0] for pair in expected) / sum(pair[1] for pair in expected) >= products / squares:
            return rho
    return _RHO_GRID[-1]


@cache
def inflation(rho: float, count: int) -> float:
    """Variance of the mean of `count` AR(1) values over that of as many independent ones (of the same variance)."""
    return 1 + 2 * sum((1 - lag / count) * rho**lag for lag in range(1, count))


def variance_factor(inflated: float, count: float) -> float:
    """What s^2 / count must be multiplied by to be the variance of a mean whose `inflation` is `inflated`.

    More than the inflation itself: autocorrelated values also lie closer to their own mean, so s^2 is too small.
    """
    if count <= 1:
        return inflated
    return inflated * (count - 1) / (count - inflated)


@cache
def t_quantile(dof: float, probability: float = 0.975) -> float:
    """Quantile of Student's t with `dof` degrees of freedom (any positive number); 97.5 % for a 95 % interval.

    Raises:
        ValueError: `dof` is not positive.
    """
    if not dof > 0:
        raise ValueError(f"dof must be more than 0, got {dof:g}: an interval needs at least two values")
    from scipy.stats import t

    return float(t.ppf(probability, dof))


def f_tail(ratio: float, dof_above: float, dof_below: float) -> float:
    """Probability that an F ratio with these degrees of freedom is above `ratio`."""
    from scipy.stats import f

    return float(f.sf(ratio, dof_above, dof_below))


def _ordered(values: Sequence[float], share: float) -> list[float]:
    if not values:
        raise ValueError("values must hold at least one number, got none")
    if not 0 <= share < 0.5:
        raise ValueError(f"share must be at least 0 and below 0.5, got {share:g}")
    return sorted(values)


def _weight(rank: int, cut: float, *, middle: bool) -> float:
    """Part of an order statistic that is kept, `rank` from the nearer end; the middle one is cut from both sides."""
    taken = min(max(cut - rank, 0.0), 1.0)
    return 1 - 2 * taken if middle else 1 - taken


def _lag1_sums(values: Sequence[float]) -> tuple[float, float]:
    """Sum of the products of neighbours and of the squares, around the mean; (0, 0) for fewer than 3 values.

    Two values around their mean are always a mirror image: they say nothing on correlation.
    """
    if len(values) < 3:
        return 0.0, 0.0
    mean = math.fsum(values) / len(values)
    around = [value - mean for value in values]
    products = math.fsum(first * second for first, second in pairwise(around))
    return products, math.fsum(value * value for value in around)


@cache
def _expected_sums(count: int, rho: float) -> tuple[float, float]:
    """Expectations of `_lag1_sums` for `count` values of an AR(1) process of variance 1."""
    row_means = [sum(rho ** abs(row - column) for column in range(count)) / count for row in range(count)]
    mean = sum(row_means) / count
    products = sum(rho - row_means[row] - row_means[row + 1] + mean for row in range(count - 1))
    return products, sum(1 - 2 * row_mean + mean for row_mean in row_means)
