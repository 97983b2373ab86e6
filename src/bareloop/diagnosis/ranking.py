"""Findings in the order a reader needs them, and what they leave unexplained."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from bareloop.diagnosis.evidence import Combined, Finding, SpeedVerdict, Unexplained
from bareloop.diagnosis.wording import milliseconds

__all__ = ["order", "unexplained"]

_STATUSES = ("shown", "counted", "refuted", "not_examined")


def order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Shown first by largest saving, then counted (differences of work and math before mere costs), refuted, not examined.

    Equals keep their order.

    Raises:
        ValueError: a finding has a status that is none of these.
    """
    return tuple(sorted(findings, key=_rank))


def _rank(finding: Finding) -> tuple[int, int, float]:
    if finding.status not in _STATUSES:
        raise ValueError(
            f"finding {finding.cause!r} has status {finding.status!r}; it must be one of {', '.join(_STATUSES)}"
        )
    saving = -math.inf if finding.saving_s_per_step is None else finding.saving_s_per_step
    # Counted without an ablation is a difference of work or math; counted with one is a cost too small to resolve.
    cost = finding.status == "counted" and finding.saving_s_per_step is not None and not finding.changes_math
    return _STATUSES.index(finding.status), int(cost), -saving


def unexplained(
    speed: SpeedVerdict, findings: Sequence[Finding], together: Sequence[Combined] = ()
) -> Unexplained | None:
    """What is left of b's time per step over a's when each side is taken without its causes, seconds per step.

    A side's causes are what taking them all away at once was shown to save, or else the shown causes, one by one: savings of
    causes that overlap do not add up; then more is explained than there is, and the sentence says so. A cause that was
    shown in both is taken off both. Half-widths add in quadrature: the savings are measured in turns of their own.

    Returns None when the verdict has no numbers.

    Raises:
        ValueError: a shown finding has no saving or no interval.
    """
    a, b = speed.a_s_per_step, speed.b_s_per_step
    if a is None or b is None or not speed.ratio or speed.low is None or speed.high is None:
        return None
    at_once = {one.script: one for one in together if one.status == "shown"}
    alone = [finding for finding in findings if finding.status == "shown" and finding.script not in at_once]
    shown = [*at_once.values(), *alone]
    difference = b - a
    # The ratio's relative interval is the same per step, sample and token: the counts are exact.
    half = b * (speed.high - speed.low) / (2 * speed.ratio)
    rest, squares = difference, half * half
    for one in shown:
        saving, spread = _saving(one)
        rest += saving if one.script == "a" else -saving
        squares += spread * spread
    left = math.sqrt(squares)
    result = Unexplained(
        s_per_step=rest,
        low=rest - left,
        high=rest + left,
        # A share of a difference that may be nothing says nothing.
        share=rest / difference if abs(difference) > half else None,
    )
    return replace(result, sentence=_sentence(speed, difference, half, result, _whose(at_once, alone)))


def _whose(at_once: Mapping[str, Combined], alone: Sequence[Finding]) -> str:
    """What the explained part was measured on, in words; empty when nothing was shown."""
    parts = [f"all {len(one.causes)} causes of {script} taken away at once" for script, one in sorted(at_once.items())]
    return " and ".join(parts + (["the shown causes"] if alone else []))


def _saving(finding: Finding | Combined) -> tuple[float, float]:
    """(saving, half-width of its interval), seconds per step."""
    if isinstance(finding, Combined):
        return finding.saving_s_per_step, (finding.high - finding.low) / 2
    if finding.saving_s_per_step is None or finding.low is None or finding.high is None:
        raise ValueError(
            f"finding {finding.cause!r} of script {finding.script!r} is shown without a saving and its interval;"
            f" a shown finding comes from an ablation, which gives all three"
        )
    return finding.saving_s_per_step, (finding.high - finding.low) / 2


def _sentence(speed: SpeedVerdict, difference: float, half: float, rest: Unexplained, shown: str) -> str:
    """The remainder in words, times counted in the direction of the difference."""
    resolved = abs(difference) > half
    more, less = ("b", "a") if difference > 0 else ("a", "b")
    sign = 1 if difference > 0 else -1
    bounds = sorted((sign * rest.low, sign * rest.high))
    interval = f"{milliseconds(bounds[0])} to {milliseconds(bounds[1])}"
    explained, remaining = milliseconds(sign * (difference - rest.s_per_step)), milliseconds(sign * rest.s_per_step)
    amount = milliseconds(abs(difference))
    if resolved:
        start = f"{more} takes {amount} per step more than {less}"
    else:
        start = f"{more} takes {amount} per step more than {less}, which this run can't tell from nothing"
    if not shown:
        end = f"no cause was shown to save time{', so all of it is unexplained' if resolved else ''}"
    elif rest.low <= 0 <= rest.high:
        end = f"{shown} account for {explained}, and what is left ({interval}) can't be told from nothing"
    elif sign * rest.s_per_step < 0:
        end = (
            f"{shown} account for {explained}, which is more than there is: they overlap,"
            f" or {less} has a cost that was not shown"
        )
    else:
        share = "" if rest.share is None else f", {rest.share:.0%} of it"
        end = f"{shown} account for {explained}, and {remaining} ({interval}{share}) is unexplained"
    work = (
        ""
        if speed.per == "step"
        else f"; their steps do not do the same work, so the ratio per {speed.per} is the fair one"
    )
    return f"{start}; {end}{work}."
