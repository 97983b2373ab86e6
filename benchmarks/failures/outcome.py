"""What one run came to, and the table of many."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from failures.cases import CASES, Course
from failures.judge import APART, difference, findings
from failures.log import Story
from failures.run import Run

__all__ = ["LIMIT_S", "Outcome", "judge", "report", "summary"]

LIMIT_S = {"hivemind": 10.0, "torchft": 3.0, "hivemind.Optimizer": 10.0, "torchft.DDP": 3.0}
"""Engines, and seconds after which survivors must have stepped again. The last two are the plain libraries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One run. Numbers that could not be had are NaN."""

    engine: str
    case: str
    seed: int
    next_step_s: float
    """Until every survivor has stepped; where nothing stops at once ("slow", "late", "garbled") the longest time between steps."""
    usual_step_s: float
    """Median time between steps before the failure."""
    blocked_s: float
    """What the most blocked survivor waited in its engine from the failure to its next step."""
    failed_rounds: int
    """Attempts to average that survivors saw fail since the failure."""
    lost: int
    """Samples of survivors that came into no gradient."""
    twice: int
    """Samples that came into two."""
    back_s: float
    """Until the peer that was away, or came late, made a step with the others."""
    back_lost: int
    """Samples which that peer lost."""
    checked: int
    """Gradients that were applied, by all peers."""
    wrong: int
    zero: int
    worst: float
    """Largest relative error of those that are right."""
    apart: float
    """Largest difference between the survivors' parameters after their last common step."""
    said: list[str]
    """What survivors told their users after the failure."""
    note: str
    violations: list[str]


def judge(run: Run, case: str, course: Course) -> Outcome:
    """Holds the logs of a run against the limits."""
    for story in run.stories.values():
        story.follow()
    found = findings(list(run.stories.values()), since=course.since)
    survivors = [run.stories[name] for name in course.survivors]
    until = max((_first(story, course.since) for story in survivors), default=math.nan)
    pause_s = max(_longest(story, course.since) for story in survivors) if course.longest else until - course.since
    lost = sum(found.lost[name] for name in course.survivors)
    apart = difference(survivors)
    back = None if course.returns is None else run.stories[course.returns]
    back_s = math.nan if back is None else _together(back, survivors, course.back) - course.back
    checks = {
        f"{pause_s:.1f} s without a step": not pause_s <= LIMIT_S[run.engine],
        f"survivors lost {lost} samples": lost > 0,
        f"{found.twice} samples counted twice": found.twice > 0,
        f"survivors' parameters differ by {apart:.1e}": not apart <= APART,
        f"{course.returns} made no step with the others again": back is not None and math.isnan(back_s),
    }
    if case == "late" and back is not None:
        start = _difference_at_start(back, survivors)
        checks[f"the joiner began {start:.1e} off the others"] = not start <= 0
    failed = [w for s in survivors for w in s.of("waited", since=course.since) if w["on"] == "average"]
    return Outcome(
        engine=run.engine,
        case=case,
        seed=run.seed,
        next_step_s=pause_s,
        usual_step_s=median([_interval(story, course.since) for story in survivors]),
        blocked_s=max(_blocked(story, course.since, math.inf if course.longest else until) for story in survivors),
        failed_rounds=sum(wait["outcome"] != "done" for wait in failed),
        lost=lost,
        twice=found.twice,
        back_s=back_s,
        back_lost=0 if course.returns is None else found.lost[course.returns],
        checked=found.checked,
        wrong=found.wrong,
        zero=found.zero,
        worst=found.worst,
        apart=apart,
        said=[f"{s.name}: {e['level']} {e['message']}" for s in survivors for e in s.of("said", since=course.since)],
        note=course.note,
        violations=[*run.troubles, *found.details, *(what for what, holds in checks.items() if holds)],
    )


def _first(story: Story, since: float) -> float:
    """Time of the first step after `since`; NaN without one."""
    return next((event["time"] for event in story.of("applied", since=since)), math.nan)


def _longest(story: Story, since: float) -> float:
    """Longest time between two steps of which the later is after `since`, in seconds."""
    times = [event["time"] for event in story.of("applied")]
    return max((b - a for a, b in itertools.pairwise(times) if b > since), default=math.nan)


def _interval(story: Story, until: float) -> float:
    """Median time between steps before `until`, in seconds."""
    times = [event["time"] for event in story.of("applied") if event["time"] < until]
    return median(b - a for a, b in itertools.pairwise(times)) if len(times) > 1 else math.nan


def _blocked(story: Story, since: float, until: float) -> float:
    """Seconds in which the engine kept a peer from training."""
    return sum(
        max(0.0, min(event["time"], until) - max(event["time"] - event["seconds"], since))
        for event in story.of("waited", since=since)
    )


def _together(back: Story, others: Sequence[Story], since: float) -> float:
    """Time of the first step after which `back` has another's parameters; NaN without one."""
    theirs = {e["round"]: s.vector(e["parameters"]) for s in others for e in s.of("applied")}
    for event in back.of("applied", since=since):
        other = theirs.get(event["round"])
        if other is not None and abs(back.vector(event["parameters"]) - other).max() <= APART:
            return event["time"]
    return math.nan


def _difference_at_start(joiner: Story, others: Sequence[Story]) -> float:
    """Largest difference between what a joiner began with, and what another had then; NaN when no other was there."""
    start = joiner.of("joined")[0]
    own = joiner.vector(start["parameters"])
    theirs = [s.vector(e["parameters"]) for s in others for e in s.of("applied") if e["round"] == start["round"] - 1]
    return min((float(abs(own - other).max()) for other in theirs), default=math.nan)


def summary(outcome: Outcome) -> str:
    """One line for whoever waits."""
    verdict = "; ".join(outcome.violations)[:400] or "as it should be"
    return (
        f"{outcome.engine:18} {outcome.case:16} seed {outcome.seed}: next step {outcome.next_step_s:5.2f} s,"
        f" usually {outcome.usual_step_s:4.2f} s, lost {outcome.lost}, {outcome.checked} gradients: {verdict}"
    )


def report(outcomes: Sequence[Mapping[str, Any]]) -> str:
    """A table of medians and maxima, every violation, and what the survivors said."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for outcome in sorted(outcomes, key=lambda o: (o["engine"], list(CASES).index(o["case"]), o["seed"])):
        groups[outcome["engine"], outcome["case"]].append(outcome)
    lines = [
        "| engine | case | runs | next step, s | usual, s | blocked, s | failed rounds | lost | back, s | lost by it | gradients"
        " | wrong | zero | worst error | apart | violations |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(engine, case, group) for (engine, case), group in groups.items()]
    lines += ["", "Median / maximum. Violations:", ""]
    for (engine, case), group in groups.items():
        counted = Counter(violation for o in group for violation in o["violations"])
        lines += [f"- {engine}, {case}: {what} ({count} x)" for what, count in counted.items()]
    return "\n".join(lines)


def _row(engine: str, case: str, group: Sequence[Mapping[str, Any]]) -> str:
    def both(key: str, form: str = ".2f") -> str:
        values = [o[key] for o in group if not math.isnan(o[key])]
        return f"{median(values):{form}} / {max(values):{form}}" if values else "-"

    def total(key: str) -> str:
        return str(sum(o[key] for o in group))

    cells = [
        engine,
        case,
        str(len(group)),
        both("next_step_s"),
        both("usual_step_s"),
        both("blocked_s"),
        both("failed_rounds", ".0f"),
        total("lost"),
        both("back_s"),
        both("back_lost", ".0f"),
        total("checked"),
        total("wrong"),
        total("zero"),
        f"{max(o['worst'] for o in group):.0e}",
        f"{max(o['apart'] for o in group):.0e}",
        str(sum(bool(o["violations"]) for o in group)),
    ]
    return f"| {' | '.join(cells)} |"
