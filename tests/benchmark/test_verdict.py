import math
import random
from collections import Counter
from collections.abc import Callable
from statistics import median

import pytest

from bareloop.benchmark.paired import Difference, difference
from bareloop.benchmark.verdict import resolution, saving_status, speed_verdict

Rounds = Callable[..., list[list[float]]]


def interval(low: float, high: float, dof: float = 5) -> Difference:
    return Difference(estimate=(low + high) / 2, low=low, high=high, launches=6, rounds=24, dof=dof, method="launches")


CALM = interval(-0.01, 0.01)


@pytest.mark.parametrize(
    ("measured", "control", "expected"),
    [
        (interval(0.10, 0.14), CALM, "slower"),
        (interval(-0.14, -0.10), CALM, "faster"),
        (interval(-0.02, 0.02), CALM, "equal"),
        (interval(-0.02, 0.04), CALM, "undecided"),
        # The estimate lies inside the control's interval.
        (interval(0.01, 0.05), interval(-0.04, 0.04), "undecided"),
        # The interval reaches down to the control's ratio.
        (interval(0.02, 0.20), interval(0.02, 0.06), "undecided"),
        # A control that is off counts with either sign.
        (interval(0.01, 0.05), interval(-0.06, -0.02), "undecided"),
        # Close to nothing, but the control itself says that the machine is not calm.
        (interval(-0.02, 0.02), interval(0.01, 0.03), "undecided"),
        (interval(-0.02, 0.02), interval(-0.03, -0.01), "undecided"),
        # Small and certain is not equal.
        (interval(0.015, 0.025), interval(-0.002, 0.002), "slower"),
        (None, CALM, "undecided"),
        (interval(0.10, 0.14), None, "undecided"),
        (interval(-0.001, 0.001), None, "undecided"),
    ],
)
def test_speed_verdict(measured: Difference | None, control: Difference | None, expected: str) -> None:
    assert speed_verdict(measured, control) == expected


def test_equal_within_is_a_ratio() -> None:
    edge = math.log1p(0.05)
    assert speed_verdict(interval(-edge, edge), CALM, equal_within=0.05) == "equal"
    assert speed_verdict(interval(-edge, edge), CALM, equal_within=0.049) == "undecided"
    with pytest.raises(ValueError, match="equal_within must not be negative"):
        speed_verdict(CALM, CALM, equal_within=-0.1)


@pytest.mark.parametrize(
    ("saving", "control", "expected"),
    [
        (interval(0.002, 0.004), interval(-0.001, 0.001), "shown"),
        (interval(0.002, 0.004), None, "counted"),
        (interval(-0.001, 0.004), interval(-0.001, 0.001), "counted"),
        # The estimate lies inside the control's interval.
        (interval(0.001, 0.003), interval(-0.003, 0.003), "counted"),
        # The interval reaches down to the control's estimate.
        (interval(0.001, 0.009), interval(0.001, 0.003), "counted"),
        (interval(-0.004, -0.001), interval(-0.001, 0.001), "refuted"),
        (interval(-0.004, 0.0), None, "refuted"),
        # Below 0.2 % of a step of 20 ms.
        (interval(-0.0001, 0.00003), interval(-0.0001, 0.0001), "refuted"),
        (interval(-0.0001, 0.00005), interval(-0.0001, 0.0001), "counted"),
        # Switching alone costs time: no saving is no proof.
        (interval(-0.004, -0.001), interval(-0.004, -0.001), "counted"),
        (None, interval(-0.001, 0.001), "counted"),
    ],
)
def test_saving_status(saving: Difference | None, control: Difference | None, expected: str) -> None:
    assert saving_status(saving, control, 0.02) == expected


def test_step_time_must_be_positive() -> None:
    with pytest.raises(ValueError, match="step_s must be more than 0 seconds, got 0"):
        saving_status(CALM, CALM, 0.0)
    with pytest.raises(ValueError, match="step_s must be more than 0 seconds, got -1"):
        resolution(CALM, CALM, step_s=-1.0)
    with pytest.raises(ValueError, match=r"power must be at least 0\.5"):
        resolution(CALM, CALM, power=1.0)


def test_resolution_by_hand() -> None:
    measured, control = interval(-0.02, 0.04), interval(-0.05, 0.03)
    luck = 0.919544 * math.hypot(0.03, 0.04) / 2.570582
    assert resolution(measured, control) == pytest.approx(math.expm1(0.01 + 0.04 + luck), rel=1e-5)
    assert resolution(measured, control, step_s=2.0) == pytest.approx((0.03 + luck) / 2, rel=1e-5)
    # A control that helps by itself must be beaten too.
    assert resolution(measured, interval(-0.03, 0.05), step_s=2.0) == pytest.approx((0.05 + luck) / 2, rel=1e-5)
    alone = 0.04 + math.sqrt(2 / math.pi) * 0.04 / 2.570582 + 0.919544 * math.sqrt(2) * 0.04 / 2.570582
    assert resolution(control) == pytest.approx(math.expm1(alone), rel=1e-5)


def compared(
    rounds: Rounds, chance: random.Random, launches: int, true: float, *, process: float = 0.04
) -> tuple[str, float]:
    measured = difference(rounds(chance, launches, 4, process=process, true=true))
    control = difference(rounds(chance, launches, 4, process=process))
    assert measured is not None
    return speed_verdict(measured, control), resolution(measured, control)


def test_the_same_script_twice_is_hardly_ever_slower_or_faster(rounds: Rounds) -> None:
    chance = random.Random(19)
    counts = Counter(compared(rounds, chance, 6, 0.0)[0] for _ in range(600))
    assert counts["slower"] + counts["faster"] <= 12


@pytest.mark.parametrize("process", [0.04, 0.04 * math.sqrt(2)])
def test_twenty_percent_are_seen_with_eight_launches(rounds: Rounds, process: float) -> None:
    chance = random.Random(23)
    counts = Counter(compared(rounds, chance, 8, math.log(1.2), process=process)[0] for _ in range(300))
    assert counts["slower"] >= 285


def test_five_percent_slower_is_never_faster(rounds: Rounds) -> None:
    chance = random.Random(29)
    assert Counter(compared(rounds, chance, 6, math.log(1.05))[0] for _ in range(300))["faster"] == 0


def test_a_difference_of_the_resolution_is_mostly_seen_and_half_of_it_mostly_not(rounds: Rounds) -> None:
    chance = random.Random(31)
    usual = median(compared(rounds, chance, 8, 0.0)[1] for _ in range(200))
    seen = Counter(compared(rounds, chance, 8, math.log1p(usual))[0] for _ in range(300))["slower"]
    seen_half = Counter(compared(rounds, chance, 8, math.log1p(usual / 2))[0] for _ in range(300))["slower"]
    assert 0.7 * 300 <= seen <= 0.95 * 300
    assert seen_half <= 0.5 * 300


def test_swapping_the_scripts_flips_the_verdict(rounds: Rounds) -> None:
    chance = random.Random(37)
    flipped = {"slower": "faster", "faster": "slower", "equal": "equal", "undecided": "undecided"}
    seen: Counter[str] = Counter()
    for true in (0.0, 0.1, -0.1):
        for _ in range(40):
            launches = rounds(chance, 6, 4, process=0.005, true=true)
            control = difference(rounds(chance, 6, 4, process=0.005))
            here = speed_verdict(difference(launches), control)
            there = speed_verdict(difference([[-value for value in values] for values in launches]), control)
            assert there == flipped[here]
            seen[here] += 1
    assert set(seen) == set(flipped)


@pytest.mark.parametrize(("launches", "count"), [(1, 8), (3, 4), (4, 12)])
def test_an_ablation_of_nothing_is_hardly_ever_shown(rounds: Rounds, launches: int, count: int) -> None:
    chance = random.Random(41)
    step_s = 0.02

    def saved(true: float) -> Difference | None:
        values = rounds(chance, launches, count, process=0.0, true=true)
        return difference([[step_s * value for value in launch] for launch in values], pool=True)

    none = Counter(saving_status(saved(0.0), saved(0.0), step_s) for _ in range(400))
    assert none["shown"] <= 12
    # With true savings of a fifth of the step, refuting must be as rare.
    fifth = Counter(saving_status(saved(0.2), saved(0.0), step_s) for _ in range(400))
    assert fifth["refuted"] <= 12
    if launches > 1:
        assert fifth["shown"] >= 340
