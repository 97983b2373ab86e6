"""Counts of parameters per step: finding them, and giving the number of last time."""

import importlib.util
import inspect
import sys
import types
from pathlib import Path

import pytest
import torch

from bareloop.diagnosis.causes.flop_count_per_micro_step import CAUSE
from bareloop.diagnosis.substitution import NothingToReplace
from bareloop.trace import Builtin, FunctionCount

FILE = str(Path(__file__).with_name("counting_script.py"))
FLOPS = FunctionCount(
    file="/x/site-packages/transformers/trainer.py", line=4224, function="Trainer.floating_point_ops", per_step=8.0
)


def test_the_trainers_count_is_found(make_trace):
    trace = make_trace(
        framework="transformers",
        packages={"transformers": "5.24.0"},
        counts={"functions": (FLOPS,), "micro_steps_per_step": 8.0},
    )
    evidence = CAUSE.detect(trace)
    assert evidence is not None
    assert evidence.counts["calls_per_micro_step"] == 1.0
    assert CAUSE.setting(trace) is None
    assert "no setting of transformers 5.24.0" in CAUSE.fix(trace, evidence)


@pytest.fixture(scope="module")
def counting_script():
    spec = importlib.util.spec_from_file_location("counting_script", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["counting_script"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["counting_script"]


@pytest.mark.parametrize("name", ["count_flops", "num_parameters", "main.<locals>.estimate_tokens", "Net.count_params"])
def test_names_of_counts(make_trace, name):
    call = FunctionCount(file="train.py", line=3, function=name, per_step=1.0)
    assert CAUSE.detect(make_trace(counts={"functions": (call,)})) is not None


def test_numel_of_all_parameters_from_one_line_is_found(make_trace):
    line = Builtin(name="numel", location="train.py:30", function="main", per_step=10.0)
    evidence = CAUSE.detect(make_trace(counts={"builtins": (line,)}))
    assert evidence is not None and evidence.data["lines"] == [["train.py", 30]]
    assert "before the loop" in CAUSE.fix(make_trace(), evidence)


@pytest.mark.parametrize(
    "counts",
    [
        None,
        {"functions": (FunctionCount(file="train.py", line=3, function="count_flops", per_step=0.01),)},
        {"functions": (FunctionCount(file="train.py", line=3, function="update", per_step=1.0),)},
        {"functions": (FunctionCount(file="train.py", line=3, function="parameters", per_step=1.0),)},
        {"builtins": (Builtin(name="numel", location="train.py:30", function="main", per_step=1.0),)},
    ],
    ids=["no counts", "rare", "another name", "parameters", "numel of a batch"],
)
def test_other_calls_are_not(make_trace, counts):
    assert CAUSE.detect(make_trace(counts=counts)) is None


def test_functions_give_the_number_of_last_time(untouched, counting_script, monkeypatch):
    importer = types.ModuleType("importer")
    importer.imported_by_name = counting_script.count_parameters
    monkeypatch.setitem(sys.modules, "importer", importer)
    small, large = torch.nn.Linear(1, 1), torch.nn.Linear(9, 9)
    names = ["count_parameters", "Meter.flops", "Meter.num_parameters"]
    before = (dict(vars(counting_script)), dict(vars(counting_script.Meter)), importer.imported_by_name)
    meter = counting_script.Meter()
    with untouched():
        with CAUSE.ablate({"functions": [[FILE, name] for name in names], "lines": []}):
            assert counting_script.count_parameters(small) == 2
            assert counting_script.count_parameters(large) == 2
            assert importer.imported_by_name(large) == 2
            assert (meter.flops(small), meter.flops(large)) == (12, 12)
            assert (meter.num_parameters(small), counting_script.Meter.num_parameters(torch.nn.ReLU())) == (2, 2)
        with pytest.raises(KeyError), CAUSE.ablate({"functions": [[FILE, "Meter.flops"]], "lines": []}):
            raise KeyError
    assert (dict(vars(counting_script)), dict(vars(counting_script.Meter)), importer.imported_by_name) == before
    assert counting_script.count_parameters(large) == 90


def test_a_sum_in_a_line_comes_out_the_same_without_the_walk(untouched, counting_script):
    start = inspect.getsourcelines(counting_script.inline)[1]
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    model[0].bias.requires_grad_(False)
    real = counting_script.inline(model)
    with untouched(), CAUSE.ablate({"functions": [], "lines": [[FILE, start + 2], [FILE, start + 3]]}):
        assert counting_script.inline(model) == real
        assert len(list(model.parameters())) == 4
        extra = torch.nn.Parameter(torch.zeros(5))
        model.register_parameter("extra", extra)
        assert counting_script.inline(model) == real, "the walk was not made again"


def test_what_cant_be_replaced_is_said():
    with (
        pytest.raises(NothingToReplace, match="nested function"),
        CAUSE.ablate({"functions": [[FILE, "main.<locals>.flops"]], "lines": [[FILE, 1]]}),
    ):
        pass
