"""One peer's way to one mean: who must be there, how long to wait for them, and when to go on without.

Who is there changes while the peers gather: one comes, one dies, one is slow. So a round is not one call with a timeout
but a loop that looks at the roster every 50 ms, and tells the group that is forming. It costs one thread's wake-up each.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from hivemind.averaging.allreduce import AllreduceException
from hivemind.utils import MPFuture

from bareloop.swarm.engine import RoundFailed
from bareloop.swarm.hivemind_rounds import Attempt, Mean, RoundAverager

__all__ = ["Meeting", "meet"]

_LOOK_S = 0.05
"""Seconds between two looks at who is there."""

_TRIES = 8
"""Failed attempts after which a round is given up for now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """What a peer does and asks while it waits for a mean."""

    members: Callable[[float], frozenset[bytes]]
    """Who must be in the group, told the seconds waited so far; this peer alone when there is no other to average with, and
    nobody while the roster is not clear."""
    attempt: Callable[[frozenset[bytes]], Attempt]
    """A try with those members. Asked once the gradients are in the averager's tensors."""
    in_step: Callable[[], bool]
    """False when the others are a round further."""
    refresh: Callable[[], object]
    """Looks at who is there, after a failure."""
    limit_s: Callable[[], float]
    """Seconds after which to give up."""


def meet(averager: RoundAverager, meeting: Meeting) -> Mean | None:
    """The mean, which is then in the averager's tensors; None when this peer is the only one.

    Raises:
        RoundFailed: it could not be had; the averager's tensors are as they were.
        RuntimeError: the averager's process has died.
    """
    began, failures, reason = time.monotonic(), 0, "the other peers were not clear"
    running: MPFuture[Mean] | None = None
    expected: frozenset[bytes] = frozenset()
    while True:
        waited_s = time.monotonic() - began
        in_step = meeting.in_step()
        members = meeting.members(waited_s)
        late = waited_s > meeting.limit_s() or failures >= _TRIES
        if running is None:
            if not in_step or late:
                raise RoundFailed(reason if in_step else "the others have gone on")
            if len(members) == 1:
                return None
            if members:
                running, expected = averager.attempt(meeting.attempt(members)), members
            else:
                time.sleep(_LOOK_S)
            continue
        if not in_step or late or len(members) == 1:
            averager.give_up()
        elif members and members != expected:
            averager.expect(members)
            expected = members
        try:
            return running.result(_LOOK_S)
        except TimeoutError:
            if not averager.is_alive():
                raise RuntimeError("this peer's averaging process has died: leave the run and join again") from None
        except AllreduceException as error:
            running, reason, failures = None, str(error), failures + 1
            meeting.refresh()
