"""Global batch, accumulation, plan and DataParallel: found on the side with more, and only there."""

import pytest

from bareloop.diagnosis.causes import cause
from bareloop.trace import Planned


def test_a_larger_batch_is_reported_once_and_says_what_it_means(make_trace):
    entry = cause("global_batch_differs")
    four = make_trace(framework="transformers", samples_per_step=4.0)
    two = make_trace(samples_per_step=2.0)
    evidence = entry.contrast(four, two)
    assert evidence is not None
    assert evidence.counts == {"samples_per_step": 4.0, "other_samples_per_step": 2.0}
    assert "iterations are not comparable" in evidence.text
    assert entry.contrast(two, four) is None
    assert entry.contrast(four, make_trace(samples_per_step=4.0)) is None
    assert entry.contrast(four, make_trace()) is None
    assert entry.setting(four) == "per_device_train_batch_size"
    assert "to 2 samples" in entry.fix(four, evidence)
    assert "torchrun" in entry.fix(make_trace(samples_per_step=4.0, wrapper="DataParallel"), evidence)


def test_more_micro_steps_are_reported_on_their_side(make_trace):
    entry = cause("accumulation_differs")
    sick = make_trace(framework="lightning", micro_steps_per_step=4.0, samples_per_step=32.0)
    twin = make_trace(micro_steps_per_step=1.0, samples_per_step=32.0)
    evidence = entry.contrast(sick, twin)
    assert evidence is not None
    assert evidence.counts == {"micro_steps_per_step": 4.0, "other_micro_steps_per_step": 1.0}
    assert "32 samples a step in both" in evidence.text
    assert entry.contrast(twin, sick) is None
    assert entry.contrast(sick, sick) is None
    assert entry.setting(sick) == "accumulate_grad_batches"
    assert entry.fix(sick, evidence).startswith("Set accumulate_grad_batches to 1")


def test_data_parallel_is_found_by_its_wrapper(make_trace):
    entry = cause("data_parallel_wrapper")
    evidence = entry.detect(make_trace(wrapper="DataParallel", samples_per_step=4.0, framework="transformers"))
    assert evidence is not None
    assert evidence.counts["samples_per_step"] == 4.0
    assert entry.detect(make_trace(wrapper="DistributedDataParallel")) is None
    assert "CUDA_VISIBLE_DEVICES=0" in (entry.setting(make_trace()) or "")


def test_planned_passes_give_the_exact_factor_and_where_it_was_seen(make_trace):
    entry = cause("planned_passes_differ")
    plan = Planned(quantity="steps", value=240.0, source="transformers.Trainer state.max_steps")
    sick = make_trace(framework="transformers", planned_passes=12.0, planned_steps=240.0, plans=(plan,))
    twin = make_trace(planned_passes=6.0, planned_steps=120.0)
    evidence = entry.contrast(sick, twin)
    assert evidence is not None
    assert evidence.counts["factor"] == 2.0
    assert "exactly 2 times" in evidence.text and "state.max_steps" in evidence.text
    assert "by 2:" in entry.fix(sick, evidence)
    assert entry.contrast(twin, sick) is None
    uneven = entry.contrast(make_trace(planned_passes=10.0), make_trace(planned_passes=6.8))
    assert uneven is not None and "exactly" not in uneven.text and "1.47059 times" in uneven.text


@pytest.mark.parametrize(("samples", "found"), [(8.0, True), (4.0, False), (None, False)])
def test_planned_steps_speak_only_at_equal_samples(make_trace, samples, found):
    more = make_trace(planned_steps=200.0, samples_per_step=8.0)
    less = make_trace(planned_steps=100.0, samples_per_step=samples)
    assert (cause("planned_passes_differ").contrast(more, less) is not None) is found
