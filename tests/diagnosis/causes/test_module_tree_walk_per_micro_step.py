"""Walks of the module tree: counting, and returning at once."""

import pytest
import torch

from bareloop.diagnosis.causes.module_tree_walk_per_micro_step import CAUSE
from bareloop.trace import FunctionCount


def test_a_walk_per_micro_step_is_found(make_trace):
    call = FunctionCount(
        file="/x/torch/module.py", line=1, function="Module.train", per_step=136.0, caller="train.py:7"
    )
    counts = {
        "modules": 34,
        "module_train_calls_per_step": 136.0,
        "micro_steps_per_step": 4.0,
        "functions": (call,),
    }
    evidence = CAUSE.detect(make_trace(counts=counts))
    assert evidence is not None
    assert evidence.counts == {"module_train_calls_per_step": 136.0, "modules": 34, "walks_per_micro_step": 1.0}
    assert evidence.location == "train.py:7"


@pytest.mark.parametrize(
    "counts",
    [
        None,
        {"modules": 34},
        {"modules": 34, "module_train_calls_per_step": 6.8},
        {"modules": 1, "module_train_calls_per_step": 1.0},
    ],
    ids=["no counts", "no walk", "an evaluation every ten steps", "one module"],
)
def test_fewer_walks_are_not(make_trace, counts):
    assert CAUSE.detect(make_trace(counts=counts)) is None


def test_no_setting_exists_in_transformers_and_the_fix_says_so(make_trace):
    trace = make_trace(
        framework="transformers",
        packages={"transformers": "5.24.0"},
        counts={"modules": 2, "module_train_calls_per_step": 2.0},
    )
    assert CAUSE.setting(trace) is None
    fix = CAUSE.fix(trace, CAUSE.detect(trace))
    assert "training_step" in fix and "no setting of transformers 5.24.0" in fix


def test_only_changes_of_mode_walk(untouched):
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout())
    model[1].eval()
    with untouched():
        with CAUSE.ablate({}):
            assert model.train() is model
            assert model[1].training is False, "nobody walked"
            model.eval()
            assert not model[0].training
            model.train()
            assert model[1].training is True
        model[1].eval()
        model.train()
        assert model[1].training is True
        with pytest.raises(KeyError), CAUSE.ablate({}):
            raise KeyError
