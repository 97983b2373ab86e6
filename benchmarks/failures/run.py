"""One run: a meeting point and its peers, each in a process group of its own, from their start to the last one's end."""

import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import psutil

from failures.log import Story
from failures.network import Network
from failures.peer import Part, fork, peer, serve

__all__ = ["Run", "Stuck"]

PATIENCE_S = 60.0
"""For anything to happen."""


class Stuck(RuntimeError):
    """What was waited for did not happen."""


class Run:
    """A swarm under test.

    Args:
        engine: what the peers train through.
        seed: of the data that the peers draw, and of what the failure leaves to chance.
        count: steps of all peers before the failure, and of the survivors after it.
        namespaces: how many peers, the meeting point included, live in network namespaces; 0 for loopback.
    """

    def __init__(self, engine: str, seed: int, *, count: int = 3, namespaces: int = 0) -> None:
        self.engine, self.seed, self.count = engine, seed, count
        self.random = random.Random(seed)
        self.folder = Path(tempfile.mkdtemp(prefix="swarm-failure-"))
        self.network = Network(f"swf{os.getpid()}", namespaces) if namespaces else None
        self.stories: dict[str, Story] = {}
        self.troubles: list[str] = []
        self._groups: dict[str, int] = {}
        self._codes: dict[str, int] = {}
        try:
            self._start("hub", serve, {})
            self.wait(lambda: (self.folder / "address").exists(), "the meeting point")
        except BaseException:
            self.close()
            raise

    def spawn(self, name: str, **differs: object) -> None:
        """Starts a peer; `differs` are fields of its `Part`."""
        address = (self.folder / "address").read_text()
        self.stories[name] = Story(name=name, folder=self.folder)
        self._start(name, partial(peer, address=address), differs)

    def _start(self, name: str, body: Callable[[Part], None], differs: dict[str, object]) -> None:
        place = len(self._groups)
        where = (
            {}
            if self.network is None
            else {"host": self.network.host(place), "namespace": self.network.namespace(place)}
        )
        part = Part(
            name=name,
            engine=self.engine,
            folder=self.folder,
            seed=self.seed * 100 + place,
            **(where | differs),  # type: ignore[arg-type]
        )
        # An order to end that came between the two would leave a peer that nobody knows of.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        self._groups[name] = fork(part, lambda: body(part))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    @property
    def groups(self) -> list[int]:
        """Process groups of all that were started."""
        return list(self._groups.values())

    def place(self, name: str) -> int:
        """Number of a peer's namespace."""
        return list(self._groups).index(name)

    def steps(self, name: str, since: float = 0.0) -> int:
        """Steps that a peer has made since then."""
        self.stories[name].follow()
        return len(self.stories[name].of("applied", since=since))

    def wait(self, happened: Callable[[], bool], what: str) -> None:
        """Returns when it has.

        Raises:
            Stuck: it has not, in PATIENCE_S.
        """
        deadline = time.monotonic() + PATIENCE_S
        while not happened():
            if time.monotonic() > deadline:
                raise Stuck(f"{what} did not come in {PATIENCE_S:.0f} s")
            time.sleep(0.02)

    def wait_steps(self, names: Sequence[str], count: int, since: float = 0.0) -> None:
        """Returns when each of these peers has made `count` steps since then, or has ended."""

        def made() -> bool:
            return all(self.steps(name, since) >= count or self.ended(name) for name in names)

        self.wait(made, f"step {count} of {', '.join(names)}")

    def wait_together(self, names: Sequence[str], count: int) -> None:
        """Returns when these peers have made `count` steps since the last of them joined."""

        def joined() -> bool:
            for name in names:
                self.stories[name].follow()
                if self.ended(name):
                    raise Stuck(f"{name} ended before the failure")
            return all(self.stories[name].of("joined") for name in names)

        self.wait(joined, f"{', '.join(names)} joined")
        since = max(self.stories[name].of("joined")[0]["time"] for name in names)
        self.wait_steps(names, count, since)

    def order(self, order: str) -> None:
        """Gives all processes an order."""
        (self.folder / order).touch()

    def signal(self, name: str, number: int, *, whole: bool = True) -> float:
        """Signals a peer, by default with all its processes; the time."""
        now = time.time()
        (os.killpg if whole else os.kill)(self._groups[name], number)
        return now

    def ended(self, name: str) -> bool:
        """Whether a peer's main process has ended."""
        if name not in self._codes:
            pid, status = os.waitpid(self._groups[name], os.WNOHANG)
            if pid:
                self._codes[name] = os.waitstatus_to_exitcode(status)
        return name in self._codes

    def finish(self, survivors: Sequence[str]) -> None:
        """Stops the peers, and notes those that failed, hung or left processes behind."""
        self.order("stop")
        deadline = time.monotonic() + 30
        while not all(self.ended(name) for name in self.stories) and time.monotonic() < deadline:
            time.sleep(0.05)
        for name in survivors:
            if not self.ended(name):
                self.troubles.append(f"{name} did not end in 30 s")
            elif self._codes[name]:
                self.troubles.append(f"{name} ended with {self._codes[name]}: {self._last_words(name)}")
        for name in survivors:
            left = _members(self._groups[name])
            if self.ended(name) and left:
                self.troubles.append(f"{name} left {len(left)} processes: {', '.join(left)}")

    def _last_words(self, name: str) -> str:
        lines = (self.folder / f"{name}.log").read_text(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "no word"

    def close(self, keep: Path | None = None) -> None:
        """Kills what is left; moves the logs into `keep`, or deletes them."""
        for name, group in self._groups.items():
            try:
                os.killpg(group, signal.SIGCONT)
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                pass
            while not self.ended(name):
                time.sleep(0.01)
        if self.network is not None:
            self.network.close()
        if keep is not None:
            keep.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(self.folder, keep, dirs_exist_ok=True)
        shutil.rmtree(self.folder)


def _members(group: int) -> list[str]:
    """Names of living processes of a process group, once they had 2 s to end."""
    for _ in range(20):
        found = []
        for process in psutil.process_iter():
            try:
                if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.name())
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        if not found:
            return []
        time.sleep(0.1)
    return found
