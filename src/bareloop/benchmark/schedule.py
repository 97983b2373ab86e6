"""Who runs when, and how much fits the budget.

A launch costs its start, a round costs one turn of each participant and the steps after each turn's start that are not
timed. Launches come first: the process is the random effect, so the interval shrinks with launches, and with rounds
only as far as the noise inside a launch matters. Rounds then fill what is left of the budget.
"""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Plan", "order", "plan"]

_TURN_S = 0.1
"""Short, so that the two halves of a pair lie close together: the machine drifts by 5 % within a second."""
_STEPS_PER_TURN = range(3, 401)
_MOST_ROUNDS = 32
_FEWEST_ROUNDS = (4, 3)
"""Rounds are even, so that each order has its reverse; 3 only where 4 do not fit."""
_TIMED_SHARE = 0.5
"""Rounds of a launch take at least this share of its start, where the launches that are wanted still fit."""
_MOST_LAUNCHES = 64
_ENOUGH_LAUNCHES = 3
_WANTED_LAUNCHES = (5, _ENOUGH_LAUNCHES, 2)
_FEWEST_LAUNCHES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How many launches, rounds and steps."""

    launches: int
    rounds: int
    """Rounds of turns in each launch."""
    steps: Mapping[str, int]
    """Participant -> timed steps in a turn."""
    fits: bool
    """False when even the smallest plan takes longer than the budget; this is that plan."""
    launch_s: float
    """Expected seconds of one launch, its start included."""

    @property
    def wall_s(self) -> float:
        """Expected seconds of all launches."""
        return self.launches * self.launch_s


def order(participants: Sequence[str], rounds: int, seed: int) -> tuple[tuple[str, ...], ...]:
    """The order of turns, `[round][turn]`, random but the same for the same arguments.

    Every second round is the reverse of the one before (ABBA), so a steady drift of the machine cancels in each pair
    of rounds. The forward rounds are the rows of a Williams square under random labels, in random order: after
    2 n rounds of n participants each was twice at each place and followed each other one equally often.

    Source: Williams (1949), Australian Journal of Scientific Research A 2:149.

    Raises:
        ValueError: no participants, a name twice, or fewer than one round.
    """
    names = list(participants)
    if not names or len(set(names)) != len(names):
        raise ValueError(f"participants must be different names, at least one, got {names}")
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    chance = random.Random(seed)
    chance.shuffle(names)
    count = len(names)
    # 0, 1, n-1, 2, n-2, ...: neighbours differ by 1, -2, 3, -4, ..., so every distance occurs once.
    zigzag = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(count)]
    result: list[tuple[str, ...]] = []
    while len(result) < rounds:
        for row in chance.sample(range(count), count):
            forward = tuple(names[(place + row) % count] for place in zigzag)
            result += [forward, forward[::-1]]
    return tuple(result[:rounds])


def plan(
    *,
    budget_s: float,
    spent_s: float,
    startup_s: float,
    step_s: Mapping[str, float],
    turns_per_round: int | Sequence[str] = 1,
    steps: int | None = None,
    discard: Mapping[str, int] | None = None,
    launches: int | None = None,
    startup_parallel: float = 1.0,
) -> Plan:
    """The plan with the most launches, and then the most rounds, that fits what is left of the budget.

    A turn lasts about 0.1 s, at least 3 and at most 400 timed steps; the rounds of a launch take at least half as long
    as its start. Where fewer than 5 launches (then 3, then 2) fit, it gets 4 rounds, then 3, then a turn 3 steps, then one.

    Args:
        budget_s: Seconds for everything.
        spent_s: Seconds of the budget that are gone.
        startup_s: Seconds from the start of a launch to its first turn.
        step_s: Participant -> seconds per step.
        turns_per_round: Turns of each participant in a round, or the round's turns by participant.
        steps: Timed steps in a turn, as the user wishes; None chooses.
        discard: Participant -> steps at the start of each of its turns that are not timed.
        launches: Number of launches, as the user wishes; None chooses up to 64.
        startup_parallel: What `startup_s` is multiplied by because a launch's processes start at the same time.

    Raises:
        ValueError: a step time that is not positive, an unknown participant, a count below one.
    """
    turns = _turns(step_s, turns_per_round)
    start_s, left_s = startup_s * startup_parallel, budget_s - spent_s
    _check(step_s, turns, discard or {}, steps, launches, start_s)
    options = list(_options(_step_choices(step_s, steps), turns, step_s, discard or {}, start_s))
    for wanted in _WANTED_LAUNCHES if launches is None else (launches,):
        for chosen, rounds, round_s in options:
            # A fourth and fifth launch are worth fewer rounds, but not turns shorter than usual.
            if (wanted <= _ENOUGH_LAUNCHES or chosen is options[0][0]) and _fitting(
                wanted, start_s + rounds * round_s, left_s
            ):
                return _filled(chosen, rounds, round_s, start_s, left_s, launches)
    return _smallest(options, launches, start_s)


def _smallest(options: list[tuple[Mapping[str, int], int, float]], launches: int | None, start_s: float) -> Plan:
    """The plan that exceeds the budget least."""
    chosen, rounds, round_s = min(options, key=lambda option: option[1] * option[2])
    return Plan(
        launches=launches or _FEWEST_LAUNCHES,
        rounds=rounds,
        steps=chosen,
        fits=False,
        launch_s=start_s + rounds * round_s,
    )


def _options(
    choices: Sequence[Mapping[str, int]],
    turns: Sequence[str],
    step_s: Mapping[str, float],
    discard: Mapping[str, int],
    start_s: float,
) -> Iterator[tuple[Mapping[str, int], int, float]]:
    """(steps, rounds, seconds per round) of a launch, from the wished to the shortest."""
    for chosen in choices:
        round_s = sum((chosen[name] + discard.get(name, 0)) * step_s[name] for name in turns)
        wished = 2 * math.ceil(_TIMED_SHARE * start_s / round_s / 2)
        if wished > _FEWEST_ROUNDS[0]:
            yield chosen, min(wished, _MOST_ROUNDS), round_s
        for rounds in _FEWEST_ROUNDS:
            yield chosen, rounds, round_s


def _filled(
    steps: Mapping[str, int], rounds: int, round_s: float, start_s: float, left_s: float, launches: int | None
) -> Plan:
    """As many launches as fit with `rounds` each, then as many rounds as fit with that many launches."""
    if launches is None:
        candidates = range(_MOST_LAUNCHES, 0, -1)
        launches = next(count for count in candidates if _fitting(count, start_s + rounds * round_s, left_s))
    more = range(_MOST_ROUNDS, rounds, -2)
    rounds = next((count for count in more if _fitting(launches, start_s + count * round_s, left_s)), rounds)
    return Plan(launches=launches, rounds=rounds, steps=steps, fits=True, launch_s=start_s + rounds * round_s)


def _fitting(launches: int, launch_s: float, left_s: float) -> bool:
    # The sums of a plan that fills its budget exactly are off by rounding.
    return launches * launch_s <= left_s * (1 + 1e-9)


def _step_choices(step_s: Mapping[str, float], steps: int | None) -> list[Mapping[str, int]]:
    """Timed steps per turn, from the wished to the fewest."""
    if steps is not None:
        return [dict.fromkeys(step_s, steps)]
    fewest, most = _STEPS_PER_TURN[0], _STEPS_PER_TURN[-1]
    usual = {name: min(max(math.ceil(_TURN_S / seconds), fewest), most) for name, seconds in step_s.items()}
    single = {name: 1 if seconds >= _TURN_S / fewest else fewest for name, seconds in step_s.items()}
    return [usual, dict.fromkeys(step_s, fewest), single]


def _turns(step_s: Mapping[str, float], turns_per_round: int | Sequence[str]) -> list[str]:
    if isinstance(turns_per_round, int):
        return [name for name in step_s for _ in range(turns_per_round)]
    return list(turns_per_round)


def _check(
    step_s: Mapping[str, float],
    turns: Sequence[str],
    discard: Mapping[str, int],
    steps: int | None,
    launches: int | None,
    start_s: float,
) -> None:
    for name, seconds in step_s.items():
        if not (seconds > 0 and math.isfinite(seconds)):
            raise ValueError(f"step_s must be more than 0 seconds, got {seconds:g} for {name!r}")
    unknown = sorted({*turns, *discard} - set(step_s))
    if unknown:
        raise ValueError(f"turns_per_round and discard name {unknown}, but step_s has only {sorted(step_s)}")
    if not turns:
        raise ValueError(f"turns_per_round must give at least one turn, got {list(turns)} of {sorted(step_s)}")
    if steps is not None and steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    if launches is not None and launches < _FEWEST_LAUNCHES:
        raise ValueError(f"launches must be at least {_FEWEST_LAUNCHES} for an interval, got {launches}")
    if any(count < 0 for count in discard.values()) or not start_s >= 0:
        raise ValueError(f"discard and startup_s must not be negative, got {dict(discard)} and {start_s:g}")
