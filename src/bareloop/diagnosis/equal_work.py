"""Two traces -> do their scripts do the same work?

Three kinds of quantity are compared, all of them on the ledger of all processes together, and every difference is listed:

- *work per step* (`PER_STEP`): samples, tokens, padding, trainable parameters, forwards per backward (recompute), dtype of the
  matrix products. A difference here means that a step of one is not a step of the other. Decides.
- *the plan* (`PLAN`): steps and passes over the data. A step may be the same and yet one script trains twice as long. Decides,
  except a difference of at most 1 %, which an incomplete last window makes.
- *organisation* (`ORGANISATION`): micro-steps, processes, wrapper, autocast, counted labels. The same work cut otherwise
  (counted labels change the loss, not the work). Listed, does not decide.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bareloop.diagnosis.evidence import Difference, WorkVerdict
from bareloop.diagnosis.paired_steps import (
    CHANCE_ERRORS,
    EXACT,
    Pairs,
    Series,
    common_steps,
    judge_means,
    mean,
    ratio_series,
    relative_difference,
    same_throughout,
    series,
    standard_error,
)
from bareloop.diagnosis.wording import counted, number
from bareloop.trace import Trace

__all__ = ["ORGANISATION", "PER_STEP", "PLAN", "equal_work", "matmul_dtype", "per_unit"]

PER_STEP = (
    "samples_per_step",
    "tokens_per_step",
    "padding_share",
    "trainable_parameters",
    "forward_per_backward",
    "matmul_dtypes",
)
PLAN = ("planned_steps", "planned_passes")
ORGANISATION = ("micro_steps_per_step", "labels_per_step", "world_size", "wrapper", "autocast")

_LOOSE = 0.1
"""Relative tolerance for tokens and labels of other samples without per-step values."""
_PLAN_TOLERANCE = 0.01
_RECOMPUTE_TOLERANCE = 0.01
_PADDING_SAME, _PADDING_SAMPLED = 0.01, 0.03
"""Absolute tolerances of the padding share for the same and for other samples."""
_MATERIAL = 0.05
"""Real tokens per sample that differ by less leave a speed per sample fair."""
_TEXT_ONLY = ("tokens_per_step", "padding_share", "labels_per_step")
"""Seen on neither side, these are not gaps: the model is not fed tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """One quantity on both sides, judged."""

    quantity: str
    a: Any
    b: Any
    outcome: str
    """"equal", "different", "unknown" (not observed on a side), "unclear" (chance can't be told), "absent" (on neither side)."""
    note: str = ""
    decides: bool = False


def matmul_dtype(trace: Trace) -> str | None:
    """The dtype that most matrix products and convolutions ran in; None when none were counted."""
    counts = trace.work.matmul_dtypes
    if not counts and trace.processes and trace.counts is not None:
        counts = trace.counts.matmul_dtypes
    return max(counts, key=lambda dtype: counts[dtype]) if counts else None


def equal_work(a: Trace, b: Trace) -> WorkVerdict:
    """Do `a` and `b` do the same work per step, and plan the same?

    "different" when a quantity of `PER_STEP` or `PLAN` differs; else "undecided" when samples were not observed on a side, tokens
    on one side only, or either can't be told from chance; else "equal". A plan that was not observed is unknown, not different.
    """
    entries = _entries(a, b)
    differing = [entry for entry in entries if entry.outcome == "different"]
    unseen = [entry for entry in entries if entry.outcome in ("unknown", "unclear")]
    if any(entry.decides for entry in differing):
        verdict = "different"
    else:
        blocked = any(entry.quantity in ("samples_per_step", "tokens_per_step") for entry in unseen)
        verdict = "undecided" if blocked else "equal"
    return WorkVerdict(
        verdict=verdict,
        differences=tuple(Difference(quantity=e.quantity, a=e.a, b=e.b, note=e.note) for e in differing),
        unknown=tuple(entry.quantity for entry in unseen),
        sentence=_sentence(verdict, {entry.quantity: entry for entry in entries}),
    )


def per_unit(a: Trace, b: Trace) -> str:
    """What a ratio of speeds is fair per: "step", "sample" or "token" (real tokens).

    "token" when both know their real tokens and a sample of one holds over 5 % more of them than a sample of the other, beyond
    chance; "sample" when both know their samples per step and these differ; else "step". Padding alone does not change the unit:
    it costs time for the same samples, which a verdict on speed should show.
    """
    pairs = common_steps(a, b)
    samples = (a.work.samples_per_step, b.work.samples_per_step)
    real = (a.work.real_tokens_per_step, b.work.real_tokens_per_step)
    if same_throughout(pairs):
        return "step"
    if real[0] is not None and real[1] is not None:
        first, second, both = _per_sample((real[0], real[1]), samples, pairs, "real_tokens")
        outcome, _ = judge_means(first, second, both, False, loose=_LOOSE)
        if outcome == "different" and relative_difference(first, second) > _MATERIAL:
            return "token"
    if samples[0] is not None and samples[1] is not None:
        outcome, _ = judge_means(samples[0], samples[1], series(pairs, "samples"), False)
        return "sample" if outcome == "different" else "step"
    return "step"


def _per_sample(
    values: tuple[float, float], samples: tuple[float | None, float | None], pairs: Pairs, name: str
) -> tuple[float, float, Series]:
    """A ledger's values and the step field `name` per sample; per step when a side's samples were not seen."""
    if samples[0] and samples[1]:
        return values[0] / samples[0], values[1] / samples[1], ratio_series(pairs, name, "samples")
    return values[0], values[1], series(pairs, name)


def _entries(a: Trace, b: Trace) -> list[_Entry]:
    """Every quantity, in the order of `PER_STEP`, `PLAN`, `ORGANISATION`."""
    pairs = common_steps(a, b)
    same = same_throughout(pairs)
    entries = []
    for quantity in (*PER_STEP, *PLAN, *ORGANISATION):
        if quantity == "matmul_dtypes":
            left, right = matmul_dtype(a), matmul_dtype(b)
        else:
            left, right = getattr(a.work, quantity), getattr(b.work, quantity)
        entry = _Entry(quantity=quantity, a=left, b=right, outcome="equal")
        # No autocast is a fact, not a gap.
        if quantity != "autocast" and (left is None or right is None):
            absent = left is None and right is None and quantity in _TEXT_ONLY
            entries.append(replace(entry, outcome="absent" if absent else "unknown"))
            continue
        entry = _judged(entry, a, b, pairs, same)
        decides = entry.outcome == "different" and (
            quantity in PER_STEP or (quantity in PLAN and relative_difference(entry.a, entry.b) > _PLAN_TOLERANCE)
        )
        entries.append(replace(entry, decides=decides))
    return entries


def _judged(entry: _Entry, a: Trace, b: Trace, pairs: Pairs, same: bool) -> _Entry:
    """`entry`, whose quantity both sides have, with its outcome and note."""
    match entry.quantity:
        case "samples_per_step":
            outcome, note = judge_means(entry.a, entry.b, series(pairs, "samples"), same)
        case "tokens_per_step":
            outcome, note = judge_means(entry.a, entry.b, series(pairs, "tokens"), same, loose=_LOOSE)
        case "padding_share":
            outcome, note = _judge_padding(entry.a, entry.b, ratio_series(pairs, "real_tokens", "tokens"), same)
        case "labels_per_step":
            # Masks are drawn anew for the same samples, so labels never count as "the same".
            samples = a.work.samples_per_step, b.work.samples_per_step
            first, second, both = _per_sample((entry.a, entry.b), samples, pairs, "labels")
            outcome, note = judge_means(first, second, both, False, loose=_LOOSE)
            if outcome == "different":
                note = "labels that count in the loss, per sample more apart than other samples or masks make"
            outcome = "equal" if outcome == "unclear" else outcome
        case "planned_steps" | "planned_passes":
            outcome, note = _judge_plan(entry, a, b)
        case "trainable_parameters" | "micro_steps_per_step":
            outcome, note = judge_means(entry.a, entry.b, ((), ()), True)
        case "forward_per_backward":
            differs = relative_difference(entry.a, entry.b) > _RECOMPUTE_TOLERANCE
            outcome, note = (
                ("different", "recompute: blocks run forward again in backward") if differs else ("equal", "")
            )
        case _:
            outcome, note = "equal" if entry.a == entry.b else "different", ""
    return replace(entry, outcome=outcome, note=note)


def _judge_padding(a: float, b: float, real: Series, same: bool) -> tuple[str, str]:
    """Padding is sampled: `real` are the shares of real tokens of each common step."""
    if same:
        gap = abs(mean(real[0]) - mean(real[1])) if real[0] else abs(a - b)
        return ("different" if gap > _PADDING_SAME else "equal"), ""
    noise = CHANCE_ERRORS * standard_error(real) if len(real[0]) > 1 else 0.0
    tolerance = max(_PADDING_SAMPLED, noise)
    note = f"sampled over other batches, so only a difference above {tolerance:.2g} counts"
    return ("different" if abs(a - b) > tolerance else "equal"), note


def _judge_plan(entry: _Entry, a: Trace, b: Trace) -> tuple[str, str]:
    notes = [
        f"{name}: {source}" for name, trace in (("a", a), ("b", b)) if (source := _plan_source(trace, entry.quantity))
    ]
    gap = relative_difference(entry.a, entry.b)
    if EXACT < gap <= _PLAN_TOLERANCE:
        notes.append("within the 1 % that an incomplete last window makes")
    samples = a.work.samples_per_step, b.work.samples_per_step
    if entry.quantity == "planned_steps" and gap > EXACT and samples[0] and samples[1]:
        in_all = entry.a * samples[0], entry.b * samples[1]
        if relative_difference(*in_all) <= _PLAN_TOLERANCE:
            notes.append(f"both plan about {number(in_all[0])} samples in all")
    return ("different" if gap > EXACT else "equal"), "; ".join(notes)


def _plan_source(trace: Trace, quantity: str) -> str:
    """Where the plan was seen: the source with the ledger's value when there is one, else all of them."""
    seen = [plan for plan in trace.work.plans if plan.quantity == quantity.removeprefix("planned_")]
    value = getattr(trace.work, quantity)
    won = [plan for plan in seen if relative_difference(plan.value, value) <= EXACT]
    return ", ".join(dict.fromkeys(plan.source for plan in won or seen))


def _sentence(verdict: str, by_name: Mapping[str, _Entry]) -> str:
    if verdict == "undecided":
        return f"Undecided: {_gap(by_name)}; nothing else that decides differs."
    load = _load(by_name)
    if verdict == "equal":
        chance = by_name["tokens_per_step"].note
        organised = _phrases(by_name, [quantity for quantity in ORGANISATION if quantity != "labels_per_step"])
        tail = f"; tokens per step: {chance}" if chance else ""
        tail += f"; organised differently: {'; '.join(organised)}" if organised else ""
        return f"Equal work: {load}, on both sides{tail}."
    plan = "; ".join(_phrases(by_name, [quantity for quantity in PLAN if by_name[quantity].decides]))
    samples_differ = by_name["samples_per_step"].decides
    # Tokens that follow from the samples would only say the same thing twice.
    per_step = _phrases(by_name, [q for q in PER_STEP if not (samples_differ and q == "tokens_per_step")])
    if not per_step:
        return f"Different work: equal per step ({load}), but {plan}." if load else f"Different work: {plan}."
    tail = "iterations are not comparable" if samples_differ else "a step of one is not a step of the other"
    return f"Different work: {'; '.join(per_step)}, so {tail}{f'; and {plan}' if plan else ''}."


def _load(by_name: Mapping[str, _Entry]) -> str:
    """What a step consumes where both sides agree, e.g. "2 samples and 64 tokens per step, 1 micro-step"."""
    words = []
    for quantity, noun in (("samples_per_step", "sample"), ("tokens_per_step", "token")):
        entry = by_name[quantity]
        if entry.outcome == "equal":
            words.append(("about " if entry.note else "") + counted(entry.a, noun))
    text = f"{' and '.join(words)} per step" if words else ""
    micro = by_name["micro_steps_per_step"]
    return f"{text}, {counted(micro.a, 'micro-step')}" if text and micro.outcome == "equal" else text


def _gap(by_name: Mapping[str, _Entry]) -> str:
    """What keeps the verdict open."""
    gaps = []
    for quantity, noun in (("samples_per_step", "samples"), ("tokens_per_step", "tokens")):
        entry = by_name[quantity]
        if entry.outcome == "unclear":
            gaps.append(f"{noun} per step are {entry.note}")
        elif entry.outcome == "unknown":
            sides = [name for name, value in (("a", entry.a), ("b", entry.b)) if value is None]
            gaps.append(f"the {noun} of {' and '.join(sides)} could not be observed")
    return "; ".join(gaps)


def _phrases(by_name: Mapping[str, _Entry], quantities: Sequence[str]) -> list[str]:
    return [_phrase(by_name[quantity]) for quantity in quantities if by_name[quantity].outcome == "different"]


def _phrase(entry: _Entry) -> str:
    """A difference in words."""
    a, b = entry.a, entry.b
    match entry.quantity:
        case "samples_per_step" | "tokens_per_step":
            return f"a consumes {counted(a, entry.quantity.removesuffix('s_per_step'))} per step, b {number(b)}"
        case "planned_steps" | "planned_passes":
            noun = "step" if entry.quantity == "planned_steps" else "pass"
            data = " over the data" if noun == "pass" else ""
            ratio = f" ({max(a, b) / min(a, b):.3g}x)" if min(a, b) > 0 else ""
            return f"a plans {counted(a, noun)}{data}, b {number(b)}{ratio}"
        case "padding_share":
            return f"{a:.0%} of a's tokens are padding, {b:.0%} of b's"
        case "trainable_parameters":
            return f"a trains {counted(a, 'parameter')}, b {number(b)}"
        case "forward_per_backward":
            return f"a runs {counted(a, 'forward')} per block and backward, b {number(b)}"
        case "matmul_dtypes":
            return f"a multiplies matrices in {a}, b in {b}"
        case "micro_steps_per_step":
            return f"a takes {counted(a, 'micro-step')} per step, b {number(b)}"
        case "world_size":
            return f"a runs in {counted(a, 'process')}, b in {number(b)}"
        case "wrapper":
            wrapped = [f"{name} is wrapped in {value}" for name, value in (("a", a), ("b", b)) if value != "none"]
            return ", ".join(wrapped) if len(wrapped) == 2 else f"only {wrapped[0]}"
        case _:
            return f"{entry.quantity.replace('_', ' ')} is {a or 'off'} in a, {b or 'off'} in b"
