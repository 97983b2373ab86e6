import math
import random
from itertools import pairwise
from statistics import fmean, variance

import pytest

from bareloop.benchmark.noise import (
    autocorrelation,
    f_tail,
    inflation,
    kept,
    lag1,
    t_quantile,
    trimmed_mean,
    variance_factor,
    winsorized,
)


def ar1(chance: random.Random, count: int, rho: float) -> list[float]:
    value = chance.gauss(0, 1)
    values = []
    for _ in range(count):
        values.append(value)
        value = rho * value + chance.gauss(0, math.sqrt(1 - rho * rho))
    return values


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([4.0, 1.0, 3.0, 100.0, 2.0], 0.2, 3.0),
        ([1.0, 2.0, 3.0, 100.0], 0.2, (0.2 * 1 + 2 + 3 + 0.2 * 100) / 2.4),
        ([1.0, 2.0, 9.0], 0.2, (0.4 * 1 + 2 + 0.4 * 9) / 1.8),
        ([1.0, 2.0, 9.0], 0.4, 2.0),
        ([7.0], 0.2, 7.0),
        ([1.0, 2.0, 9.0], 0.0, 4.0),
    ],
)
def test_trimmed_mean_takes_parts_of_values_off(values: list[float], share: float, expected: float) -> None:
    assert trimmed_mean(values, share) == pytest.approx(expected)


def test_trimmed_mean_of_equal_weights_is_the_library_of_record() -> None:
    from scipy.stats import trim_mean

    values = [random.Random(3).expovariate(1) for _ in range(20)]
    assert trimmed_mean(values, 0.2) == pytest.approx(float(trim_mean(values, 0.2)))


def test_trimmed_mean_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="at least one number"):
        trimmed_mean([])
    with pytest.raises(ValueError, match=r"below 0.5, got 0.5"):
        trimmed_mean([1.0], 0.5)


def test_winsorized_pulls_the_ends_in_and_keeps_the_order() -> None:
    assert winsorized([4.0, 1.0, 3.0, 100.0, 2.0]) == pytest.approx((4.0, 2.0, 3.0, 4.0, 2.0))
    # 4 values: 0.8 of the way from the outermost to the next.
    assert winsorized([0.0, 10.0, 20.0, 30.0]) == pytest.approx((8.0, 10.0, 20.0, 22.0))
    assert winsorized([1.0, 5.0], 0.4) == pytest.approx((3.0, 3.0), abs=1.0)
    assert winsorized([2.0]) == (2.0,)


def test_squared_error_of_a_trimmed_mean_is_its_variance() -> None:
    chance = random.Random(0)
    for count in (4, 8, 12):
        means, errors = [], []
        for _ in range(4000):
            values = [chance.gauss(0, 1) for _ in range(count)]
            means.append(trimmed_mean(values))
            tamed = winsorized(values)
            errors.append(variance(tamed) * (count - 1) / (kept(count) * (kept(count) - 1)))
        assert fmean(errors) / variance(means) == pytest.approx(1, abs=0.15)


def test_lag1_by_hand() -> None:
    assert lag1([1.0, 2.0, 3.0, 4.0]) == pytest.approx((0.75 - 0.25 + 0.75) / 5)
    assert lag1([1.0, -1.0, 1.0, -1.0]) == pytest.approx(-0.75)
    assert lag1([5.0, 5.0, 5.0]) == 0.0
    assert lag1([1.0, 2.0]) == 0.0


@pytest.mark.parametrize("rho", [0.0, 0.3, 0.6])
def test_autocorrelation_of_many_short_series_is_not_biased(rho: float) -> None:
    chance = random.Random(1)
    series = [ar1(chance, 6, rho) for _ in range(600)]
    assert autocorrelation(series) == pytest.approx(rho, abs=0.1)
    # What the plain estimate would say of series this short.
    assert fmean(lag1(values) for values in series) < rho - 0.1


def test_autocorrelation_without_information_is_none() -> None:
    assert autocorrelation([]) == 0.0
    assert autocorrelation([[1.0, 2.0], [3.0]]) == 0.0
    assert autocorrelation([[1.0, -1.0, 1.0, -1.0, 1.0]]) == 0.0


def test_inflation_by_hand() -> None:
    assert inflation(0.0, 4) == 1.0
    assert inflation(0.5, 4) == pytest.approx(1 + 2 * (0.75 * 0.5 + 0.5 * 0.25 + 0.25 * 0.125))
    assert variance_factor(1.0, 4) == 1.0
    assert variance_factor(2.0625, 4) == pytest.approx(2.0625 * 3 / (4 - 2.0625))


def test_variance_factor_makes_the_error_of_a_mean_right() -> None:
    chance = random.Random(2)
    samples = [ar1(chance, 5, 0.5) for _ in range(4000)]
    claimed = fmean(variance(values) for values in samples) / 5 * variance_factor(inflation(0.5, 5), 5)
    assert claimed == pytest.approx(variance([fmean(values) for values in samples]), rel=0.08)


def test_quantiles_are_the_tables() -> None:
    assert t_quantile(1) == pytest.approx(12.706, abs=1e-3)
    assert t_quantile(10) == pytest.approx(2.228, abs=1e-3)
    assert all(more < fewer for fewer, more in pairwise(t_quantile(dof) for dof in (0.7, 1.4, 3.3, 100)))
    assert f_tail(4.96, 1, 10) == pytest.approx(0.05, abs=1e-3)
    with pytest.raises(ValueError, match="dof must be more than 0"):
        t_quantile(0)
