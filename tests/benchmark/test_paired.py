import math
import random
from collections.abc import Callable
from statistics import fmean, stdev

import pytest

from bareloop.benchmark.paired import Difference, as_ratio, difference

Rounds = Callable[..., list[list[float]]]


def covered(found: Difference | None, true: float) -> bool:
    assert found is not None
    return found.low <= true <= found.high


def test_launches_are_the_unit() -> None:
    found = difference([[0.10, 0.10, 0.10], [0.20, 0.20, 0.20], [0.30, 0.30, 0.30]])
    assert found is not None
    half = 4.302653 * 0.1 / math.sqrt(3)
    assert (found.estimate, found.low, found.high) == pytest.approx((0.2, 0.2 - half, 0.2 + half))
    assert (found.launches, found.rounds, found.dof, found.method) == (3, 9, 2, "launches")


def test_more_rounds_do_not_stand_in_for_launches() -> None:
    few = difference([[0.0] * 4, [0.1] * 4])
    many = difference([[0.0] * 40, [0.1] * 40])
    assert few is not None
    assert many is not None
    assert few.high == pytest.approx(many.high)


def test_launches_cannot_agree_better_than_their_rounds() -> None:
    found = difference([[-0.1, 0.1, -0.1, 0.1], [0.1, -0.1, 0.1, -0.1], [-0.1, 0.1, 0.1, -0.1]])
    assert found is not None
    assert found.method == "within launches"
    assert found.high - found.low > 0.1


def test_one_outlier_does_not_move_a_launch_far() -> None:
    calm = [[0.1, 0.11, 0.09, 0.1, 0.1], [0.12, 0.1, 0.11, 0.1, 0.1], [0.09, 0.1, 0.1, 0.11, 0.1]]
    struck = [calm[0], calm[1], [0.09, 0.1, 0.1, 0.11, 3.0]]
    before, after = difference(calm), difference(struck)
    assert before is not None
    assert after is not None
    assert after.estimate == pytest.approx(before.estimate, abs=0.005)


@pytest.mark.parametrize(
    ("launches", "pool"),
    [([], False), ([[0.1, 0.2, 0.3, 0.4]], False), ([[0.1, 0.2], []], False), ([[0.1, 0.2, 0.3]], True), ([[]], True)],
)
def test_too_few_values_give_no_difference(launches: list[list[float]], pool: bool) -> None:
    assert difference(launches, pool=pool) is None


def test_a_value_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="launch 2"):
        difference([[0.1], [math.nan]])


def test_one_launch_may_do_for_an_ablation_and_says_so() -> None:
    found = difference([[1.0, 1.1, 0.9, 1.0, 1.05, 0.95]], pool=True)
    assert found is not None
    assert (found.method, found.launches, found.rounds) == ("one launch", 1, 6)
    assert 0.9 < found.low < 1.0 < found.high < 1.1


def test_rounds_are_pooled_only_while_launches_agree() -> None:
    alike = [[1.0, 1.1, 0.9, 1.2, 0.8, 1.0], [1.2, 0.8, 1.0, 1.1, 1.0, 0.9], [0.9, 1.0, 1.15, 0.8, 1.0, 1.2]]
    apart = [[value + 2 * number for value in values] for number, values in enumerate(alike)]
    pooled, split = difference(alike, pool=True), difference(apart, pool=True)
    assert pooled is not None
    assert split is not None
    assert (pooled.method, split.method, split.dof) == ("pooled rounds", "launches", 2)
    assert split == difference(apart)
    over_launches = difference(alike)
    assert over_launches is not None
    assert pooled.dof > over_launches.dof


def test_constant_values_have_no_width() -> None:
    for pool in (False, True):
        found = difference([[2.0] * 4, [2.0] * 4], pool=pool)
        assert found is not None
        assert (found.low, found.high) == pytest.approx((2.0, 2.0))


def test_single_rounds_are_launches() -> None:
    found = difference([[0.1], [0.2], [0.3]], pool=True)
    assert found is not None
    assert (found.method, found.estimate) == ("launches", pytest.approx(0.2))


@pytest.mark.parametrize("pool", [False, True])
def test_swapping_the_sides_mirrors_everything(rounds: Rounds, pool: bool) -> None:
    chance = random.Random(7)
    for _ in range(20):
        launches = rounds(chance, 4, 5, process=0.02, true=0.1)
        here, there = difference(launches, pool=pool), difference([[-v for v in r] for r in launches], pool=pool)
        assert here is not None
        assert there is not None
        assert (there.estimate, there.low, there.high) == pytest.approx((-here.estimate, -here.high, -here.low))
        ratio, low, high = as_ratio(here)
        assert as_ratio(there) == pytest.approx((1 / ratio, 1 / high, 1 / low))
        assert (there.method, there.dof) == (here.method, pytest.approx(here.dof))


def test_interval_over_launches_covers_the_truth(rounds: Rounds) -> None:
    chance = random.Random(11)
    found = [difference(rounds(chance, 6, 4, process=0.04, true=0.05)) for _ in range(1000)]
    assert sum(covered(one, 0.05) for one in found) >= 930
    # Not by being needlessly wide: the ideal interval, with every variance known to the t test, is the yardstick.
    centres = [fmean(values) for _ in range(500) for values in rounds(chance, 1, 4, process=0.04)]
    ideal = 2.571 * stdev(centres) / math.sqrt(6)
    assert fmean((one.high - one.low) / 2 for one in found if one is not None) < 1.15 * ideal


@pytest.mark.parametrize(("launches", "count"), [(3, 4), (4, 12), (6, 4)])
def test_pooled_interval_covers_the_truth(rounds: Rounds, launches: int, count: int) -> None:
    chance = random.Random(13)
    found = [difference(rounds(chance, launches, count, process=0.0, true=0.05), pool=True) for _ in range(500)]
    assert sum(covered(one, 0.05) for one in found) >= 465


def test_pooling_is_worth_it(rounds: Rounds) -> None:
    chance = random.Random(17)
    pairs = []
    for _ in range(200):
        launches = rounds(chance, 3, 8, process=0.0)
        pairs.append((difference(launches, pool=True), difference(launches)))
    pooled = fmean(one.high - one.low for one, _ in pairs if one is not None)
    assert pooled < 0.8 * fmean(one.high - one.low for _, one in pairs if one is not None)
