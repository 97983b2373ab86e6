"""The sentences of a report: one per verdict, each with the word that a tired reader looks for."""

from dataclasses import dataclass

from bareloop.diagnosis.evidence import Combined, Comparison, Difference, Finding, MathVerdict, SpeedVerdict
from bareloop.renderers import units
from bareloop.trace import Counts, Ledger, Phases

__all__ = [
    "Verdict",
    "counted",
    "ledger",
    "math",
    "per_step",
    "plan",
    "saving",
    "speed",
    "together",
    "unexplained",
    "work",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A verdict in a word and a sentence."""

    word: str
    style: str
    """rich style of the word."""
    sentences: tuple[str, ...]
    """One paragraph each."""
    basis: str = ""
    """What it rests on."""


def work(record: Comparison) -> Verdict:
    """Do both do the same work?"""
    verdict = record.work
    if verdict.verdict == "equal":
        return Verdict(
            word="equal work", style="bold green", sentences=(_told(verdict.sentence) or _same_work(record),)
        )
    if verdict.verdict == "different":
        sentence = _told(verdict.sentence) or _listed(verdict.differences)
        iterations = () if "not comparable" in sentence else _incomparable(record)
        return Verdict(word="DIFFERENT WORK", style="bold red", sentences=(sentence, *iterations))
    missing = ", ".join(_words(quantity) for quantity in verdict.unknown)
    sentence = _told(verdict.sentence) or f"could not be observed on both sides: {missing or 'the work of a step'}"
    return Verdict(word="UNDECIDED", style="bold yellow", sentences=(sentence,))


def math(record: Comparison) -> Verdict:
    """Do both compute the same numbers?"""
    verdict = record.math
    if verdict.verdict == "equal":
        closeness = verdict.largest_relative_difference
        within = "" if closeness is None else f", largest relative difference {closeness:.1g}"
        sentence = f"the first {units.count(verdict.steps_compared, 'step')} agree{within}"
        return Verdict(word="equal math", style="bold green", sentences=(_told(verdict.sentence) or sentence,))
    if verdict.verdict == "different":
        sentence = _told(verdict.sentence) or _first_difference(verdict) or _listed(verdict.differences)
        return Verdict(word="DIFFERENT MATH", style="bold red", sentences=(sentence,))
    sentence = _told(verdict.sentence) or "too little could be observed to tell"
    return Verdict(word="UNDECIDED", style="bold yellow", sentences=(sentence,))


def _first_difference(verdict: MathVerdict) -> str:
    first = verdict.first_difference
    if first is None:
        return ""
    others = [entry.quantity for entry in verdict.differences if entry.quantity != first.get("quantity")]
    text = f"first at step {first.get('step')}: {_words(str(first.get('quantity')))}"
    return text + (f"; then {', '.join(_words(quantity) for quantity in dict.fromkeys(others))}" if others else "")


def speed(record: Comparison) -> Verdict:
    """How long does b take against a, and what would no difference look like?"""
    verdict = record.speed
    word, style = {
        "slower": ("b is SLOWER", "bold red"),
        "faster": ("b is FASTER", "bold green"),
        "equal": ("equal speed", "bold green"),
    }.get(verdict.verdict, ("UNDECIDED", "bold yellow"))
    if verdict.ratio is None:
        return Verdict(word=word, style=style, sentences=(_told(verdict.sentence) or "no step of both could be timed",))
    sentences = (_ratio_sentence(verdict),)
    if verdict.verdict == "undecided" and verdict.sentence:
        sentences = (*sentences, _told(verdict.sentence))
    return Verdict(word=word, style=style, sentences=sentences, basis=_basis(verdict))


def _ratio_sentence(verdict: SpeedVerdict) -> str:
    """Ratio, interval and control in one line; the unit first when it is not the step."""
    assert verdict.ratio is not None
    per = "real token" if verdict.per == "token" else verdict.per
    digits = 3 if verdict.high is not None and verdict.low is not None and verdict.high - verdict.low < 0.03 else 2
    lead = "" if verdict.per == "step" else f"per {per}, as the work per step differs: "
    text = f"{lead}b takes {units.ratio(verdict.ratio, digits=digits)} a's time per {per}"
    text += f" {units.span(verdict.low, verdict.high, digits=digits)}".rstrip()
    if verdict.control is not None:
        control = verdict.control
        text += f"; a against itself {units.ratio(control.ratio, digits=digits)}"
        text += f" {units.span(control.low, control.high, digits=digits)}"
    else:
        text += "; no control was run"
    if verdict.per != "step" and verdict.per_step_ratio is not None:
        text += f" (per step: {units.ratio(verdict.per_step_ratio)})"
    return text


def _basis(verdict: SpeedVerdict) -> str:
    parts = []
    if verdict.a_s_per_step is not None and verdict.b_s_per_step is not None:
        a, b = units.milliseconds(verdict.a_s_per_step), units.milliseconds(verdict.b_s_per_step)
        parts.append(f"a step takes {a} in a, {b} in b")
    if verdict.launches:
        launches = units.count(verdict.launches, "launch", "launches")
        parts.append(f"{launches}, {units.count(verdict.rounds, 'round')} of turns")
    if verdict.resolution is not None:
        parts.append(f"differences under {verdict.resolution * 100:.2g} % can't be seen in this budget")
    if verdict.mode != "turns":
        parts.append(f"timed in {verdict.mode}: the two did not fit in memory together")
    return "; ".join(parts)


def _incomparable(record: Comparison) -> tuple[str, ...]:
    """The sentence that saves a reader from comparing progress bars."""
    a, b = record.a.work.samples_per_step, record.b.work.samples_per_step
    if a is None or b is None or a == b:
        return ()
    takes = f"a step of a takes {units.count(a, 'sample')}, a step of b {units.count(b)}"
    return (f"iterations (it/s) are not comparable: {takes}",)


def _same_work(record: Comparison) -> str:
    return f"both take {', '.join(_amounts(record.a.work)) or 'the same work'} per step"


def _listed(differences: tuple[Difference, ...]) -> str:
    shown = []
    for difference in differences[:3]:
        a, b = units.pair(difference.a, difference.b)
        shown.append(f"{_words(difference.quantity)} {a} against {b}")
    more = len(differences) - len(shown)
    return "; ".join(shown) + (f"; and {more} more below" if more > 0 else "")


def saving(finding: Finding, step_s: float | None) -> tuple[str, str]:
    """What taking the cause away saves per step, and its interval; step_s: seconds a step takes."""
    amount, low, high = finding.saving_s_per_step, finding.low, finding.high
    if amount is None:
        return "-", ""
    if finding.status == "shown":
        share = f"  {units.percent(amount / step_s)}" if step_s else ""
        return units.milliseconds(amount) + share, units.interval(low, high, like=amount, unit=" ms")
    if finding.status == "counted":
        bounds = [bound for bound in (high, finding.control_high) if bound is not None and bound > 0]
        return (f"under {units.milliseconds(max(bounds))}" if bounds else "none seen"), ""
    return "saves nothing", units.interval(low, high, unit=" ms")


def together(one: Combined, step_s: float | None, *, name: str) -> str:
    """What all causes of a script save per step when they are taken away at once; name: of the script, empty for the only one."""
    subject = f"all {len(one.causes)} causes{f' of {name}' if name else ''} taken away at once"
    if one.status == "shown":
        share = f", {units.percent(one.saving_s_per_step / step_s)} of a step" if step_s else ""
        span = units.interval(one.low, one.high, like=one.saving_s_per_step, unit=" ms")
        return f"{subject} save {units.milliseconds(one.saving_s_per_step)} {span}{share}"
    if one.status == "counted":
        return f"{subject} save under {units.milliseconds(max(one.high, 0.0))}, if anything"
    return f"{subject} save nothing {units.interval(one.low, one.high, unit=' ms')}"


def unexplained(record: Comparison) -> str | None:
    """What remains of the difference per step when the shown savings are taken off."""
    rest = record.unexplained
    if rest is None or rest.sentence:
        return None if rest is None else rest.sentence
    a, b = record.speed.a_s_per_step, record.speed.b_s_per_step
    slower, sign = ("a", -1.0) if a is not None and b is not None and b < a else ("b", 1.0)
    low, high = sorted((sign * rest.low, sign * rest.high))
    text = f"{units.milliseconds(sign * rest.s_per_step)} per step {units.interval(low, high, like=rest.s_per_step)}"
    if a is not None and b is not None:
        text += f" of the {units.milliseconds(abs(b - a))} that a step of {slower} takes longer"
    if rest.share is not None:
        text += f", {units.percent(rest.share)} of it"
    if rest.low <= 0 <= rest.high:
        text += "; the interval holds zero, so nothing need be left"
    return text


def per_step(phases: Phases) -> str:
    """Where a step goes: its largest phases, as shares."""
    shares = sorted(((seconds / phases.step_s, name) for name, seconds in phases.seconds.items()), reverse=True)
    return ", ".join(f"{units.percent(share)} {name}" for share, name in shares[:4] if share >= 0.01)


def ledger(record: Ledger) -> str:
    """The work of a step in a line."""
    text = ", ".join(_amounts(record)) or "samples and tokens could not be observed"
    processes = units.count(record.world_size, "process", "processes")
    wrapper = "" if record.wrapper == "none" else f", {record.wrapper}"
    return f"{text} per step; {processes}{wrapper}"


def _amounts(record: Ledger) -> list[str]:
    parts = []
    for amount, noun in (
        (record.samples_per_step, "sample"),
        (record.tokens_per_step, "token"),
        (record.labels_per_step, "counted label"),
        (record.micro_steps_per_step, "micro-step"),
    ):
        if amount is not None:
            parts.append(units.count(amount, noun))
        if noun == "token" and amount is not None and record.padding_share:
            parts[-1] += f" ({units.percent(record.padding_share)} padding)"
    return parts


def plan(record: Ledger) -> str | None:
    """Planned steps and passes with their sources; None when no plan was seen."""
    parts = []
    for amount, noun, quantity in (
        (record.planned_steps, "step", "steps"),
        (record.planned_passes, "pass", "passes"),
    ):
        if amount is not None:
            source = next((entry.source for entry in record.plans if entry.quantity == quantity), "")
            parts.append(units.count(amount, noun, quantity) + (f" ({source})" if source else ""))
    return "; ".join(parts) or None


def counted(record: Counts) -> str:
    """Exact counts of a step in a line."""
    ours = sum(read.per_step for read in record.host_reads if read.kind != "optimizer" and read.in_user_code)
    reads = units.count(record.host_reads_per_step, "host read")
    if record.host_reads_per_step:
        reads += f" ({units.count(ours)} in the script's own code)"
    known = ((record.ops_per_step, "op"), (record.python_calls_per_step, "Python call"))
    return ", ".join(
        (
            *(units.count(number, noun) for number, noun in known if number is not None),
            reads,
            units.count(sum(collective.per_step for collective in record.collectives), "collective"),
            units.count(sum(copy.per_step for copy in record.copies), "copy", "copies"),
        )
    )


def _told(sentence: str) -> str:
    """`sentence` without the verdict at its start, which the word beside it has said already."""
    lead, colon, rest = sentence.partition(": ")
    told = ("equal work", "different work", "equal math", "different math", "undecided")
    return rest if colon and lead.lower() in told else sentence


def _words(quantity: str) -> str:
    return quantity.replace("_", " ")
