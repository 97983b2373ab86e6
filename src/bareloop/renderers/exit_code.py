"""A record as an exit code: what a CI job reads of a report."""

from collections.abc import Iterable, Sequence

from bareloop.diagnosis.evidence import Comparison, Diagnosis, Finding

__all__ = ["REPORTED", "SHOWN", "UNDECIDED", "exit_code"]

REPORTED, SHOWN, UNDECIDED = 0, 1, 5


def exit_code(record: Comparison | Diagnosis, conditions: Sequence[str]) -> int:
    """0, or 1 when one of `conditions` is shown, or else 5 when one of them can't be decided.

    Args:
        conditions: "slower", "unequal-work", "unequal-math" (a comparison only) or "finding".
    """
    answers = {_answer(record, condition) for condition in conditions}
    return SHOWN if SHOWN in answers else UNDECIDED if UNDECIDED in answers else REPORTED


def _answer(record: Comparison | Diagnosis, condition: str) -> int:
    if condition == "finding":
        return _finding(record.findings)
    if isinstance(record, Diagnosis):
        raise ValueError(f"a diagnosis of one script can't answer {condition!r}; it knows 'finding'")
    verdict, shown = {
        "slower": (record.speed.verdict, "slower"),
        "unequal-work": (record.work.verdict, "different"),
        "unequal-math": (record.math.verdict, "different"),
    }[condition]
    return SHOWN if verdict == shown else UNDECIDED if verdict == "undecided" else REPORTED


def _finding(findings: Iterable[Finding]) -> int:
    """A cause that was there and not tried leaves open whether it costs time."""
    statuses = {finding.status for finding in findings}
    return SHOWN if "shown" in statuses else UNDECIDED if "not_examined" in statuses else REPORTED
