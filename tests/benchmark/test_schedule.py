from collections import Counter
from itertools import pairwise

import pytest

from bareloop.benchmark.schedule import order, plan


@pytest.mark.parametrize("names", [("a", "b"), ("a", "b", "c"), ("a", "b", "c", "d"), tuple("abcdefg")])
def test_order_is_balanced(names: tuple[str, ...]) -> None:
    turns = order(names, 2 * len(names), seed=4)
    assert all(sorted(each) == sorted(names) for each in turns)
    for forward, backward in zip(turns[::2], turns[1::2], strict=True):
        assert backward == forward[::-1]
    for place in range(len(names)):
        assert Counter(each[place] for each in turns) == dict.fromkeys(names, 2)
    followed = Counter(pair for each in turns for pair in pairwise(each))
    assert followed == {(first, then): 2 for first in names for then in names if first != then}


def test_a_linear_drift_cancels_in_each_pair_of_rounds() -> None:
    turns = order(("a", "b", "c"), 8, seed=1)
    for number in range(0, 8, 2):
        when: Counter[str] = Counter()
        for clock, name in enumerate(turns[number] + turns[number + 1]):
            when[name] += clock
        assert len(set(when.values())) == 1


def test_order_is_random_but_reproducible() -> None:
    names = ("a", "b", "c")
    assert order(names, 5, seed=8) == order(names, 5, seed=8)
    assert len({order(names, 5, seed=seed) for seed in range(20)}) > 5
    assert {order(("a", "b"), 1, seed=seed) for seed in range(20)} == {(("a", "b"),), (("b", "a"),)}
    assert order(("a",), 3, seed=0) == (("a",), ("a",), ("a",))


@pytest.mark.parametrize(("names", "rounds"), [((), 2), (("a", "a"), 2), (("a", "b"), 0)])
def test_order_refuses(names: tuple[str, ...], rounds: int) -> None:
    with pytest.raises(ValueError, match=r"^(participants|rounds) must be"):
        order(names, rounds, seed=0)


def test_launches_come_before_rounds() -> None:
    # A round is 2 turns of (10 + 5) steps of 10 ms = 0.3 s; rounds take half of the start: 14; 8 + 4.2 s a launch.
    made = plan(budget_s=120, spent_s=20, startup_s=8, step_s={"a": 0.01, "b": 0.01}, discard={"a": 5, "b": 5})
    assert (made.launches, made.rounds, made.steps, made.fits) == (8, 14, {"a": 10, "b": 10}, True)
    assert made.launch_s == pytest.approx(12.2)
    assert made.wall_s == pytest.approx(97.6)


def test_what_is_left_goes_to_rounds() -> None:
    # 3 launches of 20 + 32 rounds x 0.2 s; a fourth does not fit into 80 s with the 32 rounds that are wished.
    made = plan(budget_s=80, spent_s=0, startup_s=20, step_s={"a": 0.01, "b": 0.01})
    assert (made.launches, made.rounds) == (3, 32)
    # 9 rounds would fit, but an even number cancels the drift.
    made = plan(budget_s=3 * (20 + 1.9), spent_s=0, startup_s=20, step_s={"a": 0.01, "b": 0.01})
    assert (made.launches, made.rounds) == (3, 8)


def test_a_plan_that_fills_the_budget_exactly_fits() -> None:
    made = plan(budget_s=3 * 1.1, spent_s=0, startup_s=0.3, step_s={"a": 0.01, "b": 0.01})
    assert (made.launches, made.rounds, made.fits) == (3, 4, True)


def test_a_large_budget_is_not_used_up() -> None:
    made = plan(budget_s=10_000, spent_s=0, startup_s=1, step_s={"a": 0.001, "b": 0.00001})
    assert (made.launches, made.rounds, made.steps) == (64, 32, {"a": 100, "b": 400})


def test_turns_of_a_round() -> None:
    common = {"budget_s": 1e4, "spent_s": 0.0, "startup_s": 0.0, "launches": 2}
    step_s = {"a": 0.125, "b": 0.25}
    assert plan(step_s=step_s, turns_per_round=2, **common).launch_s == pytest.approx(32 * 2 * (0.375 + 0.75))
    made = plan(step_s=step_s, turns_per_round=("a", "b", "a"), **common)
    assert made.launch_s == pytest.approx(32 * (2 * 0.375 + 0.75))


def test_start_of_several_processes_at_once_costs_more() -> None:
    alone = plan(budget_s=100, spent_s=0, startup_s=10, step_s={"a": 0.01})
    together = plan(budget_s=100, spent_s=0, startup_s=10, step_s={"a": 0.01}, startup_parallel=1.6)
    assert (alone.launches, together.launches) == (7, 5)


def test_wishes_are_honoured() -> None:
    made = plan(budget_s=60, spent_s=0, startup_s=5, step_s={"a": 0.1, "b": 0.1}, steps=7, launches=4)
    # 60 / 4 - 5 = 10 s for rounds of 1.4 s.
    assert (made.launches, made.steps, made.rounds, made.fits) == (4, {"a": 7, "b": 7}, 6, True)
    short = plan(budget_s=10, spent_s=0, startup_s=5, step_s={"a": 0.1, "b": 0.1}, steps=7, launches=4)
    assert (short.launches, short.steps, short.rounds, short.fits) == (4, {"a": 7, "b": 7}, 3, False)


def test_long_steps_shorten_the_turns_until_three_launches_fit() -> None:
    # 3 steps in a turn: 8 + 3 x 6 = 26 s a launch, 3 of them do not fit; single steps: 8 + 4 x 2 = 16 s.
    made = plan(budget_s=70, spent_s=0, startup_s=8, step_s={"a": 1.0, "b": 1.0})
    assert (made.launches, made.rounds, made.steps) == (4, 4, {"a": 1, "b": 1})
    made = plan(budget_s=80, spent_s=0, startup_s=8, step_s={"a": 1.0, "b": 1.0})
    assert (made.launches, made.rounds, made.steps) == (3, 3, {"a": 3, "b": 3})


def test_two_launches_where_three_do_not_fit() -> None:
    made = plan(budget_s=50, spent_s=0, startup_s=20, step_s={"a": 0.01, "b": 0.01})
    assert (made.launches, made.rounds, made.steps, made.fits) == (2, 24, {"a": 10, "b": 10}, True)


@pytest.mark.parametrize("spent_s", [0.0, 100.0])
def test_a_budget_that_is_too_small_says_so(spent_s: float) -> None:
    made = plan(budget_s=30, spent_s=spent_s, startup_s=20, step_s={"a": 0.01, "b": 1.0})
    assert (made.launches, made.rounds, made.steps, made.fits) == (2, 3, {"a": 3, "b": 1}, False)
    assert made.wall_s == pytest.approx(2 * (20 + 3 * 1.03))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"step_s": {"a": 0.0}}, "step_s must be more than 0"),
        ({"turns_per_round": ["a", "z"]}, r"name \['z'\]"),
        ({"discard": {"z": 1}}, r"name \['z'\]"),
        ({"turns_per_round": 0}, "at least one turn"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"launches": 1}, "launches must be at least 2"),
        ({"discard": {"a": -1}}, "must not be negative"),
    ],
)
def test_plan_refuses(changed: dict[str, object], named: str) -> None:
    arguments: dict[str, object] = {"budget_s": 60, "spent_s": 0, "startup_s": 1, "step_s": {"a": 0.01}}
    with pytest.raises(ValueError, match=named):
        plan(**(arguments | changed))  # type: ignore[arg-type]
