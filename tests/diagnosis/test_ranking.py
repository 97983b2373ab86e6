from typing import Any

import pytest

from bareloop.diagnosis.evidence import Combined, Finding, SpeedVerdict
from bareloop.diagnosis.ranking import order, unexplained


def finding(
    cause: str, status: str, saving: float | None = None, *, script: str = "a", half: float = 0.0005, **fields: Any
) -> Finding:
    bounds = (None, None) if saving is None else (saving - half, saving + half)
    return Finding(
        **{
            "cause": cause, "title": cause, "script": script, "status": status, "evidence": "", "counts": {},
            "saving_s_per_step": saving, "low": bounds[0], "high": bounds[1], "setting": None, "fix": "",
            "changes_math": False, "location": None, **fields,
        }
    )  # fmt: skip


def speed(a: float | None, b: float | None, *, half: float = 0.0, per: str = "step") -> SpeedVerdict:
    ratio = None if a is None or b is None else b / a
    low, high = (None, None) if ratio is None else (ratio - half, ratio + half)
    return SpeedVerdict(
        per=per, ratio=ratio, low=low, high=high, verdict="slower", control=None, a_s_per_step=a, b_s_per_step=b
    )


def test_order_is_shown_by_saving_then_differences_then_costs_then_refuted_then_not_examined():
    given = [
        finding("unexamined", "not_examined"),
        finding("refuted", "refuted", -0.001),
        finding("small_cost", "counted", 0.0001),
        finding("larger_cost", "counted", 0.0002),
        finding("clip_below_resolution", "counted", 0.0, changes_math=True),
        finding("passes", "counted"),
        finding("shown_small", "shown", 0.001),
        finding("shown_large", "shown", 0.005),
    ]
    assert [one.cause for one in order(given)] == [
        "shown_large", "shown_small", "clip_below_resolution", "passes", "larger_cost", "small_cost", "refuted", "unexamined",
    ]  # fmt: skip


def test_equals_keep_their_order():
    given = [finding(name, "not_examined") for name in "cab"]
    assert [one.cause for one in order(given)] == ["c", "a", "b"]


def test_an_unknown_status_is_refused():
    with pytest.raises(ValueError, match="'x' has status 'proven'"):
        order([finding("x", "proven")])


def test_savings_are_taken_off_their_own_side():
    rest = unexplained(
        speed(0.020, 0.030, half=0.05),
        [
            finding("on_b", "shown", 0.006, script="b", half=0.0003),
            finding("both", "shown", 0.002, script="a", half=0.0004),
            finding("both", "shown", 0.003, script="b", half=0.0),
            finding("counted", "counted", 0.001, script="b"),
            finding("refuted", "refuted", -0.001, script="b"),
        ],
    )
    assert rest is not None
    assert rest.s_per_step == pytest.approx(0.010 - 0.006 - 0.003 + 0.002)
    half = (0.001**2 + 0.0003**2 + 0.0004**2) ** 0.5
    assert (rest.low, rest.high) == (pytest.approx(0.003 - half), pytest.approx(0.003 + half))
    assert rest.share == pytest.approx(0.3)
    assert rest.sentence == (
        "b takes 10 ms per step more than a; the shown causes account for 7 ms, and 3 ms (1.88 ms to 4.12 ms, 30% of it) "
        "is unexplained."
    )


def test_a_slower_a_is_told_in_its_own_direction():
    rest = unexplained(speed(0.030, 0.020), [finding("x", "shown", 0.007, half=0.001)])
    assert rest is not None
    assert rest.s_per_step == pytest.approx(-0.003)
    assert (
        "a takes 10 ms per step more than b; the shown causes account for 7 ms, and 3 ms (2 ms to 4 ms" in rest.sentence
    )


def test_nothing_left_beyond_the_interval():
    rest = unexplained(speed(0.020, 0.030, half=0.05), [finding("x", "shown", 0.0098, script="b")])
    assert rest is not None
    assert rest.low < 0 < rest.high
    assert "can't be told from nothing" in rest.sentence


def test_no_cause_shown_leaves_all_of_it():
    rest = unexplained(speed(0.020, 0.030), [])
    assert rest is not None
    assert (rest.share, rest.sentence.endswith("all of it is unexplained.")) == (1.0, True)


def test_savings_that_overlap_explain_more_than_there_is():
    rest = unexplained(speed(0.020, 0.030), [finding("x", "shown", 0.015, script="b")])
    assert rest is not None
    assert "more than there is" in rest.sentence


def test_a_difference_within_the_interval_has_no_share():
    rest = unexplained(speed(0.020, 0.0201, half=0.05, per="sample"), [])
    assert rest is not None
    assert rest.share is None
    assert "can't tell from nothing" in rest.sentence
    assert "per sample is the fair one" in rest.sentence


def test_no_numbers_no_remainder():
    assert unexplained(speed(None, 0.02), []) is None


def test_a_shown_finding_without_an_interval_is_refused():
    with pytest.raises(ValueError, match="'x' of script 'b' is shown without a saving"):
        unexplained(speed(0.02, 0.03), [finding("x", "shown", script="b")])


def together(script: str, saving: float, status: str = "shown", half: float = 0.0005) -> Combined:
    return Combined(
        script=script, causes=("x", "y"), status=status, saving_s_per_step=saving, low=saving - half, high=saving + half
    )


def test_causes_taken_away_at_once_stand_for_their_sum():
    shown = [finding("x", "shown", 0.006, script="b"), finding("z", "shown", 0.001, script="a")]
    rest = unexplained(speed(0.020, 0.030), shown, [together("b", 0.008)])
    assert rest is not None
    assert rest.s_per_step == pytest.approx(0.010 - 0.008 + 0.001)
    assert "all 2 causes of b taken away at once and the shown causes account for 7 ms" in rest.sentence


def test_what_was_not_shown_at_once_falls_back_to_the_shown_causes():
    shown = [finding("x", "shown", 0.006, script="b")]
    rest = unexplained(speed(0.020, 0.030), shown, [together("b", 0.004, "counted", half=0.005)])
    assert rest is not None
    assert rest.s_per_step == pytest.approx(0.004)
