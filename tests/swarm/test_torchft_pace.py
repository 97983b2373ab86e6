"""When peers ask each other: the oracle is trying every time at which a micro-batch could end. The clock is a number."""

import itertools

import pytest

from bareloop.swarm.torchft_pace import Pace, PaceMeter, plan


def exhaustive(paces: list[Pace], missing: float, least: int) -> list[int]:
    """Tries the end of each micro-batch of each peer, earliest first."""
    ends = sorted(pace.seconds * count for pace in paces for count in range(200))
    for end in ends:
        counts = [max(least, int(end / pace.seconds * (1 + 1e-9))) for pace in paces]
        if sum(pace.size * count for pace, count in zip(paces, counts, strict=True)) >= missing:
            return counts
    raise AssertionError("more than 200 micro-batches")


@pytest.mark.parametrize("least", [0, 1])
@pytest.mark.parametrize("missing", [1, 63, 64, 65, 500])
@pytest.mark.parametrize("seconds", list(itertools.product([0.1, 0.13], [0.1, 1.0], [0.31])))
def test_plan_is_the_shortest_and_exceeds_the_target_by_less_than_a_micro_batch_a_peer(
    seconds: tuple[float, ...], missing: float, least: int
) -> None:
    paces = [Pace(size=size, seconds=s) for size, s in zip([4, 8, 2], seconds, strict=True)]
    counts, needed = plan(paces, missing, least=least)
    assert counts == exhaustive(paces, missing, least)
    total = sum(pace.size * count for pace, count in zip(paces, counts, strict=True))
    assert missing <= total < missing + sum(pace.size for pace in paces)
    assert all(pace.seconds * count <= needed * (1 + 1e-6) for pace, count in zip(paces, counts, strict=True))


def test_ten_times_slower_peer_does_a_tenth_and_never_more_than_fits() -> None:
    fast, slow = Pace(size=4, seconds=0.1), Pace(size=4, seconds=1.0)
    assert plan([fast, slow], 88, least=1)[0] == [20, 2]
    assert plan([fast, slow], 8, least=0)[0] == [2, 0]  # it waits 0.2 s instead of being waited for 1 s
    assert plan([fast, slow], 8, least=1) == ([1, 1], 1.0)  # its micro-batch is longer than the round: all wait


def test_who_has_no_pace_yet_makes_all_ask_soon() -> None:
    unknown, known = Pace(size=0, seconds=0), Pace(size=4, seconds=1)
    assert plan([known, unknown, known], 1000, least=1) == ([1, 1, 1], 0.0)
    assert plan([known], -3, least=0) == ([1], 0.0)


def test_meter_measures_micro_batches_by_their_median_and_leaves_waiting_out() -> None:
    now = 0.0
    meter = PaceMeter(lambda: now)
    assert not meter.pace.known
    samples = 0.0
    for seconds in (60.0, 1.0, 1.2, 1.1, 30.0):  # a compilation first, a checkpoint last
        now += seconds
        samples += 4
        meter.count(samples)
        now += 100.0  # waits for the others
        meter.resume()
    assert meter.pace.size == 4 and meter.pace.seconds == pytest.approx(1.2)
    meter.begin_round()
    now += 1.0
    meter.count(6)
    assert meter.pace.size == 4


def test_part_is_done_by_count_or_when_its_time_is_over() -> None:
    now = 0.0
    meter = PaceMeter(lambda: now)
    meter.follow(3, 10.0)
    for samples in (4, 8):
        meter.count(samples)
        assert not meter.is_due
    meter.count(8)  # nothing came: asked twice after one micro-batch
    assert not meter.is_due
    meter.count(12)
    assert meter.is_due
    meter.follow(3, 10.0)
    now = 10.9
    assert not meter.is_due
    now = 11.0
    assert meter.is_due
