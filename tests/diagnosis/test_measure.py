"""Which turns a round holds, with launches that are made up: no process is started."""

import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

import bareloop.diagnosis.measure as measuring
from bareloop.diagnosis.evidence import Cause, Evidence
from bareloop.diagnosis.findings import combined, findings
from bareloop.diagnosis.measure import Suspect, measure
from bareloop.profiler.options import Options
from bareloop.profiler.turns import AblationBroke, Launched, Timed

SAVINGS = {"a:small": 0.0001, "a:other": 0.0002, "a:all": 0.0005}
"""Seconds per step that a turn takes less than the 10 ms of a plain one."""


def suspect(code: str, *, ablates: bool = True) -> Suspect:
    cause = Cause(code=code, title=code, ablate=(lambda data: nullcontext()) if ablates else None)
    return Suspect(script="a", cause=cause, evidence=Evidence(text=code, counts={}))


def script() -> SimpleNamespace:
    environment = SimpleNamespace(resident_bytes=1, prefetched_batches=0)
    work = SimpleNamespace(micro_steps_per_step=1.0, planned_steps=None)
    process = SimpleNamespace(environment=environment)
    trace = SimpleNamespace(
        processes=(process,), first=process, work=work, pilot_s_per_step=0.01, startup_s=1.0, script="a.py"
    )
    return SimpleNamespace(trace=trace, command=None, optimizers=1)


def timed(key: str, number: int) -> Timed:
    s = 0.010 - SAVINGS.get(key, 0.0) + 1e-7 * number
    return Timed(steps=10, s_per_step=s, median_s_per_step=s, phases={}, probe_s=0.0, clock="host")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, list[str]]]:
    """Key -> codes of the causes away, of each launch made; causes named "broken" break the script."""
    made: list[dict[str, list[str]]] = []

    def launch(participants, kinds, orders, **_):
        away = {k.key: [c["module"].rsplit(".", 1)[1] for c in (k.ablation or {"causes": []})["causes"]] for k in kinds}
        made.append(away)
        for key, codes in away.items():
            if "broken" in codes:
                raise AblationBroke(key, "ValueError: it broke")
        return Launched(rounds=tuple({kind.key: timed(kind.key, n) for kind in kinds} for n in range(len(orders))))

    monkeypatch.setattr(measuring, "time_launch", launch)
    return made


def run(suspects: list[Suspect], **options) -> measuring.Measured:
    chosen = Options(budget_s=60, launches=3, **options)
    return measure({"a": script()}, {"a": "a"}, suspects, chosen, time.monotonic(), lambda _: None)


def test_several_causes_are_also_taken_away_at_once(launches):
    seen = [suspect("small"), suspect("other"), suspect("fact", ablates=False)]
    measured = run(seen)
    assert launches[0] == {
        "a": [],
        "a:null": [],
        "a:small": ["small"],
        "a:other": ["other"],
        "a:all": ["small", "other"],
    }
    (one,) = combined(seen, measured)
    assert (one.script, one.causes, one.status) == ("a", ("small", "other"), "shown")
    assert one.saving_s_per_step == pytest.approx(0.0005)
    assert one.low <= one.saving_s_per_step <= one.high


def test_one_cause_has_no_turn_of_all(launches):
    seen = [suspect("small")]
    assert combined(seen, run(seen)) == ()
    assert set(launches[0]) == {"a", "a:null", "a:small"}


def test_a_cause_that_breaks_the_script_is_left_out_of_all(launches):
    seen = [suspect("small"), suspect("broken"), suspect("other")]
    measured = run(seen)
    assert launches[0]["a:all"] == ["small", "broken", "other"]
    assert launches[1]["a:all"] == ["small", "other"]
    assert set(measured.errors) == {"a:broken"}
    assert combined(seen, measured)[0].causes == ("small", "other")


def test_all_breaking_before_the_cause_in_it_is_known_gets_another_try(launches, monkeypatch):
    turns = measuring.time_launch

    def all_first(participants, kinds, orders, **options):
        return turns(participants, sorted(kinds, key=lambda kind: not kind.key.endswith(":all")), orders, **options)

    monkeypatch.setattr(measuring, "time_launch", all_first)
    seen = [suspect("small"), suspect("broken"), suspect("other")]
    measured = run(seen)
    assert ["a:all" in keys for keys in launches] == [True, False, True, True, True]
    assert set(measured.errors) == {"a:broken"}
    assert combined(seen, measured)[0].causes == ("small", "other")


def test_ablations_switched_off_and_rounds_that_never_came_are_told_apart(launches):
    seen = [suspect("small")]
    traces = {"a": script().trace}
    (off,) = findings(seen, traces, run(seen, ablate=False))
    assert (off.status, off.reason) == ("not_examined", "ablations were switched off")
    never = measuring.Measured(launches=run([]).launches, steps_per_turn=10, together=True)
    (missing,) = findings(seen, traces, never)
    assert missing.reason == "no round with it taken away was completed"
