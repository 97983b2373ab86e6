"""From the logs of a run's peers to a verdict: was every applied gradient the true mean, and was any sample lost?

A gradient that a peer applied is held against the weighted means of all subsets of what the peers had to give in that
round (at most a few hundred means of 18,755 numbers), so the judge needs no word of the engine about who took part.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from failures.log import Event, Story

__all__ = ["APART", "Finding", "difference", "findings"]

TOLERANCE = 1e-5
"""Of the largest element of a gradient."""
APART = 1e-5
"""Difference between parameters from which on they are those of two models."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What the logs say about the gradients of a run."""

    checked: int
    """Gradients applied by all peers together."""
    wrong: int
    """Those that are no weighted mean of what the peers had to give in that round, this peer included."""
    zero: int
    worst: float
    """Largest error of those that are, relative to the largest element."""
    lost: dict[str, int]
    """Samples per peer that came into no mean which was applied, or into one that was undone."""
    twice: int
    """Samples that came into two means."""
    details: list[str]


def findings(stories: Sequence[Story], *, since: float = 0.0) -> Finding:
    """Judges each applied gradient, and each sample that was lost or counted twice after `since`.

    Before a failure a peer loses what it computed while it joined, when the others have just made a round: that is no price
    of the failure.
    """
    wrong, zero, worst, details = 0, 0, 0.0, []
    spent: dict[tuple[str, int], list[str]] = defaultdict(list)
    """(peer, attempt's place) -> those who applied a mean with it"""
    applied = [(story, event) for story in stories for event in story.of("applied")]
    for story, event in applied:
        given = story.vector(event["vector"])
        if not np.abs(given).max() > 0:
            zero += 1
            details.append(f"{story.name} applied zeros in round {event['round']}")
            continue
        error, members = _explained(given, story, event, stories)
        if error > TOLERANCE:
            wrong += 1
            details.append(f"{story.name} applied no mean in round {event['round']}: {error:.1e} off the nearest")
            continue
        worst = max(worst, error)
        for name, place in members:
            spent[name, place].append(story.name)
    lost, twice = {}, 0
    for story in stories:
        lost[story.name], again = _balance(story, spent, since)
        lost[story.name] += _overruled(story, stories, since)
        twice += again
    return Finding(checked=len(applied), wrong=wrong, zero=zero, worst=worst, lost=lost, twice=twice, details=details)


def _explained(
    given: np.ndarray, story: Story, event: Event, stories: Sequence[Story]
) -> tuple[float, tuple[tuple[str, int], ...]]:
    """(relative error, members as (peer, attempt's place)) of the subset with this peer whose mean is nearest to `given`."""
    own = [a for a in story.of("attempt") if a["time"] <= event["time"]][-1:]
    if not own or own[0]["round"] != event["round"] or own[0]["rows"] != event["rows"]:
        return float("inf"), ()
    others = [
        [
            None,
            *((other, a) for a in other.of("attempt") if a["round"] == event["round"] and a["time"] <= event["time"]),
        ]
        for other in stories
        if other is not story
    ]
    best: tuple[float, tuple[tuple[str, int], ...]] = (float("inf"), ())
    scale = float(np.abs(given).max())
    for combination in _combinations(others):
        members = [(story, own[0]), *combination]
        total = sum(a["rows"] for _, a in members)
        mean = sum((s.vector(a["vector"]).astype(np.float64) * (a["rows"] / total) for s, a in members), np.zeros(()))
        error = float(np.abs(mean - given).max()) / scale
        if error < best[0]:
            best = error, tuple((s.name, a["vector"]) for s, a in members)
        if error <= TOLERANCE:
            break
    return best


def _combinations(others: Sequence[Sequence[Any]]) -> Iterator[list[tuple[Story, Event]]]:
    """Each way to take at most one attempt of each other peer, the latest attempts of all first."""
    for chosen in itertools.product(*(list(reversed(choices)) for choices in others)):
        yield [choice for choice in chosen if choice is not None]


def _balance(story: Story, spent: dict[tuple[str, int], list[str]], since: float) -> tuple[int, int]:
    """(samples lost, samples counted twice) of one peer, from then on.

    A peer that could not apply a mean which the others made with its samples, and then downloaded their state, has lost only
    what it added after that; one that goes on with these samples counts them twice.
    """
    lost, twice = 0, 0
    pending: list[Event] = []
    """Attempts since the last step, which all hold the same first rows."""
    for event in story.events:
        made = [a["rows"] for a in pending if spent.get((story.name, a["vector"]))]
        if event["kind"] == "attempt":
            pending.append(event)
        elif event["kind"] == "applied":
            mine = pending and story.name in spent.get((story.name, pending[-1]["vector"]), ())
            counts = event["time"] >= since
            lost += 0 if mine or not counts else event["rows"]
            twice += max(made[:-1] if mine else made, default=0) if counts else 0
            pending = []
        elif event["kind"] == "replaced":
            lost += event["rows"] - max(made, default=0) if event["time"] >= since else 0
            pending = []
    return lost, twice


def _overruled(story: Story, stories: Sequence[Story], since: float) -> int:
    """Samples that a peer applied in rounds which were undone: it took the state of one who had applied others in them."""
    undone = 0
    for event in story.of("applied", since=since):
        if story.of("replaced", since=event["time"]):
            mine = story.vector(event["parameters"])
            undone += event["rows"] * any(
                np.abs(other.vector(theirs["parameters"]) - mine).max() > APART
                for other in stories
                if other is not story
                for theirs in other.of("applied")
                if theirs["round"] == event["round"] and not other.of("replaced", since=theirs["time"])
            )
    return undone


def difference(stories: Sequence[Story]) -> float:
    """Largest difference between parameters of these peers after the last round that all applied; NaN without one."""
    rounds = [{event["round"]: event for event in story.of("applied")} for story in stories]
    common = set.intersection(*map(set, rounds)) if rounds else set()
    if not common:
        return float("nan")
    last = max(common)
    vectors = [s.vector(r[last]["parameters"]) for s, r in zip(stories, rounds, strict=True)]
    return max(float(np.abs(v - vectors[0]).max()) for v in vectors)
