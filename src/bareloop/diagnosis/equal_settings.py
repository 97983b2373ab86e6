"""Settings that change results and can be compared without equal numbers: clip, learning rate, weight decay, optimizer.

Each is taken as it was in fact applied. A clip with an infinite bound computes a norm and clips nothing, so it equals no clip
unless a gradient is not finite; a bound that no gradient reached is a difference that did not change the observed steps.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bareloop.diagnosis.evidence import Difference
from bareloop.diagnosis.paired_steps import Pairs, RankSteps, relative_difference
from bareloop.diagnosis.wording import counted, number
from bareloop.trace import Optimizer, StepFacts, Trace

__all__ = ["Setting", "different_settings"]

_RATE_TOLERANCE = 1e-6
"""Relative, of learning rates, weight decays and clip bounds."""
_BITE_TOLERANCE = 1e-6
"""Relative: a clip that does not bite multiplies by exactly 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A setting that differs."""

    difference: Difference
    """Its note is a phrase for the verdict's sentence."""
    takes_effect: bool = True
    """False when it changed no number in the observed steps."""


def different_settings(a: Trace, b: Trace, pairs: Pairs) -> tuple[Setting, ...]:
    """Every setting that differs, each at the first step where it takes effect."""
    found = (_clip(a, b, pairs), _learning_rate(a, b, pairs), _weight_decay(a, b), _optimizer(a, b))
    return tuple(setting for setting in found if setting is not None)


def _clip(a: Trace, b: Trace, pairs: Pairs) -> Setting | None:
    differing = [(left, right) for left, right in pairs if _bounds_differ(left, right)]
    if not pairs:
        x, y = a.work.max_grad_norm, b.work.max_grad_norm
        if _same_bound(x, y):
            return None
        note = f"{_clip_words(x, y)} (whether it changed gradients was not observed)"
        return Setting(difference=Difference(quantity="max_grad_norm", a=x, b=y, step=1, note=note))
    if not differing:
        return None
    biting = [pair for pair in differing if _bites(pair[0][0]) is not False or _bites(pair[1][0]) is not False]
    first = (biting or differing)[0]
    x, y = first[0][0].max_grad_norm, first[1][0].max_grad_norm
    note = _clip_words(x, y)
    if not biting:
        note += " (it did not change the gradients in the observed steps)"
    elif any(_bites(step) is None for step in (first[0][0], first[1][0])):
        note += " (whether it changed gradients was not observed)"
    else:
        shares = [f"{name} in {sum(bool(_bites(pair[i][0])) for pair in pairs)}" for i, name in enumerate("ab")]
        shown = [share for share, bound in zip(shares, (x, y), strict=True) if bound is not None]
        note += f" (it changed the gradients of {' and of '.join(shown)} of {counted(len(pairs), 'observed step')})"
    step = first[0][0].index
    return Setting(
        difference=Difference(quantity="max_grad_norm", a=x, b=y, step=step, note=note), takes_effect=bool(biting)
    )


def _bounds_differ(left: RankSteps, right: RankSteps) -> bool:
    """Rank 0 speaks: ranks that clip differently would not train one model."""
    x, y = left[0].max_grad_norm, right[0].max_grad_norm
    if _same_bound(x, y):
        # An infinite bound turns a gradient that is not finite into NaN.
        norms = left[0].gradient_norm, right[0].gradient_norm
        return (x is None) != (y is None) and any(norm is not None and not math.isfinite(norm) for norm in norms)
    return True


def _same_bound(x: float | None, y: float | None) -> bool:
    """No clip call counts as an infinite bound."""
    return relative_difference(math.inf if x is None else x, math.inf if y is None else y) <= _RATE_TOLERANCE


def _bites(step: StepFacts) -> bool | None:
    """Did the clip change this step's gradients? None when the norms to tell were not observed."""
    if step.max_grad_norm is None:
        return False
    before, after = step.gradient_norm, step.applied_gradient_norm
    if before is not None and not math.isfinite(before):
        return True
    if before is not None and after is not None:
        return relative_difference(before, after) > _BITE_TOLERANCE
    if math.isinf(step.max_grad_norm):
        return False
    return None if before is None else before > step.max_grad_norm


def _clip_words(x: float | None, y: float | None) -> str:
    words = []
    for name, bound in (("a", x), ("b", y)):
        if bound is None:
            words.append(f"{name} does not clip")
        else:
            words.append(
                f"{name} clips gradients to {'an infinite norm' if math.isinf(bound) else f'norm {number(bound)}'}"
            )
    return ", ".join(words)


def _learning_rate(a: Trace, b: Trace, pairs: Pairs) -> Setting | None:
    """Learning rates as sets over groups: how parameters are cut into groups of one rate does not matter."""
    seen = [(left[0].index, left[0].learning_rates, right[0].learning_rates) for left, right in pairs]
    seen = [(step, _distinct(x), _distinct(y)) for step, x, y in seen if x and y]
    if not seen and a.work.learning_rate is not None and b.work.learning_rate is not None:
        seen = [(1, _distinct(a.work.learning_rate), _distinct(b.work.learning_rate))]
    for position, (step, x, y) in enumerate(seen):
        if not _all_close(x, y):
            note = f"learning rate {_listed(x)} in a, {_listed(y)} in b at step {step}"
            note += ", equal before it" if position else ""
            difference = Difference(quantity="learning_rate", a=_plain(x), b=_plain(y), step=step, note=note)
            return Setting(difference=difference)
    return None


def _distinct(values: float | Sequence[float]) -> tuple[float, ...]:
    """The distinct values, largest first; values within the tolerance count once."""
    kept: list[float] = []
    for value in sorted([values] if isinstance(values, (int, float)) else values, reverse=True):
        if not kept or relative_difference(kept[-1], value) > _RATE_TOLERANCE:
            kept.append(value)
    return tuple(kept)


def _all_close(x: Sequence[float], y: Sequence[float]) -> bool:
    return len(x) == len(y) and all(relative_difference(p, q) <= _RATE_TOLERANCE for p, q in zip(x, y, strict=True))


def _plain(values: tuple[float, ...]) -> float | tuple[float, ...]:
    return values[0] if len(values) == 1 else values


def _listed(values: Sequence[float]) -> str:
    return " and ".join(f"{value:.7g}" for value in values)


def _optimizers(trace: Trace) -> tuple[Optimizer, ...]:
    return trace.work.optimizers or (trace.first.work.optimizers if trace.processes else ())


def _decays(trace: Trace) -> dict[float, int] | None:
    """Weight decay -> parameters it applies to (0 where the sizes are not known); None when not observed."""
    groups = [group for optimizer in _optimizers(trace) for group in optimizer.groups]
    if any(group.elements for group in groups):
        decays: dict[float, int] = {}
        # An optimizer without the option decays nothing; a group without parameters decides nothing.
        for group in groups:
            if group.elements:
                decays[group.weight_decay or 0.0] = decays.get(group.weight_decay or 0.0, 0) + group.elements
        return decays
    if trace.work.weight_decay is None:
        return None
    return dict.fromkeys(_distinct(trace.work.weight_decay), 0)


def _weight_decay(a: Trace, b: Trace) -> Setting | None:
    x, y = _decays(a), _decays(b)
    if x is None or y is None:
        return None
    values = tuple(sorted(x, reverse=True)), tuple(sorted(y, reverse=True))
    if _all_close(*values) and _same_spread([x[value] for value in values[0]], [y[value] for value in values[1]]):
        return None
    note = f"weight decay {_decay_words(x)} in a, {_decay_words(y)} in b"
    return Setting(
        difference=Difference(quantity="weight_decay", a=_plain(values[0]), b=_plain(values[1]), step=1, note=note)
    )


def _same_spread(x: Sequence[int], y: Sequence[int]) -> bool:
    """Do the same values apply to as many parameters? Shares when the totals differ: a rank may hold a shard only."""
    total = sum(x), sum(y)
    if not all(total):
        return True
    if total[0] == total[1]:
        return list(x) == list(y)
    return all(abs(p / total[0] - q / total[1]) <= 0.01 for p, q in zip(x, y, strict=True))


def _decay_words(decays: dict[float, int]) -> str:
    total = sum(decays.values())
    if len(decays) == 1 or not total:
        return _listed(sorted(decays, reverse=True))
    parts = [f"{value:.7g} on {counted(decays[value], 'parameter')}" for value in sorted(decays, reverse=True)]
    effective = sum(value * elements for value, elements in decays.items()) / total
    return f"{' and '.join(parts)} (mean {effective:.4g})"


def _optimizer(a: Trace, b: Trace) -> Setting | None:
    x, y = (tuple(sorted(optimizer.name for optimizer in _optimizers(trace))) for trace in (a, b))
    if not x or not y or x == y:
        return None
    # They differ in how they decay weights and in nothing else.
    idle = [(_decays(trace) or {1.0: 0}) for trace in (a, b)]
    if all(set(decays) == {0.0} for decays in idle) and _as_adam(x) == _as_adam(y):
        return None
    names = ["+".join(side) for side in (x, y)]
    note = f"the optimizer is {names[0]} in a, {names[1]} in b"
    return Setting(difference=Difference(quantity="optimizer", a=names[0], b=names[1], step=1, note=note))


def _as_adam(names: Sequence[str]) -> list[str]:
    return ["Adam" if name == "AdamW" else name for name in names]
