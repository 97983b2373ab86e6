"""bareloop inside the process of the script: finds the steps, observes, takes turns, and ends at a step boundary.

One agent per process. It sleeps until an optimizer has stepped; a process that never trains (a launcher, a loader
worker) never hears of it. Every change of what it does happens at a step boundary, in `Agent.after_step`.
"""

import atexit
import importlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from bareloop.profiler.probes import patches
from bareloop.profiler.probes.batch import observe_forward, observe_loaded
from bareloop.profiler.probes.channel import Channel
from bareloop.profiler.probes.cycle import Cycle
from bareloop.profiler.probes.first_steps import StepWindow
from bareloop.profiler.probes.inspection import Inspection
from bareloop.profiler.probes.phase_clock import PhaseClock
from bareloop.profiler.probes.roots import RootCalls
from bareloop.profiler.probes.turn import Turn
from bareloop.trace import StepFacts

__all__ = ["Agent", "StopRun", "wake"]

_agent: "Agent | None" = None


class StopRun(SystemExit):
    """Raised at a step boundary when bareloop has seen enough: the script's `finally` and exit handlers run."""


def wake(session: str) -> None:
    """Starts the agent of this process; `session` is the path of the session file."""
    global _agent
    with open(session) as file:
        settings = json.load(file)
    _agent = Agent(settings)
    os.register_at_fork(after_in_child=_after_fork)
    atexit.register(_at_exit)


def _after_fork() -> None:
    """A forked child starts anew: its parent's connection and counts are not its own."""
    global _agent
    if _agent is not None:
        _agent.abandon()
        _agent = Agent(_agent.settings)


def _at_exit() -> None:
    if _agent is not None:
        _agent.ended()


class Agent:
    """The state of one training process, from its first step to its last."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.clock = PhaseClock()
        self.cycle = Cycle()
        self.calls = self.cycle.counts
        self.roots = RootCalls(self.clock, self.forward)
        self.window = StepWindow()
        self.heavy = settings["role"] == "inspect"
        self.steps: list[StepFacts] = []
        self.index = 0
        self.train_loader: Any = None
        self.last_loader: Any = None
        self.optimizers: dict[int, Any] = {}
        self.evaluated = False
        self.gradients_ready = False
        self.inspection: Inspection | None = None
        self.turn: Turn | None = None
        self.channel: Channel | None = None
        self.stopping = False
        self._windows: list[StepWindow] = []
        self._at_boundary: Callable[[bool], None] = self._first_steps
        patches.install(self)
        self.roots.look()

    # What the wrappers report.

    def loaded(self, loader: Any, batch: Any) -> Any:
        """See `patches.Listener`."""
        self.last_loader = loader
        if patches.batch_override is not None and loader is self.train_loader:
            batch = patches.batch_override(batch)
        if self.heavy and self._is_mine():
            facts = self._observe(observe_loaded, batch)
            if facts is not None:
                self.window.loaded.append(facts)
        return batch

    def forward(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> None:
        """The outermost module is called."""
        if not training:
            self.evaluated = self.evaluated or id(module) in self.roots.roots
            return
        self.train_loader = self.last_loader
        if self.heavy:
            self.window.forwards += 1
            if self.window.fresh:
                self.window.fresh = False
                facts = self._observe(observe_forward, module, args, kwargs, self._loader_batch_size())
                self.window.forwarded += [facts] if facts is not None else []

    def backward(self, tensors: Any) -> None:
        """See `patches.Listener`."""
        if self.channel is None and self._at_boundary == self._first_steps and self._is_mine():
            self._observe(self._wait_for_the_others)
        if self.heavy and self._is_mine():
            self._observe(self.window.add_backward, tensors)
        self.gradients_ready = True

    def clipped(self, kind: str, limit: float, norm: Any) -> None:
        """See `patches.Listener`."""
        if self.heavy and kind == "norm":
            self.window.max_grad_norm = float(limit)
            self.window.clip_norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def scaled(self, scaler: Any) -> None:
        """See `patches.Listener`."""
        if self.heavy:
            self.window.scale = float(scaler.get_scale())

    def saved(self) -> None:
        """See `patches.Listener`."""
        self.evaluated = True

    def before_step(self, optimizer: Any) -> None:
        """See `patches.Listener`."""
        if self.heavy and self._is_mine():
            self._observe(self.window.before_step, optimizer)

    def after_step(self, optimizer: Any, *, skipped: bool = False) -> None:
        """See `patches.Listener`. Where a step of the run ends, whatever is due is done here."""
        if not self._is_mine():
            if self.index:
                return
            self.clock.thread = threading.get_ident()  # the script trains in a thread of its own
        if id(optimizer) not in self.calls:
            self._met(optimizer)
        self.gradients_ready = False
        boundary = self.cycle.stepped(id(optimizer))
        if skipped and self.heavy:
            self.window.optimizers.setdefault(id(optimizer), optimizer)
        if boundary and len(self.calls) >= self.settings.get("optimizers", 1):
            self.index += 1
            self._observe(self._at_boundary, skipped)

    def _met(self, optimizer: Any) -> None:
        """A first call of an optimizer's step. When others had stepped before, they were in the same first step."""
        self.optimizers[id(optimizer)] = optimizer
        if self._at_boundary == self._first_steps:
            for window in reversed(self._windows):
                self.window.merge(window)
            self._windows.clear()
            self.steps.clear()
            self.index = 0

    def _observe(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a probe. A fault of ours is told to bareloop, and the script runs on without us."""
        try:
            return function(*args)
        except Exception:
            self._leave_alone()
            self._connect()
            self._say({"type": "broken", "error": traceback.format_exc()})
            return None

    def _is_mine(self) -> bool:
        return threading.get_ident() == self.clock.thread

    def _loader_batch_size(self) -> int | None:
        size = getattr(self.train_loader, "batch_size", None)
        return size if isinstance(size, int) else None

    # What is done at a boundary, one method per stage of a run.

    def _first_steps(self, skipped: bool) -> None:
        if self.heavy:
            self.steps.append(self.window.facts(self.index, skipped=skipped))
            self._windows.append(self.window)
            self.window = StepWindow()
        if self.channel is None:
            self._wait_for_the_others()
        if self._at_boundary != self._first_steps:
            return
        if self.index < self.settings["first_steps"]:
            return
        self.heavy = False
        self._windows.clear()
        self.roots.settle()
        if next(iter(self.optimizers.values())).param_groups[0]["params"][0].is_cuda:
            self.clock.use_cuda()
            patches.watch_transfers(self)
        if self.settings["role"] == "inspect":
            self.inspection = Inspection(self)
            self._at_boundary = self._inspecting
            self._inspecting(skipped)
        else:
            self._ready()

    def _wait_for_the_others(self) -> None:
        """Scripts start side by side but step one after the other, from the first backward on.

        Two that step at once fight for the cores: with two threads each on two cores a step takes 10 to 50 times as long.
        """
        self._connect()
        self._say({"type": "started"})
        assert self.channel is not None
        command = self.channel.receive()
        if command["command"] == "stop":
            self._stop(True)
        if command["command"] != "go":
            self._leave_alone()

    def _inspecting(self, skipped: bool) -> None:
        assert self.inspection is not None
        if self.inspection.advance(sys._getframe(1)):
            self._say({"type": "facts", **self.inspection.message()})
            self._obey()

    def _ready(self) -> None:
        self._say({"type": "ready", "step": self.index})
        self._obey()

    def _in_turn(self, skipped: bool) -> None:
        assert self.turn is not None
        if self.turn.step_done(self.evaluated):
            message = self.turn.finish()
            self.turn = None
            self._say(message)
            self._obey()
        self.evaluated = False

    def _obey(self) -> None:
        """Waits for a command at this boundary and starts on it."""
        assert self.channel is not None
        command = self.channel.receive()
        while command["command"] == "turn":
            self.turn = Turn(self.clock, steps=command["steps"], discard=command["discard"])
            error = self.turn.start(load_ablation(command.get("ablation")))
            if error is None:
                self._at_boundary = self._in_turn
                return
            self._say({"type": "turn", "error": error})
            command = self.channel.receive()
        if command["command"] == "stop":
            self._stop(True)
        self._leave_alone()

    def _stop(self, skipped: bool) -> None:
        """Ends the script here. Called again at later boundaries when the script swallowed the exit."""
        self.stopping = True
        self._at_boundary = self._stop
        self.roots.stop()
        raise StopRun(0)

    def _leave_alone(self) -> None:
        """From here on the script runs unwatched: another process speaks for it, or a probe of ours broke.

        It is called inside an optimizer's step, where torch goes through its hooks: ours stay among them, idle.
        """
        self.heavy = False
        self._at_boundary = _nothing
        self.roots.stop()
        patches.unwrap()

    # The line to bareloop.

    def _connect(self) -> None:
        if self.channel is None:
            self.channel = Channel(self.settings["socket"])
            rank, world = rank_and_world()
            self._say({"type": "hello", "participant": self.settings["participant"], "rank": rank, "world": world})

    def _say(self, message: dict[str, Any]) -> None:
        assert self.channel is not None
        self.channel.send({"pid": os.getpid(), **message})

    def ended(self) -> None:
        """The process is about to end: tells bareloop how far it came, when it trained at all."""
        if self.index and not self.stopping:
            try:
                self._connect()
            except OSError:
                return  # bareloop has gone: there is nobody to tell
            self._say({"type": "ended", "step": self.index})

    def abandon(self) -> None:
        """Lets go of everything that belongs to the parent of a fork."""
        self.roots.stop()
        patches.uninstall()
        if self.channel is not None:
            self.channel.close()


def _nothing(skipped: bool) -> None: ...


def rank_and_world() -> tuple[int, int]:
    """Rank and number of training processes, from torch.distributed or the launcher's environment."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def load_ablation(spec: dict[str, Any] | None) -> Callable[[], AbstractContextManager[Any]] | None:
    """The ablations named in a command, as one thing to enter: {"causes": [{"module": ..., "data": ...}]}."""
    if not spec:
        return None
    from contextlib import ExitStack

    def enter() -> AbstractContextManager[Any]:
        stack = ExitStack()
        try:
            for cause in spec["causes"]:
                stack.enter_context(importlib.import_module(cause["module"]).CAUSE.ablate(cause["data"]))
        except BaseException:
            stack.close()
            raise
        return stack

    return enter
