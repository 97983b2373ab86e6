from dataclasses import replace

import pytest

from bareloop.diagnosis.evidence import Comparison, Diagnosis
from bareloop.renderers.exit_code import exit_code


def _with(record: Comparison, *, work: str = "equal", math: str = "equal", speed: str = "equal") -> Comparison:
    return replace(
        record,
        work=replace(record.work, verdict=work),
        math=replace(record.math, verdict=math),
        speed=replace(record.speed, verdict=speed),
    )


def test_no_condition_is_a_report(comparison: Comparison) -> None:
    assert exit_code(_with(comparison, work="different", math="different", speed="slower"), ()) == 0


@pytest.mark.parametrize(
    ("condition", "verdicts", "code"),
    [
        ("slower", {"speed": "slower"}, 1),
        ("slower", {"speed": "faster"}, 0),
        ("slower", {"speed": "equal"}, 0),
        ("slower", {"speed": "undecided"}, 5),
        ("unequal-work", {"work": "different"}, 1),
        ("unequal-work", {"work": "undecided"}, 5),
        ("unequal-work", {"work": "equal", "speed": "slower"}, 0),
        ("unequal-math", {"math": "different"}, 1),
        ("unequal-math", {"math": "undecided"}, 5),
        ("unequal-math", {"math": "equal"}, 0),
    ],
)
def test_one_condition(comparison: Comparison, condition: str, verdicts: dict[str, str], code: int) -> None:
    assert exit_code(_with(comparison, **verdicts), (condition,)) == code


def test_shown_outweighs_undecided(comparison: Comparison) -> None:
    record = _with(comparison, work="undecided", speed="slower")
    assert exit_code(record, ("unequal-work", "slower")) == 1
    assert exit_code(record, ("unequal-work", "unequal-math")) == 5


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (("shown", "not_examined"), 1),
        (("counted", "not_examined"), 5),
        (("counted", "refuted"), 0),
        ((), 0),
    ],
)
def test_findings(diagnosis: Diagnosis, statuses: tuple[str, ...], code: int) -> None:
    findings = tuple(replace(diagnosis.findings[0], status=status) for status in statuses)
    assert exit_code(replace(diagnosis, findings=findings), ("finding",)) == code


def test_a_diagnosis_has_no_other_side(diagnosis: Diagnosis) -> None:
    with pytest.raises(ValueError, match="slower"):
        exit_code(diagnosis, ("slower",))
