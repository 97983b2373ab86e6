"""Clipping on one side, and its ablation."""

import math
import sys
import types

import pytest
import torch

from bareloop.diagnosis.causes.gradient_clipping_differs import CAUSE
from bareloop.trace import FunctionCount

FIVE = {"transformers": "5.24.0"}


def test_the_side_that_clips_is_reported(make_trace):
    call = FunctionCount(
        file="/x/torch/nn/utils/clip_grad.py", line=1, function="clip_grad_norm_", per_step=1.0, caller="train.py:9"
    )
    sick = make_trace(max_grad_norm=1.0, clipped_share=0.5, counts={"functions": (call,)})
    none = make_trace()
    evidence = CAUSE.contrast(sick, none)
    assert evidence is not None
    assert evidence.counts == {"max_grad_norm": 1.0, "other_max_grad_norm": None, "clipped_share": 0.5}
    assert evidence.location == "train.py:9"
    assert "50%" in evidence.text
    assert CAUSE.contrast(none, sick) is None
    assert CAUSE.contrast(sick, sick) is None


def test_the_smaller_norm_is_reported_and_an_infinite_one_is_a_call(make_trace):
    one, half, infinite = (make_trace(max_grad_norm=limit) for limit in (1.0, 0.5, math.inf))
    assert CAUSE.contrast(half, one) is not None and CAUSE.contrast(one, half) is None
    assert CAUSE.contrast(infinite, make_trace()) is not None
    assert CAUSE.contrast(one, infinite) is not None and CAUSE.contrast(infinite, one) is None


def test_explain_reports_only_a_norm_that_clips_nothing(make_trace):
    evidence = CAUSE.detect(make_trace(max_grad_norm=math.inf))
    assert evidence is not None and "clips nothing" in evidence.text
    assert CAUSE.detect(make_trace(max_grad_norm=1.0)) is None


def test_the_setting_depends_on_the_version(make_trace):
    def trace(framework, packages):
        return make_trace(framework=framework, packages=packages, max_grad_norm=1.0)

    assert CAUSE.setting(trace("transformers", {"transformers": "4.52.4"})) == "max_grad_norm=0"
    five = trace("transformers", FIVE)
    assert CAUSE.setting(five) is None
    assert "infinite norm" in CAUSE.fix(five, CAUSE.contrast(five, make_trace()))
    assert CAUSE.setting(trace("lightning", {"lightning": "2.6.6"})) == "gradient_clip_val=None"
    assert CAUSE.setting(trace(None, {})) is None


def test_ablated_clip_leaves_gradients_and_everything_is_put_back(untouched):
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.full((3,), 10.0)
    with untouched():
        with CAUSE.ablate({"device": "cpu"}):
            assert torch.nn.utils.clip_grad_norm_([weight], 1.0).item() == 0.0
        assert weight.grad.tolist() == [10.0, 10.0, 10.0]
        with pytest.raises(KeyError), CAUSE.ablate({"device": "cpu"}):
            raise KeyError
    torch.nn.utils.clip_grad_norm_([weight], 1.0)
    assert weight.grad.norm().item() == pytest.approx(1.0, rel=1e-4)


def test_the_profilers_wrapper_is_asked_to_stand_aside(monkeypatch, untouched):
    patches = types.ModuleType("bareloop.profiler.probes.patches")
    code = "clip_override = None\ndef clip(*args):\n    return clip_override(*args) if clip_override else 'clipped'\n"
    exec(code, patches.__dict__)
    monkeypatch.setitem(sys.modules, patches.__name__, patches)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", patches.clip)
    imported_by_name = torch.nn.utils.clip_grad_norm_
    with untouched(), CAUSE.ablate({}):
        assert imported_by_name([], 1.0).item() == 0.0
    assert patches.clip_override is None
    assert imported_by_name([], 1.0) == "clipped"
