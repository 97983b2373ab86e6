"""The failures: each function lets its failure happen to a run and returns when the survivors have gone on."""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from failures.attack import attack, listening
from failures.run import Run

__all__ = ["CASES", "Course"]

OUTAGE_S = 10.0
PEERS = ("a", "b", "c")
_PAUSE_S, _SLOW_S, _QUICK_S = 0.05, 0.5, 0.015
"""Duration of a micro-batch: of most peers, of the slow one, and of those of whom one has to make a round alone, in 1 s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """What happened."""

    survivors: tuple[str, ...]
    """Peers that nothing was done to."""
    since: float
    """When the failure began."""
    longest: bool = False
    """Whether to judge the longest time between steps since then, not the time to the first."""
    returns: str | None = None
    """A peer that comes, or comes back, at `back`."""
    back: float = 0.0
    note: str = ""


def _begin(run: Run, names: tuple[str, ...] = PEERS, *, pause_s: float = _PAUSE_S, **victim: object) -> str:
    """Starts peers and lets them make their steps; a victim of the run's choice, which differs by `victim`."""
    chosen = run.random.choice(names)
    for name in names:
        run.spawn(name, **({"pause_s": pause_s} | (victim if name == chosen else {})))
    run.wait_together(names, run.count)
    return chosen


def _others(victim: str) -> tuple[str, ...]:
    return tuple(name for name in PEERS if name != victim)


def _some_time(run: Run) -> None:
    """Up to 2 s, a little more than a round of either engine takes."""
    time.sleep(run.random.uniform(0.0, 2.0))


def _kill(run: Run, *, whole: bool) -> Course:
    victim = _begin(run)
    _some_time(run)
    since = run.signal(victim, signal.SIGKILL, whole=whole)
    run.wait_steps(_others(victim), run.count, since)
    return Course(survivors=_others(victim), since=since)


def _kill_between(run: Run, place: str) -> Course:
    victim = _begin(run, dies_at=place)
    run.order("armed")
    run.wait(lambda: run.ended(victim), f"the death at {place}")
    run.stories[victim].follow()
    deaths = run.stories[victim].of("dies")
    since = deaths[0]["time"] if deaths else time.time()
    run.wait_steps(_others(victim), run.count, since)
    note = "" if deaths else f"{victim} ended by itself"
    # Those who were all but done may step at once, and wait in the round after it.
    return Course(survivors=_others(victim), since=since, longest=place == "commit", note=note)


def _outage(run: Run, *, begin: Callable[[str], None], end: Callable[[str], None]) -> Course:
    victim = _begin(run)
    _some_time(run)
    since = time.time()
    begin(victim)
    return _over(run, victim, since, end)


def _over(run: Run, victim: str, since: float, end: Callable[[str], None]) -> Course:
    """Ends an outage that began at `since`, when it is to end, and waits for all."""
    time.sleep(max(0.0, OUTAGE_S - (time.time() - since)))
    end(victim)
    back = time.time()
    run.wait_steps(_others(victim), run.count, since)
    run.wait_steps((victim,), run.count, back)
    return Course(survivors=_others(victim), since=since, returns=victim, back=back)


def _partition(run: Run) -> Course:
    assert run.network is not None
    network = run.network
    return _outage(run, begin=lambda victim: network.cut(run.place(victim)), end=lambda _: network.heal())


def _freeze(run: Run) -> Course:
    return _outage(
        run,
        begin=lambda victim: run.signal(victim, signal.SIGSTOP) and None,
        end=lambda victim: run.signal(victim, signal.SIGCONT) and None,
    )


def _freeze_between(run: Run, place: str) -> Course:
    victim = _begin(run, dies_at=place, freezes=True)
    run.order("armed")
    story = run.stories[victim]

    def frozen() -> bool:
        story.follow()
        return bool(story.of("dies"))

    run.wait(frozen, f"the stop at {place}")
    return _over(run, victim, story.of("dies")[0]["time"], lambda victim: run.signal(victim, signal.SIGCONT) and None)


def _calm(run: Run) -> Course:
    _begin(run)
    since = time.time()
    run.wait_steps(PEERS, 4 * run.count, since)
    return Course(survivors=PEERS, since=since, longest=True)


def _slow(run: Run) -> Course:
    slow = run.random.choice(PEERS)
    for name in PEERS:
        run.spawn(name, pause_s=_SLOW_S if name == slow else _PAUSE_S)
    run.wait_together(PEERS, run.count)
    since = time.time()
    run.wait_steps(PEERS, 2 * run.count, since)
    return Course(survivors=PEERS, since=since, longest=True)


def _late(run: Run) -> Course:
    first, joiner = PEERS[:2], PEERS[2]
    _begin(run, first)
    _some_time(run)
    since = time.time()
    run.spawn(joiner)
    run.wait_steps((joiner,), run.count, since)
    run.wait_steps(first, run.count, since)
    return Course(survivors=first, since=since, longest=True, returns=joiner, back=since)


def _one_left(run: Run) -> Course:
    names = (*PEERS, "d")
    survivor = _begin(run, names, pause_s=_QUICK_S)
    _some_time(run)
    since = time.time()
    for name in names:
        if name != survivor:
            run.signal(name, signal.SIGKILL)
    run.wait_steps((survivor,), run.count, since)
    return Course(survivors=(survivor,), since=since)


def _garbled(run: Run) -> Course:
    _begin(run)
    ports = listening(run.groups)
    since = time.time()
    taken = attack(ports)
    lasted_s = time.time() - since
    run.wait_steps(PEERS, run.count, time.time())
    note = f"{taken} connections to {len(ports)} ports in {lasted_s:.1f} s"
    return Course(survivors=PEERS, since=since, longest=True, note=note)


CASES: dict[str, tuple[str, Callable[[Run], Course]]] = {
    "calm": ("nothing happens: the control", _calm),
    "kill": ("a peer is killed at a random moment", partial(_kill, whole=True)),
    "kill-main": (
        "only the main process of a peer is killed, not those its engine started",
        partial(_kill, whole=False),
    ),
    "kill-all-reduce": (
        "a peer dies between the decision to average and the all-reduce",
        partial(_kill_between, place="all-reduce"),
    ),
    "kill-commit": (
        "a peer dies between the all-reduce and the agreement that it succeeded",
        partial(_kill_between, place="commit"),
    ),
    "partition": ("a peer is cut off for 10 s", _partition),
    "freeze": ("a peer with all its processes is stopped for 10 s", _freeze),
    "freeze-all-reduce": (
        "a peer with all its processes is stopped for 10 s between the decision to average and the all-reduce",
        partial(_freeze_between, place="all-reduce"),
    ),
    "slow": ("one of the peers is 10 times slower", _slow),
    "late": ("a peer joins late", _late),
    "one-left": ("all of four peers but one are killed at once", _one_left),
    "garbled": ("garbage is sent to every port of the run", _garbled),
}
"""Name: description, and what does it."""
