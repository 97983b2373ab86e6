from dataclasses import replace
from typing import Any

import pytest

from bareloop.diagnosis.equal_work import equal_work, matmul_dtype, per_unit
from bareloop.trace import Environment, Ledger, Planned, ProcessFacts, StepFacts, Trace, decode, encode

BASE = Ledger(
    samples_per_step=2.0,
    tokens_per_step=64.0,
    padding_share=0.0,
    micro_steps_per_step=1.0,
    forward_per_backward=1.0,
    planned_steps=300.0,
    planned_passes=3.0,
    trainable_parameters=1000,
    matmul_dtypes={"float32": 10.0},
)


def trace(steps: tuple[StepFacts, ...] = (), **changes: Any) -> Trace:
    ledger = replace(BASE, **changes)
    process = ProcessFacts(rank=0, pid=1, environment=Environment(), work=ledger, steps=steps)
    return Trace(script="t.py", command=("t.py",), processes=(process,), work=ledger)


def steps(
    tokens: list[int], *, real: list[int] | None = None, salt: str = "", samples: int = 2
) -> tuple[StepFacts, ...]:
    return tuple(
        StepFacts(
            index=i + 1,
            batch=f"{salt}{i}",
            rows=tuple(f"{salt}{i}-{row}" for row in range(samples)),
            samples=samples,
            tokens=count,
            real_tokens=real[i] if real else None,
        )
        for i, count in enumerate(tokens)
    )


def names(a: Trace, b: Trace) -> list[str]:
    return [difference.quantity for difference in equal_work(a, b).differences]


def test_same_ledger_is_equal_and_says_what_a_step_is():
    verdict = equal_work(trace(), trace())
    assert (verdict.verdict, verdict.differences, verdict.unknown) == ("equal", (), ())
    assert verdict.sentence == "Equal work: 2 samples and 64 tokens per step, 1 micro-step, on both sides."


def test_other_samples_per_step_makes_iterations_incomparable():
    a, b = trace(samples_per_step=4.0, tokens_per_step=128.0), trace()
    verdict = equal_work(a, b)
    assert verdict.verdict == "different"
    assert names(a, b) == ["samples_per_step", "tokens_per_step"]
    assert verdict.sentence == ("Different work: a consumes 4 samples per step, b 2, so iterations are not comparable.")
    assert per_unit(a, b) == "sample"


def test_a_plan_twice_as_long_is_different_work_with_its_sources():
    plans = (
        Planned(quantity="passes", value=6.0, source="Trainer state.num_train_epochs"),
        Planned(quantity="passes", value=5.0, source="a source that lost"),
    )
    a, b = trace(planned_passes=6.0, planned_steps=600.0, plans=plans), trace()
    verdict = equal_work(a, b)
    assert verdict.verdict == "different"
    passes = next(d for d in verdict.differences if d.quantity == "planned_passes")
    assert (passes.a, passes.b, passes.note) == (6.0, 3.0, "a: Trainer state.num_train_epochs")
    assert "equal per step (2 samples and 64 tokens per step, 1 micro-step)" in verdict.sentence
    assert "a plans 6 passes over the data, b 3 (2x)" in verdict.sentence
    assert per_unit(a, b) == "step"


def test_a_plan_that_was_not_seen_is_unknown_not_different():
    verdict = equal_work(trace(planned_steps=None), trace())
    assert (verdict.verdict, verdict.unknown, verdict.differences) == ("equal", ("planned_steps",), ())


def test_an_incomplete_last_window_is_listed_but_does_not_decide():
    verdict = equal_work(trace(planned_steps=300.0), trace(planned_steps=301.0))
    assert verdict.verdict == "equal"
    assert [d.quantity for d in verdict.differences] == ["planned_steps"]


def test_steps_that_plan_the_same_samples_in_all_are_noted():
    verdict = equal_work(trace(samples_per_step=4.0, planned_steps=150.0), trace())
    note = next(d.note for d in verdict.differences if d.quantity == "planned_steps")
    assert "600 samples in all" in note


@pytest.mark.parametrize(
    ("changes", "quantity"),
    [
        ({"micro_steps_per_step": 2.0}, "micro_steps_per_step"),
        ({"world_size": 2}, "world_size"),
        ({"wrapper": "DataParallel"}, "wrapper"),
        ({"autocast": "bfloat16"}, "autocast"),
    ],
)
def test_organisation_is_listed_and_does_not_decide(changes: dict[str, Any], quantity: str):
    verdict = equal_work(trace(**changes), trace())
    assert verdict.verdict == "equal"
    assert [d.quantity for d in verdict.differences] == [quantity]
    assert "organised differently" in verdict.sentence


@pytest.mark.parametrize(
    ("changes", "quantity", "words"),
    [
        ({"trainable_parameters": 10}, "trainable_parameters", "a trains 10 parameters, b 1,000"),
        ({"forward_per_backward": 2.0}, "forward_per_backward", "a runs 2 forwards per block and backward, b 1"),
        ({"matmul_dtypes": {"bfloat16": 9.0, "float32": 1.0}}, "matmul_dtypes", "in bfloat16, b in float32"),
        ({"padding_share": 0.4}, "padding_share", "40% of a's tokens are padding, 0% of b's"),
    ],
)
def test_work_per_step_decides(changes: dict[str, Any], quantity: str, words: str):
    verdict = equal_work(trace(**changes), trace())
    assert verdict.verdict == "different"
    assert [d.quantity for d in verdict.differences] == [quantity]
    assert words in verdict.sentence


def test_samples_unseen_on_one_side_leave_it_undecided_unless_something_decides():
    verdict = equal_work(trace(samples_per_step=None), trace())
    assert verdict.verdict == "undecided"
    assert "samples of a could not be observed" in verdict.sentence
    assert equal_work(trace(samples_per_step=None, trainable_parameters=5), trace()).verdict == "different"


def test_tokens_unseen_on_one_side_leave_it_undecided_on_both_it_is_an_image_model():
    assert equal_work(trace(tokens_per_step=None), trace()).verdict == "undecided"
    images = trace(tokens_per_step=None, padding_share=None)
    verdict = equal_work(images, images)
    assert (verdict.verdict, verdict.unknown) == ("equal", ())
    assert verdict.sentence == "Equal work: 2 samples per step, 1 micro-step, on both sides."


def test_tokens_of_other_batches_differ_by_chance():
    a = trace(steps([60, 70, 66, 58, 74, 62], salt="a"), tokens_per_step=65.0)
    b = trace(steps([68, 58, 72, 60, 64, 76], salt="b"), tokens_per_step=66.3)
    verdict = equal_work(a, b)
    assert verdict.verdict == "equal"
    assert "differ by no more than chance" in verdict.sentence
    assert per_unit(a, b) == "step"


def test_padding_to_a_maximum_is_not_chance():
    real = [60, 70, 66, 58, 74, 62]
    a = trace(
        steps([256] * 6, real=real, salt="a"), tokens_per_step=256.0, real_tokens_per_step=65.0, padding_share=0.75
    )
    b = trace(steps(real, real=real, salt="b"), tokens_per_step=65.0, real_tokens_per_step=65.0)
    verdict = equal_work(a, b)
    assert verdict.verdict == "different"
    assert [d.quantity for d in verdict.differences] == ["tokens_per_step", "padding_share"]
    assert per_unit(a, b) == "step"


def test_a_large_difference_inside_the_noise_is_undecided():
    a = trace(steps([20, 200, 30], salt="a"), tokens_per_step=83.3)
    b = trace(steps([190, 20, 240], salt="b"), tokens_per_step=150.0)
    verdict = equal_work(a, b)
    assert (verdict.verdict, verdict.unknown) == ("undecided", ("tokens_per_step",))
    assert "too few to tell a difference from chance" in verdict.sentence


def test_tokens_of_the_same_batches_are_compared_exactly():
    a = trace(steps([64, 60, 64]), tokens_per_step=62.7)
    assert equal_work(a, trace(steps([64, 62, 64]), tokens_per_step=63.3)).verdict == "different"
    longer_run = trace(steps([64, 60, 64, 10]), tokens_per_step=49.5)
    assert equal_work(a, longer_run).verdict == "equal"


def test_a_smaller_last_batch_in_one_run_is_not_other_work():
    a = trace(steps([64] * 3), samples_per_step=2.0)
    assert equal_work(a, trace(steps([64] * 3), samples_per_step=1.8)).verdict == "equal"


def test_padding_share_is_taken_loosely_over_other_batches():
    real_a, real_b = [58, 60, 59, 61], [60, 61, 60, 61]
    a = trace(steps([64] * 4, real=real_a, salt="a"), padding_share=0.07)
    b = trace(steps([64] * 4, real=real_b, salt="b"), padding_share=0.055)
    assert equal_work(a, b).verdict == "equal"
    same = trace(steps([64] * 4, real=real_b, salt="a"), padding_share=0.055)
    assert names(a, same) == ["padding_share"]


def test_longer_samples_make_the_unit_a_real_token():
    a = trace(steps([512] * 3, real=[512] * 3, salt="a"), tokens_per_step=512.0, real_tokens_per_step=512.0)
    b = trace(steps([64] * 3, real=[40, 44, 50], salt="b"), real_tokens_per_step=44.7)
    assert per_unit(a, b) == "token"
    assert per_unit(trace(real_tokens_per_step=512.0), trace(real_tokens_per_step=44.0)) == "token"
    assert per_unit(a, trace(steps([64] * 3, salt="b"))) == "step"


def test_labels_are_compared_per_sample_and_do_not_decide():
    verdict = equal_work(trace(labels_per_step=60.0), trace(labels_per_step=10.0))
    assert (verdict.verdict, [d.quantity for d in verdict.differences]) == ("equal", ["labels_per_step"])
    assert names(trace(labels_per_step=60.0, samples_per_step=4.0), trace(labels_per_step=30.0)) == ["samples_per_step"]


def test_matmul_dtype_is_the_most_frequent():
    assert matmul_dtype(trace(matmul_dtypes={"float32": 1.0, "bfloat16": 3.0})) == "bfloat16"
    assert matmul_dtype(trace(matmul_dtypes={})) is None


def test_a_stored_trace_gives_the_same_verdict():
    a = trace(steps([60, 70, 66], salt="a"), samples_per_step=4.0, matmul_dtypes={"bfloat16": 2.0})
    b = trace(steps([64, 62, 61], salt="b"), plans=(Planned(quantity="steps", value=300.0, source="loader"),))
    stored = tuple(decode(Trace, encode(one)) for one in (a, b))
    assert equal_work(*stored) == equal_work(a, b)
    assert per_unit(*stored) == per_unit(a, b)
