"""All contestants alive in one process, one at a time: who has the baton trains, the others wait at a step's end.

Each contestant trains in a thread of its own, as it would alone. A turn is some steps; the first ones, which find the
caches full of another's data, are not timed. Waiting threads sleep on a lock and take no time from the one that runs.
On several processes the order is the same in all, so collectives of one contestant meet on all ranks.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from contestants.task import Setting, Task

__all__ = ["time_in_turns"]

WARM_UP = 3
DISCARD = 1
PATIENCE_S = 600.0


class _Runner:
    """One contestant in its thread."""

    def __init__(self, name: str, train: Callable[[Task], nn.Module], setting: Setting, steps: int) -> None:
        self.name = name
        self.marks: list[int] = []
        self.model: nn.Module | None = None
        self.failure: BaseException | None = None
        self._train = train
        self._task = Task(setting=setting, steps=steps, at_step=self._at_step)
        self._left = 0
        self._mine, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._accelerate_state: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def turn(self, steps: int) -> list[int]:
        """Lets the contestant train for some steps; the nanoseconds of the clock at the end of each.

        Raises:
            RuntimeError: it ended early, or did not get there in time.
        """
        self.marks, self._left = [], steps
        self._put_accelerate_state()
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._mine.release()
        if not self._done.acquire(timeout=PATIENCE_S):
            raise RuntimeError(f"{self.name} did not make {steps} steps in {PATIENCE_S:g} s")
        self._keep_accelerate_state()
        if self.failure is not None or len(self.marks) < steps:
            raise RuntimeError(f"{self.name} ended in its turn: {self.failure!r}") from self.failure
        return self.marks

    def finish(self) -> None:
        """Lets the contestant train to its end."""
        self._left = -1
        self._put_accelerate_state()
        self._mine.release()
        self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        try:
            self.model = self._train(self._task)
        except BaseException as error:
            self.failure = error
        self._done.release()

    def _at_step(self) -> None:
        self.marks.append(time.perf_counter_ns())
        self._left -= 1
        if self._left == 0:
            self._done.release()
            self._mine.acquire()

    def _put_accelerate_state(self) -> None:
        # Accelerators of one process share one object that says how many micro-batches to accumulate and whether this
        # is the last of them: each contestant gets its own back with the baton.
        shared = _accelerate_state()
        shared.clear()
        shared.update(self._accelerate_state)

    def _keep_accelerate_state(self) -> None:
        self._accelerate_state = dict(_accelerate_state())


def _accelerate_state() -> dict[str, Any]:
    from accelerate.state import GradientState

    return GradientState._shared_state


def time_in_turns(
    contestants: Mapping[str, Callable[[Task], nn.Module]],
    setting: Setting,
    order: Sequence[Sequence[str]],
    steps: int,
) -> list[dict[str, float]]:
    """Seconds per step, `[round][name]`: each contestant has one turn of `steps` timed steps in each round.

    Raises:
        RuntimeError: a contestant ended in its turn.
    """
    total = WARM_UP + len(order) * (DISCARD + steps) + 1
    runners = {name: _Runner(name, train, setting, total) for name, train in contestants.items()}
    for runner in runners.values():
        runner.turn(WARM_UP)
    rounds = []
    for names in order:
        timed = {}
        for name in names:
            marks = runners[name].turn(DISCARD + steps)
            timed[name] = (marks[-1] - marks[DISCARD - 1]) / steps / 1e9
        rounds.append(timed)
    for runner in runners.values():
        runner.finish()
    return rounds
