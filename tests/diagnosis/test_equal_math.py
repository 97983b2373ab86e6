import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from bareloop.diagnosis.equal_math import equal_math
from bareloop.diagnosis.evidence import MathVerdict
from bareloop.trace import Environment, Group, Ledger, Optimizer, ProcessFacts, StepFacts, Trace, decode, encode

Change = Callable[[StepFacts], StepFacts]


def adamw(*groups: tuple[float, int], name: str = "AdamW") -> tuple[Optimizer, ...]:
    made = tuple(Group(learning_rate=1e-3, weight_decay=decay, tensors=1, elements=size) for decay, size in groups)
    return (Optimizer(name=name, fused=None, foreach=None, groups=made),)


def steps(
    count: int = 6, *, rows: Callable[[int], tuple[str, ...]] | None = None, **fields: Any
) -> tuple[StepFacts, ...]:
    made = []
    for index in range(1, count + 1):
        own = rows(index) if rows else (f"r{2 * index}", f"r{2 * index + 1}")
        step = StepFacts(
            index=index,
            batch="+".join(own),
            rows=own,
            samples=len(own),
            loss=4.0 / index,
            gradient_norm=2.0 / index,
            applied_gradient_norm=2.0 / index,
            learning_rates=(1e-3,),
            parameters=10.0 + index,
        )
        made.append(replace(step, **fields))
    return tuple(made)


def changed(one: tuple[StepFacts, ...], index: int, **fields: Any) -> tuple[StepFacts, ...]:
    return tuple(replace(step, **fields) if step.index == index else step for step in one)


def scaled(one: tuple[StepFacts, ...], quantity: str, factor: float) -> tuple[StepFacts, ...]:
    return tuple(replace(step, **{quantity: getattr(step, quantity) * factor}) for step in one)


def trace(*ranks: tuple[StepFacts, ...], **ledger: Any) -> Trace:
    work = Ledger(**{"optimizers": adamw((0.0, 100)), **ledger})
    processes = tuple(
        ProcessFacts(rank=rank, pid=rank, environment=Environment(), work=work, steps=own)
        for rank, own in enumerate(ranks)
    )
    return Trace(script="t.py", command=("t.py",), processes=processes, work=work)


def quantities(verdict: MathVerdict) -> list[tuple[int | None, str]]:
    return [(difference.step, difference.quantity) for difference in verdict.differences]


def test_equal_to_the_bit():
    verdict = equal_math(trace(steps()), trace(steps()))
    assert (verdict.verdict, verdict.first_difference, verdict.differences) == ("equal", None, ())
    assert (verdict.steps_compared, verdict.largest_relative_difference) == (6, 0.0)
    assert verdict.sentence == (
        "Equal math: batches, losses, gradient norms and parameters of the first 6 steps are equal to the bit."
    )


def test_rounding_is_equal_but_not_to_the_bit():
    verdict = equal_math(trace(scaled(steps(), "loss", 1 + 1e-6)), trace(steps()))
    assert verdict.verdict == "equal"
    assert verdict.largest_relative_difference == pytest.approx(1e-6, rel=1e-3)
    assert "bit" not in verdict.sentence


def test_other_batches_end_the_walk_and_settings_are_judged_still():
    a = trace(steps(rows=lambda i: (f"a{i}", f"A{i}"), loss=1.0, max_grad_norm=1.0, applied_gradient_norm=0.3))
    b = trace(steps(), optimizers=adamw((0.01, 90), (0.0, 10)))
    verdict = equal_math(a, b)
    assert verdict.first_difference == {"step": 1, "quantity": "batch"}
    assert quantities(verdict) == [(1, "batch"), (1, "max_grad_norm"), (1, "weight_decay")]
    assert "batches differ from step 1: 0 of 12 samples of the first 6 steps in common" in verdict.sentence
    assert "so loss, gradients and parameters can't be compared after that" in verdict.sentence
    assert "a clips gradients to norm 1, b does not clip" in verdict.sentence
    assert verdict.largest_relative_difference is None


def test_another_order_of_the_same_samples_is_said():
    verdict = equal_math(trace(steps(rows=lambda i: (f"r{i}",))), trace(steps(rows=lambda i: (f"r{7 - i}",))))
    assert verdict.first_difference == {"step": 1, "quantity": "batch"}
    assert verdict.differences[0].note == "the same 6 samples in another order over the first 6 steps"


def test_batches_that_part_later_are_compared_before():
    verdict = equal_math(trace(steps()), trace(changed(steps(), 4, batch="x", rows=("x", "y"))))
    assert verdict.first_difference == {"step": 4, "quantity": "batch"}
    assert verdict.differences[0].note == "4 of 6 samples of steps 4 to 6 in common"
    assert verdict.largest_relative_difference == 0.0


def test_more_samples_in_a_step_are_another_batch():
    verdict = equal_math(trace(steps(rows=lambda i: tuple(f"r{4 * i + j}" for j in range(4)))), trace(steps()))
    assert verdict.differences[0].note.startswith("a consumes 4 samples in step 1, b 2; ")


def test_loss_not_divided_by_the_accumulation():
    a = trace(scaled(steps(micro_steps=8), "loss", 8.0))
    verdict = equal_math(a, trace(steps(micro_steps=8)))
    assert verdict.first_difference == {"step": 1, "quantity": "loss"}
    assert quantities(verdict) == [(1, "loss")]
    assert verdict.differences[0].note == (
        "a is 8 times b: the loss is not divided by the accumulation of 8 micro-steps"
    )


def test_loss_difference_names_labels_and_dtypes():
    a = trace(scaled(steps(labels=60), "loss", 1.01), matmul_dtypes={"bfloat16": 1.0})
    b = trace(steps(labels=20), matmul_dtypes={"float32": 1.0})
    note = equal_math(a, b).differences[0].note
    assert "60 labels count in the loss of a, 20 in b's" in note
    assert "bfloat16 in a, float32 in b" in note


def test_half_precision_on_both_sides_is_given_room():
    half = {"matmul_dtypes": {"bfloat16": 1.0}}
    a = scaled(steps(), "loss", 1.0005)
    assert equal_math(trace(a, **half), trace(steps(), **half)).verdict == "equal"
    assert equal_math(trace(a), trace(steps())).verdict == "different"


@pytest.mark.parametrize(("quantity", "within"), [("loss", 1e-5), ("gradient_norm", 1e-4), ("parameters", 1e-5)])
def test_tolerance_of_each_number_grows_by_step(quantity: str, within: float):
    base = steps()
    for step in (1, 4):
        value = getattr(base[step - 1], quantity)
        inside = trace(changed(base, step, **{quantity: value * (1 + 0.9 * within * step)}))
        outside = trace(changed(base, step, **{quantity: value * (1 + 1.2 * within * step)}))
        assert equal_math(inside, trace(base)).verdict == "equal"
        assert equal_math(outside, trace(base)).first_difference == {"step": step, "quantity": quantity}


def test_nan_on_one_side_is_a_difference_on_both_it_is_not():
    nan = changed(steps(), 2, loss=math.nan)
    assert equal_math(trace(nan), trace(steps())).first_difference == {"step": 2, "quantity": "loss"}
    assert equal_math(trace(nan), trace(nan)).verdict == "equal"


def test_a_clip_that_bites_is_the_first_difference_after_equal_gradients():
    a = trace(steps(max_grad_norm=1.0, applied_gradient_norm=0.3, parameters=77.0))
    verdict = equal_math(a, trace(steps()))
    assert verdict.first_difference == {"step": 1, "quantity": "max_grad_norm"}
    assert quantities(verdict) == [(1, "max_grad_norm")]
    assert (verdict.differences[0].a, verdict.differences[0].b) == (1.0, None)
    assert "it changed the gradients of a in 6 of 6 observed steps" in verdict.sentence
    assert (
        "batches, losses and gradient norms of the first step are equal to the bit, but parameters" in verdict.sentence
    )


def test_a_clip_counts_from_the_step_it_first_bites():
    a = changed(steps(max_grad_norm=5.0), 3, applied_gradient_norm=0.1)
    assert equal_math(trace(a), trace(steps())).first_difference == {"step": 3, "quantity": "max_grad_norm"}


def test_a_clip_that_never_bites_is_a_difference_of_settings():
    verdict = equal_math(trace(steps(max_grad_norm=5.0)), trace(steps()))
    assert verdict.verdict == "different"
    assert verdict.first_difference == {"step": 1, "quantity": "max_grad_norm"}
    assert "did not change the gradients in the observed steps" in verdict.differences[0].note
    assert "equal to the bit" in verdict.sentence
    with_loss = equal_math(trace(scaled(steps(max_grad_norm=5.0), "parameters", 2.0)), trace(steps()))
    assert with_loss.first_difference == {"step": 1, "quantity": "parameters"}


def test_an_infinite_clip_equals_no_clip_unless_gradients_are_not_finite():
    a = steps(max_grad_norm=math.inf)
    assert equal_math(trace(a), trace(steps())).verdict == "equal"
    bad = {"gradient_norm": math.inf, "applied_gradient_norm": math.nan}
    verdict = equal_math(trace(changed(a, 2, **bad)), trace(changed(steps(), 2, **bad)))
    assert verdict.first_difference == {"step": 2, "quantity": "max_grad_norm"}


def test_gradients_changed_without_a_clip_call():
    verdict = equal_math(trace(steps(applied_gradient_norm=0.1)), trace(steps()))
    assert verdict.first_difference == {"step": 1, "quantity": "applied_gradient_norm"}
    assert "no clip call explains it" in verdict.sentence


def test_learning_rate_is_listed_at_its_first_differing_step():
    a = changed(steps(learning_rates=(1e-3, 1e-3)), 3, learning_rates=(9e-4, 9e-4), parameters=50.0)
    verdict = equal_math(trace(a), trace(steps()))
    assert quantities(verdict) == [(3, "learning_rate")]
    assert (verdict.differences[0].a, verdict.differences[0].b) == (9e-4, 1e-3)
    assert equal_math(trace(steps(learning_rates=(1e-3 * (1 + 1e-8),))), trace(steps())).verdict == "equal"


def test_weight_decay_with_exempt_layer_norms_differs_from_decay_on_all():
    a, b = trace(steps(), optimizers=adamw((0.01, 100))), trace(steps(), optimizers=adamw((0.01, 90), (0.0, 10)))
    verdict = equal_math(a, b)
    assert quantities(verdict) == [(1, "weight_decay")]
    assert (verdict.differences[0].a, verdict.differences[0].b) == (0.01, (0.01, 0.0))
    assert verdict.differences[0].note == (
        "weight decay 0.01 in a, 0.01 on 90 parameters and 0 on 10 parameters (mean 0.009) in b"
    )
    regrouped = trace(steps(), optimizers=adamw((0.0, 40), (0.01, 90), (0.0, 10)))
    other_cut = trace(steps(), optimizers=adamw((0.01, 90), (0.0, 50)))
    assert equal_math(regrouped, other_cut).verdict == "equal"


def test_optimizer_class_differs_except_adam_without_decay():
    def with_(name: str, decay: float) -> Trace:
        return trace(steps(), optimizers=adamw((decay, 100), name=name))

    assert quantities(equal_math(with_("SGD", 0.0), with_("AdamW", 0.0))) == [(1, "optimizer")]
    assert quantities(equal_math(with_("Adam", 0.1), with_("AdamW", 0.1))) == [(1, "optimizer")]
    assert equal_math(with_("Adam", 0.0), with_("AdamW", 0.0)).verdict == "equal"


def test_two_ranks_against_one_process_on_the_same_samples():
    one = trace(steps())
    ranks = [
        tuple(
            replace(step, rows=(step.rows[r],), batch=step.rows[r], samples=1, loss=(step.loss or 0) + (r or -1) * 0.5)
            for step in steps()
        )
        for r in (0, 1)
    ]
    assert equal_math(trace(*ranks), one).verdict == "equal"
    assert (
        equal_math(trace(*(scaled(rank, "loss", 2.0) for rank in ranks)), one)
        .differences[0]
        .note.startswith("a is 2 times b: the loss is multiplied by the 2 processes")
    )


def test_shards_add_up_in_squares():
    ranks = [
        tuple(replace(step, gradient_norm=(step.gradient_norm or 0) * part) for step in steps(rows=lambda i: (f"{i}",)))
        for part in (0.6, 0.8)
    ]
    whole = [steps(rows=lambda i: (f"{i}",))] * 2
    assert equal_math(trace(*ranks, wrapper="FSDP2"), trace(*whole)).verdict == "equal"


def test_unseen_batches_are_undecided_unless_a_setting_differs():
    blind = trace(tuple(replace(step, batch=None, rows=()) for step in steps()))
    verdict = equal_math(blind, trace(steps()))
    assert (verdict.verdict, verdict.first_difference) == ("undecided", None)
    assert "the batches of a could not be observed from step 1" in verdict.sentence
    clipped = equal_math(blind, trace(steps(max_grad_norm=0.1, applied_gradient_norm=0.1)))
    assert clipped.verdict == "different"
    assert "the numbers can't be compared" in clipped.sentence


def test_no_step_or_no_number_in_common_is_undecided():
    verdict = equal_math(trace(()), trace(steps()))
    assert (verdict.verdict, verdict.steps_compared) == ("undecided", 0)
    assert "no recorded step in common" in verdict.sentence
    bare = steps(loss=None, gradient_norm=None, applied_gradient_norm=None, parameters=None)
    assert "no loss" in equal_math(trace(bare), trace(steps())).sentence


def test_a_step_that_only_one_side_skipped():
    a = changed(steps(), 2, skipped=True, parameters=11.0)
    verdict = equal_math(trace(a), trace(steps()))
    assert verdict.first_difference == {"step": 2, "quantity": "parameters"}
    assert "GradScaler skipped this step in a only" in verdict.sentence


def test_a_stored_trace_gives_the_same_verdict():
    a = trace(
        steps(max_grad_norm=math.inf, loss=math.nan),
        optimizers=(),
        weight_decay=(0.01, 0.0),
        learning_rate=(1e-3, 1e-4),
    )
    b = trace(steps(max_grad_norm=1.0, applied_gradient_norm=0.1), optimizers=(), weight_decay=0.01)
    stored = tuple(decode(Trace, encode(one)) for one in (a, b))
    verdict = equal_math(*stored)
    assert {d.quantity for d in verdict.differences} == {"loss", "max_grad_norm", "weight_decay"}
    assert encode(verdict) == encode(equal_math(a, b))
