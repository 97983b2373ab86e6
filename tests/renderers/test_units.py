import math

import pytest

from bareloop.renderers import units


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (7.4e-3, "7.40 ms"),
        (0.0214e-3, "0.021 ms"),
        (12.34e-3, "12.3 ms"),
        (143.2e-3, "143 ms"),
        (1.43, "1,430 ms"),
        (-0.31e-3, "-0.31 ms"),
        (-1e-9, "0.000 ms"),
    ],
)
def test_seconds_are_shown_as_milliseconds(seconds: float, text: str) -> None:
    assert units.milliseconds(seconds) == text


def test_an_interval_has_the_decimals_of_its_estimate() -> None:
    assert units.interval(7.2812e-3, 12.5e-3, like=7.4e-3) == "[7.28, 12.50]"
    assert units.interval(None, 1.0) == ""


@pytest.mark.parametrize(("share", "text"), [(0.004, "0.4 %"), (0.07, "7.0 %"), (0.0999, "10 %"), (0.46, "46 %")])
def test_a_share_is_shown_in_percent(share: float, text: str) -> None:
    assert units.percent(share) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(1.0, "1 step"), (2.0, "2 steps"), (0.0, "0 steps"), (2.5, "2.5 steps"), (1807.0, "1,807 steps")],
)
def test_a_noun_follows_its_number(number: float, text: str) -> None:
    assert units.count(number, "step") == text


def test_two_values_that_differ_are_shown_to_differ() -> None:
    assert units.pair(7.01342, 7.02011) == ("7.01342", "7.02011")
    a, b = units.pair(1.0000000001, 1.0000000002)
    assert a != b
    assert units.pair(math.inf, None) == ("infinity", "none")


def test_hashes_and_lists_are_cut_and_words_are_not() -> None:
    assert units.value("9f2c61aa04be7d2219f2c61aa04be7d2") == "9f2c61aa04be"
    assert units.value("DistributedDataParallel") == "DistributedDataParallel"
    assert units.value([0.01, 0.0, 0.1, 0.2, 0.3]) == "0.01, 0, 0.1, 0.2, ... (5)"
