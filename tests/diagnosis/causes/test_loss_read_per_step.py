"""Value reads: which of them count, and reading old values at their lines."""

import inspect

import pytest
import torch

from bareloop.diagnosis import stale_reads
from bareloop.diagnosis.causes.loss_read_per_step import CAUSE
from bareloop.trace import HostRead


def read(**changes):
    basis = {
        "location": "train.py:12",
        "function": "main",
        "source": "loss.item()",
        "kind": "value",
        "per_step": 1.0,
        "phase": "other",
        "op": "_local_scalar_dense",
    }
    return HostRead(**{**basis, **changes})


def counts(*reads):
    return {"host_reads": reads}


def test_a_read_per_step_is_found_with_its_line(make_trace):
    evidence = CAUSE.detect(make_trace(counts=counts(read(), read(location="train.py:13", source="float(norm)"))))
    assert evidence is not None
    assert evidence.counts == {"reads_per_step": 2.0, "lines": 2}
    assert evidence.location == "train.py:12"
    assert evidence.data == {"sites": [["train.py", 12], ["train.py", 13]]}


@pytest.mark.parametrize(
    "other",
    [
        read(per_step=0.01),
        read(kind="optimizer"),
        read(kind="nan_check", source="torch.isnan(loss)"),
        read(phase="data wait"),
        read(function="Model.forward", phase="forward"),
        read(source="scaler.step(optimizer)"),
        read(source="loss.backward()"),
        read(op="nonzero", source="logits[mask]"),
        read(in_user_code=False, source="attention_mask.all()", phase="forward"),
        read(in_user_code=False, source="self.scaler.step(self.optimizer, closure)"),
    ],
    ids=lambda other: f"{other.kind} {other.source}",
)
def test_reads_of_another_kind_are_left_alone(make_trace, other):
    assert CAUSE.detect(make_trace(counts=counts(other))) is None
    assert CAUSE.detect(make_trace(counts=None)) is None


def test_the_trainers_own_reads_have_a_setting(make_trace):
    own = read(in_user_code=False, location="/x/transformers/trainer.py:2257", source="nested_gather(x).mean().item()")
    trace = make_trace(framework="transformers", counts=counts(own))
    assert CAUSE.setting(trace) == "logging_steps=500"
    assert CAUSE.setting(make_trace(framework="transformers", counts=counts(own, read()))) is None
    assert ".item() only" in CAUSE.fix(make_trace(counts=counts(read())), CAUSE.detect(trace))


def read_it(value):
    return value.item(), float(value), f"{value:.1f}", value > 0 and bool(value), value.reshape(1).tolist()


LINE = inspect.getsourcelines(read_it)[1] + 1


def test_a_line_reads_old_values_and_other_lines_new_ones(untouched):
    first, second = torch.tensor(1.0), torch.tensor(2.0)
    with untouched():
        with CAUSE.ablate({"sites": [[__file__, LINE]]}):
            assert read_it(first) == (1.0, 1.0, "1.0", True, [1.0])
            assert read_it(second) == (1.0, 1.0, "1.0", True, [1.0])
            assert second.item() == 2.0
        assert read_it(second) == (2.0, 2.0, "2.0", True, [2.0])
        with CAUSE.ablate({"sites": [[__file__, LINE]]}):
            assert read_it(second)[0] == 1.0, "the value is remembered from turn to turn"
        with pytest.raises(KeyError), CAUSE.ablate({"sites": [[__file__, LINE]]}):
            raise KeyError


def wait_for(value, limit):
    count = 0
    while value.item() < limit:
        value += 1
        count += 1
    return count


def test_a_loop_that_waits_for_a_value_ends():
    line = inspect.getsourcelines(wait_for)[1] + 2
    with CAUSE.ablate({"sites": [[__file__, line]]}):
        assert wait_for(torch.zeros(()), 5) <= stale_reads._REFRESH + 1
