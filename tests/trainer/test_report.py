"""`LeanReport` says what is lean and what is not."""

import dataclasses

import pytest

from bareloop.trainer.report import LOOP, FallBack, LeanReport


def test_a_lean_loop_is_named_with_its_parts_and_what_is_not_lean() -> None:
    report = LeanReport(
        loop_is_lean=True,
        lean=("compute_loss", "clip"),
        fallen_back=(FallBack(part="events", reason="on_step_end is overridden by Mine"),),
    )
    text = str(report)
    assert text.startswith("hot loop: lean\n")
    assert "lean parts: compute_loss, clip" in text
    assert "not lean: events: on_step_end is overridden by Mine" in text
    assert "NaN" not in text


def test_a_stock_loop_gives_its_reason() -> None:
    report = LeanReport(loop_is_lean=False, fallen_back=(FallBack(part=LOOP, reason="DeepSpeed owns the backward"),))
    assert str(report) == "hot loop: stock\nnot lean: loop: DeepSpeed owns the backward"
    assert report.reasons(LOOP) == ("DeepSpeed owns the backward",)
    assert report.reasons("clip") == ()


def test_losses_kept_out_of_the_log_are_said() -> None:
    assert "3 micro-steps" in str(LeanReport(loop_is_lean=True, non_finite_losses=3))


def test_the_records_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LeanReport(loop_is_lean=True).loop_is_lean = False  # type: ignore[misc]
