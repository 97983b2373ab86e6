"""NaN tests: counting them, and taking them away from plain loops and from a live transformers.Trainer."""

import inspect
import math

import pytest
import torch

from bareloop.diagnosis.causes.nan_check_per_step import CAUSE
from bareloop.diagnosis.substitution import NothingToReplace
from bareloop.trace import HostRead

TRAINER = "/x/site-packages/transformers/trainer.py:1922"


def check(location="train.py:20", *, per_step=1.0, in_user_code=True, source="torch.isnan(loss)", kind="nan_check"):
    return HostRead(
        location=location,
        function="_run_epoch",
        source=source,
        kind=kind,
        per_step=per_step,
        phase="other",
        in_user_code=in_user_code,
        op="_local_scalar_dense",
    )


def test_the_trainers_two_reads_per_micro_step(make_trace):
    reads = (
        check(TRAINER, per_step=4.0, in_user_code=False),
        check(TRAINER, per_step=4.0, in_user_code=False, source="torch.isinf(loss)"),
    )
    trace = make_trace(framework="transformers", counts={"host_reads": reads, "micro_steps_per_step": 4.0})
    evidence = CAUSE.detect(trace)
    assert evidence is not None
    assert evidence.counts == {"reads_per_step": 8.0, "reads_per_micro_step": 2.0}
    assert evidence.text.startswith("2 host reads per micro-step")
    assert evidence.data == {"trainer_filter": True, "anomaly_mode": False, "sites": []}
    assert CAUSE.setting(trace) == "logging_nan_inf_filter=False"
    assert CAUSE.fix(trace, evidence) == "Set logging_nan_inf_filter=False."


def test_plain_checks_and_anomaly_mode(make_trace):
    plain = make_trace(counts={"host_reads": (check(),)})
    assert CAUSE.detect(plain).data["sites"] == [["train.py", 20]]
    assert CAUSE.setting(plain) is None
    anomaly = make_trace(counts={"host_reads": (check(source="loss.backward()", kind="value", per_step=9.0),)})
    assert CAUSE.detect(anomaly).data["anomaly_mode"] is True
    assert CAUSE.setting(anomaly) == "torch.autograd.set_detect_anomaly(False)"
    assert CAUSE.detect(make_trace(counts={"host_reads": (check(per_step=0.01),)})) is None
    assert CAUSE.detect(make_trace(counts={"host_reads": (check(kind="value", source="x.item()"),)})) is None


def guards(x):
    start = inspect.currentframe().f_lineno
    answers = [
        bool(torch.isnan(x).any() or torch.isinf(x).any()),
        bool((torch.isnan(x) | torch.isinf(x)).any().item()),
        bool(torch.isfinite(x).all()),
        bool(torch.any(torch.logical_or(x.isnan(), x.isinf()))),
        torch.isnan(x).sum().item(),
        not torch.isfinite(input=x).all().cpu(),
        torch.where(torch.isnan(x), torch.zeros_like(x), x).isnan().any().item(),
        torch.isnan(x)[0].item() if len(torch.isnan(x)) else None,
    ]
    return answers, [[__file__, line] for line in range(start, start + 11)]


def test_known_checks_agree_with_real_ones_on_finite_values(untouched):
    real, lines = guards(torch.ones(3))
    with untouched(), CAUSE.ablate({"sites": lines}):
        assert guards(torch.ones(3))[0] == real


def test_no_check_at_the_lines_looks_at_the_values(untouched):
    _, lines = guards(torch.ones(3))
    broken = torch.full((3,), math.nan)
    with untouched():
        with CAUSE.ablate({"sites": lines}):
            answers = guards(broken)[0]
            assert answers[:6] == [False, False, True, False, 0, False]
            assert bool(torch.isnan(broken).all()), "another line asks the device"
        assert guards(broken)[0][:3] == [True, True, False]
        with pytest.raises(KeyError), CAUSE.ablate({"sites": lines}):
            raise KeyError


def test_anomaly_mode_is_off_inside_and_as_the_script_wants_it_after(untouched):
    with untouched(), torch.autograd.set_detect_anomaly(True, check_nan=False):
        with CAUSE.ablate({"anomaly_mode": True}):
            assert not torch.is_anomaly_enabled()
            torch.autograd.set_detect_anomaly(True)
            assert not torch.is_anomaly_enabled()
        assert torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
    assert not torch.is_anomaly_enabled()


def test_the_filter_needs_a_trainer():
    with pytest.raises(NothingToReplace, match="no live"), CAUSE.ablate({"trainer_filter": True}):
        pass
