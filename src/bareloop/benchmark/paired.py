"""Paired values from several launches to one difference with a 95 % interval.

A launch gives one value per round. Two launches of the very same script differ by up to 12 % where the rounds inside
each agree to 3 %, so the process is a random effect: scripts are compared over launches (`pool=False`) and more rounds
can't stand in for more launches. An ablation is switched on and off inside one process, where that effect cancels;
its rounds are pooled unless the launches disagree by more than their rounds do (`pool=True`).

Sources:
    Pooling rounds only if the F test of the launches has p > 0.25: Bancroft (1964), Biometrics 20:427.
    Standard errors of trimmed means and of autocorrelated values: see `bareloop.benchmark.noise`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from bareloop.benchmark.noise import (
    autocorrelation,
    f_tail,
    inflation,
    kept,
    t_quantile,
    trimmed_mean,
    variance_factor,
    winsorized,
)

__all__ = ["Difference", "as_ratio", "difference"]

_POOL_ABOVE_P = 0.25
_ROUNDS_OF_ONE_LAUNCH = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """An estimate with its 95 % interval, in the unit of the values: seconds, or the log of a ratio."""

    estimate: float
    low: float
    high: float
    launches: int
    """Launches that gave at least one round."""
    rounds: int
    """Rounds of all launches together."""
    dof: float
    """Degrees of freedom of the t interval."""
    method: str
    """"launches" (spread of the launches), "within launches" (they agree better than their rounds allow, so the rounds'
    spread counts), "pooled rounds", or "one launch" (says nothing on how launches differ)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Within:
    """Noise inside launches, all launches together."""

    round_variance: float
    """n times the variance of the trimmed mean of n independent rounds."""
    dof: float
    rho: float


def difference(launches: Sequence[Sequence[float]], *, pool: bool = False) -> Difference | None:
    """The mean over launches of `launches[launch][round]` with a 95 % interval; None when there are too few values.

    Args:
        launches: One value per round, in the order of time; rounds may differ in number. Empty launches are left out.
        pool: False takes the launch as the unit and needs 2 of them. True is for values whose two halves came from the
            same process; it needs 2 launches, or one of at least 4 rounds.

    Raises:
        ValueError: a value is infinite or not a number.
    """
    for number, values in enumerate(launches, start=1):
        if not all(math.isfinite(value) for value in values):
            raise ValueError(
                f"launches must hold finite numbers, got {list(values)} in launch {number}: leave that round out"
            )
    series = tuple(tuple(values) for values in launches if len(values) > 0)
    if len(series) >= 2:
        return (_pooled(series) if pool else None) or _over_launches(series)
    if pool and series and len(series[0]) >= _ROUNDS_OF_ONE_LAUNCH:
        return _from_rounds(series, rho=_within(series).rho, method="one launch")
    return None


def as_ratio(log_difference: Difference) -> tuple[float, float, float]:
    """(ratio, low, high) of a difference of logs."""
    return math.exp(log_difference.estimate), math.exp(log_difference.low), math.exp(log_difference.high)


def _over_launches(series: tuple[tuple[float, ...], ...]) -> Difference:
    """The launch is the unit: a t interval over the launches' trimmed means.

    Launches can't truly agree better than their own rounds allow. Where they seem to, that is luck, and the standard
    error is what the rounds give.
    """
    centres = [trimmed_mean(values) for values in series]
    between = variance(centres) / len(series)
    inside = _centre_variance(series, _within(series)) / len(series)
    return _interval(
        fmean(centres),
        max(between, inside),
        len(series) - 1,
        series,
        "launches" if between >= inside else "within launches",
    )


def _pooled(series: tuple[tuple[float, ...], ...]) -> Difference | None:
    """The round is the unit; None where the launches differ by more than their rounds explain, or these are too few."""
    within = _within(series)
    expected = _centre_variance(series, within)
    if within.dof < 1:
        return None
    spread = variance([trimmed_mean(values) for values in series])
    if spread > 0 and (expected <= 0 or f_tail(spread / expected, len(series) - 1, within.dof) <= _POOL_ABOVE_P):
        return None
    return _from_rounds(series, rho=within.rho, method="pooled rounds", at_least=spread / len(series))


def _from_rounds(
    series: tuple[tuple[float, ...], ...], *, rho: float, method: str, at_least: float = 0.0
) -> Difference:
    """A Tukey-McLaughlin interval over all rounds, their number reduced by the autocorrelation.

    The squared error is not below `at_least`, what the launches' spread gives: an F test passed is no proof that
    launches agree, and an effect of the launch as large as the rounds' noise passes it half of the time.
    """
    rounds = [value for values in series for value in values]
    count = len(rounds)
    inflated = sum(len(values) * inflation(rho, len(values)) for values in series) / count
    squared_error = _squares(winsorized(rounds)) / (kept(count) * (kept(count) - 1)) * variance_factor(inflated, count)
    dof = max(kept(count / inflated) - 1, len(series) - 1, 1.0)
    return _interval(trimmed_mean(rounds), max(squared_error, at_least), dof, series, method)


def _within(series: tuple[tuple[float, ...], ...]) -> _Within:
    """Noise of the rounds around their launch's trimmed mean.

    The residuals of all launches are winsorized together: 3 or 4 rounds of one launch are too few to tell an outlier.
    """
    centres = [trimmed_mean(values) for values in series]
    residuals = [value - centre for values, centre in zip(series, centres, strict=True) for value in values]
    count, free = len(residuals), len(residuals) - len(series)
    if free < 1 or kept(count) <= 1:
        return _Within(round_variance=0.0, dof=0.0, rho=0.0)
    tamed = winsorized(residuals)
    # Each launch's own centre was taken off: `free` of count - 1 directions are left.
    lost = (count - 1) / free
    round_variance = count * _squares(tamed) / (kept(count) * (kept(count) - 1)) * lost
    rho = autocorrelation(_regrouped(tamed, [len(values) for values in series]))
    inflated = sum(len(values) * inflation(rho, len(values)) for values in series) / count
    return _Within(round_variance=round_variance, dof=kept(free / inflated), rho=rho)


def _centre_variance(series: tuple[tuple[float, ...], ...], within: _Within) -> float:
    """Variance of a launch's trimmed mean that the noise of its rounds alone explains, averaged over launches."""
    return fmean(
        within.round_variance / len(values) * variance_factor(inflation(within.rho, len(values)), len(values))
        for values in series
    )


def _regrouped(values: Sequence[float], lengths: Sequence[int]) -> list[Sequence[float]]:
    groups: list[Sequence[float]] = []
    start = 0
    for length in lengths:
        groups.append(values[start : start + length])
        start += length
    return groups


def _squares(values: Sequence[float]) -> float:
    mean = fmean(values)
    return math.fsum((value - mean) ** 2 for value in values)


def _interval(
    estimate: float, squared_error: float, dof: float, series: tuple[tuple[float, ...], ...], method: str
) -> Difference:
    half = t_quantile(dof) * math.sqrt(squared_error)
    return Difference(
        estimate=estimate,
        low=estimate - half,
        high=estimate + half,
        launches=len(series),
        rounds=sum(len(values) for values in series),
        dof=dof,
        method=method,
    )
