"""Two traces -> do their scripts compute the same numbers?

The steps that both recorded are walked in the order of computation: batch, loss, gradient norm (before the clip), clip, learning
rate, weight decay, optimizer, parameters. The first number that differs ends the walk: what follows from it differs too and would
accuse the innocent. Settings (`SETTINGS`) need no equal numbers and are judged to the end, each at the first step it takes effect.

Tolerances are relative: loss 1e-5, gradient norm 1e-4, parameters 1e-5, times the step's index. They grow because a sum taken in
another order (accumulation, several processes, threads) changes a gradient in its last bits, and Adam's first steps have the size
of the learning rate whatever the gradient's size: an element that is zero but for rounding moves by the learning rate in a random
direction, and every later step builds on it. Under half precision on both sides they are 100 times wider (bfloat16 keeps 8 bits).
The parameters' norm is a coarse checksum, blind to a small step; the next step's loss on the same batch is the finer one.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bareloop.diagnosis.equal_settings import Setting, different_settings
from bareloop.diagnosis.equal_work import matmul_dtype
from bareloop.diagnosis.evidence import Difference, MathVerdict
from bareloop.diagnosis.paired_steps import (
    Pairs,
    RankSteps,
    common_steps,
    mean,
    relative_difference,
    rows_of,
    same_samples,
    total,
)
from bareloop.diagnosis.wording import counted, number
from bareloop.trace import Trace

__all__ = ["ORDER", "SETTINGS", "TOLERANCES", "equal_math"]

ORDER = (
    "batch",
    "loss",
    "gradient_norm",
    "max_grad_norm",
    "applied_gradient_norm",
    "learning_rate",
    "weight_decay",
    "optimizer",
    "parameters",
)
"""The order of computation inside a step."""
SETTINGS = ("max_grad_norm", "learning_rate", "weight_decay", "optimizer")
TOLERANCES = {"loss": 1e-5, "gradient_norm": 1e-4, "applied_gradient_norm": 1e-4, "parameters": 1e-5}
"""Relative, at step 1."""

_HALF = ("float16", "bfloat16")
_HALF_FACTOR = 100.0
_FACTOR_TOLERANCE = 1e-4
_AFTER = {
    "batch": "loss, gradients and parameters can't be compared after that",
    "loss": "gradients and parameters can't be judged after it",
    "gradient_norm": "parameters can't be judged after it",
    "applied_gradient_norm": "parameters can't be judged after it",
    "parameters": "later steps can't be judged",
}


@dataclass(kw_only=True, slots=True)
class _Walk:
    """What the walk over the common steps has seen so far."""

    difference: Difference | None = None
    unseen_from: int | None = None
    """First step whose samples could not be held against each other."""
    ended_by_setting: int | None = None
    """Step whose parameters, and all after, follow from a differing setting."""
    compared: dict[str, int] = field(default_factory=dict)
    """Quantity -> steps at which it was held against the other side."""
    largest: float | None = None


def equal_math(a: Trace, b: Trace) -> MathVerdict:
    """Do `a` and `b` compute the same numbers in the steps that both recorded?

    "different" when a number or a setting differs; else "undecided" when samples could not be held against each other, the two
    have no step in common, or no number was seen on both sides; else "equal". The loss of a step is the mean over ranks of what
    their backward passes started from, so that runs of different world size can be compared.
    """
    pairs = common_steps(a, b)
    settings = different_settings(a, b, pairs)
    walk = _walk(a, b, pairs, settings)
    found = [setting.difference for setting in settings] + ([walk.difference] if walk.difference else [])
    differences = tuple(sorted(found, key=lambda d: (d.step or 1, ORDER.index(d.quantity))))
    # A clip that never bit is a difference, but not where the numbers part.
    idle = [setting.difference for setting in settings if not setting.takes_effect]
    first = next((d for d in differences if d not in idle), differences[0] if differences else None)
    verdict = "different" if differences else "undecided"
    if not differences and pairs and walk.unseen_from is None and set(walk.compared) & set(TOLERANCES):
        verdict = "equal"
    return MathVerdict(
        verdict=verdict,
        first_difference=None if first is None else {"step": first.step or 1, "quantity": first.quantity},
        differences=differences,
        steps_compared=len(pairs),
        largest_relative_difference=walk.largest,
        sentence=_sentence(verdict, walk, differences, idle, pairs),
    )


def _walk(a: Trace, b: Trace, pairs: Pairs, settings: Sequence[Setting]) -> _Walk:
    walk = _Walk()
    effective = {s.difference.quantity: s.difference.step or 1 for s in settings if s.takes_effect}
    clip_from = effective.get("max_grad_norm")
    settings_from = min(effective.values(), default=None)
    dtypes = matmul_dtype(a), matmul_dtype(b)
    wide = _HALF_FACTOR if all(dtype is not None and dtype.removeprefix("torch.") in _HALF for dtype in dtypes) else 1.0
    sharded = any(trace.work.wrapper.startswith(("Fully", "FSDP")) for trace in (a, b))
    for left, right in pairs:
        step = left[0].index
        same = same_samples(left, right)
        if same is None:
            walk.unseen_from = step
            return walk
        walk.compared["batch"] = walk.compared.get("batch", 0) + 1
        if not same:
            walk.difference = _batch_difference(pairs, left, right)
            return walk
        for quantity in ("loss", "gradient_norm", "applied_gradient_norm", "parameters"):
            if quantity == "applied_gradient_norm" and clip_from is not None and clip_from <= step:
                continue
            if quantity == "parameters" and settings_from is not None and settings_from <= step:
                walk.ended_by_setting = step
                return walk
            x, y = _values(quantity, left, right, sharded)
            if x is None or y is None:
                continue
            gap = relative_difference(x, y)
            walk.compared[quantity] = walk.compared.get(quantity, 0) + 1
            walk.largest = max(gap, walk.largest or 0.0)
            if gap > TOLERANCES[quantity] * step * wide:
                note = _number_note(quantity, x, y, (left, right), dtypes)
                walk.difference = Difference(quantity=quantity, a=x, b=y, step=step, note=note)
                return walk
    return walk


def _values(quantity: str, left: RankSteps, right: RankSteps, sharded: bool) -> tuple[float | None, float | None]:
    """A number of the whole step on both sides; (None, None) when ranks disagree and world sizes differ.

    Gradients and parameters agree over ranks once reduced. Where they do not, the ranks hold shards, whose squares add up,
    or local values, whose mean can only be held against as many ranks.
    """
    both = []
    for ranks in (left, right):
        values = [getattr(step, quantity) for step in ranks]
        if None in values:
            both.append(None)
        elif all(relative_difference(values[0], value) <= 1e-9 for value in values):
            both.append(values[0])
        elif quantity == "loss":
            both.append(mean(values))
        elif sharded:
            both.append(sum(value * value for value in values) ** 0.5)
        else:
            both.append(mean(values) if len(left) == len(right) else None)
    return (None, None) if None in both else (both[0], both[1])


def _batch_difference(pairs: Pairs, left: RankSteps, right: RankSteps) -> Difference:
    ids: list[Any] = []
    for ranks in (left, right):
        batches = tuple(step.batch for step in ranks)
        ids.append(batches[0] if len(batches) == 1 else batches)
    notes = []
    sizes = total(left, "samples"), total(right, "samples")
    if sizes[0] is not None and sizes[1] is not None and sizes[0] != sizes[1]:
        notes.append(f"a consumes {counted(sizes[0], 'sample')} in step {left[0].index}, b {number(sizes[1])}")
    overlap = _overlap([pair for pair in pairs if pair[0][0].index >= left[0].index])
    notes += [overlap] if overlap else []
    return Difference(quantity="batch", a=ids[0], b=ids[1], step=left[0].index, note="; ".join(notes))


def _overlap(pairs: Pairs) -> str:
    """How many samples the two sides' steps share, in words; "" when samples were not seen one by one."""
    sums: tuple[Counter[str], Counter[str]] = Counter(), Counter()
    for pair in pairs:
        for ranks, rows in zip(pair, sums, strict=True):
            seen = rows_of(ranks)
            if seen is None:
                return ""
            rows.update(seen)
    first, last = pairs[0][0][0].index, pairs[-1][0][0].index
    steps = f"steps {first} to {last}" if first > 1 else f"the first {last} steps"
    steps = f"step {first}" if first == last else steps
    most = max(sums[0].total(), sums[1].total())
    common = (sums[0] & sums[1]).total()
    if common == most:
        return f"the same {counted(most, 'sample')} in another order over {steps}"
    return f"{common} of {counted(most, 'sample')} of {steps} in common"


def _number_note(
    quantity: str, x: float, y: float, sides: tuple[RankSteps, RankSteps], dtypes: tuple[str | None, str | None]
) -> str:
    """What is known about why the same batch gave two values."""
    notes = [_factor_note(x, y, sides)] if quantity == "loss" else []
    if quantity == "loss":
        labels = total(sides[0], "labels"), total(sides[1], "labels")
        if labels[0] is not None and labels[1] is not None and labels[0] != labels[1]:
            notes.append(f"{number(labels[0])} labels count in the loss of a, {number(labels[1])} in b's")
        if [step.batch for step in sides[0]] != [step.batch for step in sides[1]]:
            notes.append("the same samples are grouped otherwise into micro-batches or processes")
    if quantity == "applied_gradient_norm":
        notes.append("equal gradients reach the optimizer with different norms, and no clip call explains it")
    skipped = [name for name, ranks in zip("ab", sides, strict=True) if any(step.skipped for step in ranks)]
    if quantity == "parameters" and len(skipped) == 1:
        notes.append(f"GradScaler skipped this step in {skipped[0]} only")
    if dtypes[0] != dtypes[1] and None not in dtypes:
        notes.append(f"matrix products run in {dtypes[0]} in a, {dtypes[1]} in b")
    return "; ".join(note for note in notes if note)


def _factor_note(x: float, y: float, sides: tuple[RankSteps, RankSteps]) -> str:
    """A loss that is a whole multiple of the other, and what the factor is the count of."""
    if x == 0 or y == 0 or (x < 0) != (y < 0):
        return ""
    more, less = (0, 1) if abs(x) > abs(y) else (1, 0)
    ratio = (x / y) if more == 0 else (y / x)
    factor = round(ratio) if ratio < 1e9 else 0
    if factor < 2 or abs(ratio / factor - 1) > _FACTOR_TOLERANCE:
        return ""
    names = "ab"[more], "ab"[less]
    text = f"{names[0]} is {factor} times {names[1]}"
    micro, ranks = sides[more][0].micro_steps, len(sides[more])
    if factor == micro:
        return f"{text}: the loss is not divided by the accumulation of {micro} micro-steps"
    if factor == ranks:
        return f"{text}: the loss is multiplied by the {ranks} processes"
    if factor == micro * ranks:
        return f"{text}: the loss is not divided by {micro} micro-steps times {ranks} processes"
    if factor in (sides[less][0].micro_steps, len(sides[less])):
        kind = "micro-steps" if factor == sides[less][0].micro_steps else "processes"
        return f"{text}, and {factor} is how many {kind} {names[1]} has"
    return text


def _sentence(
    verdict: str, walk: _Walk, differences: Sequence[Difference], idle: Sequence[Difference], pairs: Pairs
) -> str:
    if verdict == "undecided":
        return f"Undecided: {_why_undecided(walk, pairs)}."
    agreement = _agreement(walk)
    if verdict == "equal":
        return f"Equal math: {agreement}."
    parts = [_number_phrase(walk.difference)] if walk.difference else []
    parts += [difference.note for difference in differences if difference.quantity in SETTINGS]
    if walk.ended_by_setting is not None:
        step = walk.ended_by_setting
        before = f"{agreement}, but p" if agreement else "p"
        parts.append(f"{before}arameters from step {step} on follow from that setting and can't be judged")
    elif walk.unseen_from is not None or not pairs:
        parts.append(f"the numbers can't be compared: {_why_undecided(walk, pairs)}")
    elif len(idle) == len(differences) and agreement:
        parts.append(agreement)
    return f"Different math: {'; '.join(parts)}."


def _number_phrase(difference: Difference) -> str:
    quantity, note = difference.quantity, difference.note
    if quantity == "batch":
        text = f"batches differ from step {difference.step}{f': {note}' if note else ''}"
    else:
        noun = {"gradient_norm": "gradient norm", "applied_gradient_norm": "norm of the applied gradients"}.get(
            quantity, quantity
        )
        values = f"{difference.a:.7g} in a, {difference.b:.7g} in b"
        text = (
            f"{noun} differs first at step {difference.step}, on equal batches: {values}{f' ({note})' if note else ''}"
        )
    return f"{text}, so {_AFTER[quantity]}"


def _agreement(walk: _Walk) -> str:
    """What was seen to agree, and how well; "" when nothing was."""
    words = {"batch": "batches", "loss": "losses", "gradient_norm": "gradient norms", "parameters": "parameters"}
    seen = [word for quantity, word in words.items() if quantity in walk.compared]
    if walk.largest is None or not seen:
        return ""
    listed = ", ".join(seen[:-1]) + (" and " if len(seen) > 1 else "") + seen[-1]
    how = (
        "are equal to the bit"
        if walk.largest == 0
        else f"agree, the largest relative difference is {walk.largest:.1e} (within what rounding makes)"
    )
    steps = walk.compared["batch"]
    span = "the first step" if steps == 1 else f"the first {steps} steps"
    return f"{listed} of {span} {how}"


def _why_undecided(walk: _Walk, pairs: Pairs) -> str:
    if not pairs:
        return "the two runs have no recorded step in common"
    if walk.unseen_from is not None:
        left, right = next(pair for pair in pairs if pair[0][0].index == walk.unseen_from)
        blind = [n for n, ranks in (("a", left), ("b", right)) if all(s.batch is None and not s.rows for s in ranks)]
        if not blind:
            return f"the samples of step {walk.unseen_from} can't be told apart one by one over different world sizes"
        same = "; what numbers were seen could come from other samples"
        return f"the batches of {' and '.join(blind)} could not be observed from step {walk.unseen_from}{same}"
    return "the batches are the same, but no loss, gradient norm or parameter checksum was observed on both sides"
