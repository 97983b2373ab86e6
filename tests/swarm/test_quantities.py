"""Quantities as people write them."""

import pytest

from bareloop.swarm import quantities


@pytest.mark.parametrize(
    ("text", "value"),
    [("124M", 124e6), ("1.5B", 1.5e9), ("1.5g", 1.5e9), ("2T", 2e12), ("4096", 4096.0), (" 7k ", 7e3)],
)
def test_counts(text: str, value: float) -> None:
    assert quantities.count(text, name="parameters") == value


@pytest.mark.parametrize("text", ["", "M", "-3M", "0", "1e6", "124MB", "12 4", "nan", "inf", "9" * 400])
def test_what_is_no_count_is_refused_with_its_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"parameters=.*124M"):
        quantities.count(text, name="parameters")


def test_times_need_their_unit() -> None:
    assert quantities.seconds("20ms", name="latency") == pytest.approx(0.02)
    assert quantities.seconds("0.2 s", name="latency") == 0.2
    assert quantities.seconds("0", name="latency") == 0
    for text in ("20", "20m", "-1ms", "ms"):
        with pytest.raises(ValueError, match=r"latency=.*20ms"):
            quantities.seconds(text, name="latency")


def test_rates_are_one_a_peer() -> None:
    assert quantities.rates("20,20,5", name="rates") == (20, 20, 5)
    assert quantities.rates("20x3, 5", name="rates") == (20, 20, 20, 5)
    assert quantities.rates("1.5kx2", name="rates") == (1500, 1500)
    for text in ("", "20,", "20x0", "x8", "20x-1", "20,0", "20x100001", "1x99999,1x99999"):
        with pytest.raises(ValueError, match="rates="):
            quantities.rates(text, name="rates")


def test_bandwidths_are_bits_down_and_up() -> None:
    assert quantities.bandwidths("100Mbit", name="bandwidth") == ((1e8, 1e8),)
    assert quantities.bandwidths("200Mbit/20Mbit,1Gbps x2", name="bandwidth") == ((2e8, 2e7), (1e9, 1e9), (1e9, 1e9))
    for text in ("100", "100MB", "100MB/s", "100M", "100Mbit/", "0Mbit", "1Mbit/2Mbit/3Mbit"):
        with pytest.raises(ValueError, match=r"bandwidth=.*100Mbit"):
            quantities.bandwidths(text, name="bandwidth")
