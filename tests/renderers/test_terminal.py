"""Reports against stored text; UPDATE_SNAPSHOTS=1 writes the text anew, to be read before it is committed."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from bareloop.diagnosis.evidence import Comparison, Diagnosis, SpeedVerdict, Unexplained
from bareloop.renderers.terminal import render

SNAPSHOTS = Path(__file__).with_name("snapshots")


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", ["comparison", "unequal_comparison", "diagnosis"])
def test_the_report_is_the_stored_one(name: str, width: int, request: pytest.FixtureRequest) -> None:
    text = render(request.getfixturevalue(name), width=width, color=False)
    stored = SNAPSHOTS / f"{name}_{width}.txt"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        stored.write_text(text, encoding="ascii")
    assert text == stored.read_text(encoding="ascii")
    assert max(len(line) for line in text.splitlines()) <= width


def test_nothing_is_cut_off_however_narrow(comparison: Comparison) -> None:
    text = render(comparison, width=20, color=False)
    assert max(len(line) for line in text.splitlines()) <= 60
    letters = "".join(text.split())
    for finding in comparison.findings:
        change = "leave it as it is" if finding.status == "refuted" else finding.setting or finding.fix
        for words in (finding.title, finding.evidence, change):
            assert all(word in letters for word in words.split())


def test_verdicts_come_first_and_in_their_order(comparison: Comparison) -> None:
    lines = render(comparison, width=120, color=False).splitlines()
    starts = [line.split()[0] for line in lines if line.startswith(("Work", "Math", "Speed", "In "))]
    assert starts == ["Work", "Math", "Speed", "In"]
    speed = next(line for line in lines if line.startswith("Speed"))
    assert "0.82x" in speed
    assert "[0.79, 0.86]" in speed
    assert "a against itself 1.00x [0.98, 1.02]" in speed


def test_a_verdict_is_not_said_twice(comparison: Comparison) -> None:
    text = render(comparison, width=120, color=False)
    assert text.lower().count("equal work") == 1
    assert text.lower().count("different math") == 1


def test_unequal_work_gives_speed_per_sample_and_says_so_first(unequal_comparison: Comparison) -> None:
    text = " ".join(render(unequal_comparison, width=140, color=False).split())
    assert "iterations (it/s) are not comparable: a step of a takes 4 samples, a step of b 2" in text
    assert "Speed UNDECIDED per sample, as the work per step differs: b takes 1.02x a's time per sample" in text


def test_a_sentence_of_the_verdict_on_iterations_is_not_repeated(unequal_comparison: Comparison) -> None:
    sentence = "Different work: a consumes 4 samples per step, b 2, so iterations are not comparable."
    record = replace(unequal_comparison, work=replace(unequal_comparison.work, sentence=sentence))
    assert render(record, width=140, color=False).count("not comparable") == 1


def test_shown_savings_have_interval_and_share_and_counted_ones_a_bound(comparison: Comparison) -> None:
    text = render(comparison, width=120, color=False)
    assert "0.41 ms  5.5 %" in text
    assert "[0.32, 0.50] ms" in text
    assert "under 0.090 ms" in text
    assert text.count("(changes the") == 1


def test_a_refuted_cause_has_nothing_to_change(diagnosis: Diagnosis) -> None:
    text = render(diagnosis, width=120, color=False)
    assert "leave it as it is" in text
    assert "disable_tqdm" not in text


def test_what_is_left_is_told_from_the_side_that_is_slower(comparison: Comparison) -> None:
    text = " ".join(render(comparison, width=140, color=False).split())
    assert "Unexplained 0.31 ms per step [0.07, 0.55] of the 1.30 ms that a step of a takes longer, 24 % of it" in text
    rest = Unexplained(s_per_step=0.0, low=0.0, high=0.0, share=None, sentence="all of it is explained.")
    text = " ".join(render(replace(comparison, unexplained=rest), width=140, color=False).split())
    assert "Unexplained all of it is explained. What differs" in text


def test_no_numbers_is_no_report_of_zeros(comparison: Comparison) -> None:
    speed = SpeedVerdict(
        per="step",
        ratio=None,
        low=None,
        high=None,
        verdict="undecided",
        control=None,
        sentence="b ended before it could be timed",
    )
    record = replace(comparison, speed=speed, findings=(), unexplained=None, phases={})
    text = render(record, width=120, color=False)
    assert "UNDECIDED       b ended before it could be timed" in text
    assert "no known cause" in text
    assert "0.00x" not in text


def test_a_diagnosis_without_timing_says_so(diagnosis: Diagnosis) -> None:
    record = replace(diagnosis, timing=None, phases=None, counts=None, findings=())
    text = render(record, width=120, color=False)
    assert "No step was timed." in text
    assert "not measured" in text


def test_color_only_colors(comparison: Comparison) -> None:
    plain, colored = (render(comparison, width=120, color=color) for color in (False, True))
    assert "\x1b[" not in plain
    assert "\x1b[1;31mDIFFERENT MATH" in colored
    stripped = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", colored).splitlines()]
    assert stripped == plain.splitlines()


def test_no_color_into_a_file_or_with_no_color_set(comparison: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[" not in render(comparison)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in render(comparison)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in render(comparison)


def test_control_characters_and_markup_of_a_script_are_text(comparison: Comparison) -> None:
    finding = replace(comparison.findings[0], evidence="source: \x1b[31mx[bold]y[/bold]\n", title="[red]t")
    text = render(replace(comparison, findings=(finding,)), width=120, color=False)
    assert "\x1b" not in text
    assert "x[bold]y[/bold]" in text
    assert "[red]t" in text
