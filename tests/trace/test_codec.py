"""A record survives JSON."""

import json
import math

import pytest

from bareloop.trace import (
    Environment,
    Group,
    Ledger,
    Optimizer,
    Planned,
    ProcessFacts,
    StepFacts,
    Trace,
    decode,
    encode,
)

LEDGER = Ledger(
    samples_per_step=4.0,
    max_grad_norm=math.inf,
    weight_decay=(0.0, 0.01),
    learning_rate=5e-5,
    plans=(Planned(quantity="steps", value=3.0, source="range(3) at train.py:4"),),
    optimizers=(
        Optimizer(
            name="AdamW",
            fused=None,
            foreach=True,
            groups=(Group(learning_rate=math.nan, weight_decay=None, tensors=2, elements=9),),
        ),
    ),
    matmul_dtypes={"float32": 12.0},
)


def test_a_trace_survives_strict_json() -> None:
    steps = (StepFacts(index=1, rows=("a", "b"), loss=-math.inf, learning_rates=(1e-3,)),)
    environment = Environment(packages={"transformers": "5.24.0"})
    process = ProcessFacts(rank=0, pid=1, environment=environment, work=LEDGER, steps=steps)
    trace = Trace(script="t.py", command=("python", "t.py"), processes=(process,), work=LEDGER)
    text = json.dumps(encode(trace), allow_nan=False)
    again = decode(Trace, json.loads(text))
    assert math.isnan(again.work.optimizers[0].groups[0].learning_rate)
    assert encode(again) == encode(trace)
    assert again.work.weight_decay == (0.0, 0.01)
    assert again.work.max_grad_norm == math.inf
    assert again.first.steps == steps


def test_a_number_in_a_union_stays_a_number() -> None:
    assert decode(Ledger, encode(LEDGER)).learning_rate == 5e-5


def test_a_special_float_in_a_union_is_decoded() -> None:
    assert decode(Ledger, {"learning_rate": "Infinity"}).learning_rate == math.inf


def test_a_string_stays_a_string() -> None:
    assert decode(Planned, {"quantity": "steps", "value": 1, "source": "NaN"}).source == "NaN"


def test_unknown_keys_are_skipped_and_missing_ones_refused() -> None:
    assert decode(StepFacts, {"index": 2, "of_the_future": 1}) == StepFacts(index=2)
    with pytest.raises(TypeError):
        decode(StepFacts, {})
