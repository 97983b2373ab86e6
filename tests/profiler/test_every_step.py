"""Every step, or only some."""

from collections import Counter

from bareloop.profiler.probes.every_step import EveryStep


def test_what_grew_in_each_step_and_what_did_not() -> None:
    calls: Counter[str] = Counter()
    reads: Counter[str] = Counter({"before": 3})
    steps = EveryStep(calls, reads)
    calls.update(["always", "once", "once"])
    reads.update(["late"])
    steps.mark()
    calls.update(["always", "always", "new"])
    reads.update(["late"])
    steps.mark()
    assert steps.grew(calls, "always")
    assert not steps.grew(calls, "once")
    assert not steps.grew(calls, "new")
    assert steps.grew(reads, "late")
    assert not steps.grew(reads, "before")


def test_without_a_mark_nothing_is_ruled_out() -> None:
    calls = Counter({"x": 1})
    assert EveryStep(calls).grew(calls, "x")
