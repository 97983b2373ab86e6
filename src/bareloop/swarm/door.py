"""The door to a swarm: `join` gives the accumulator that `bareloop.steps` and the lean Trainer take.

    with swarm.join("my-run", target_batch=4096, engine="torchft", peers=["127.0.0.1:29510"]) as run:
        for step in steps(model, optimizer, batches, loss_fn, accumulate=run, max_norm=1.0, scheduler=scheduler): ...

or by hand:

        run.attach(model, optimizer, scheduler)             # joins: a late peer has the run's state after this
        for batch in batches:
            with run.micro_batch(len(batch)):
                loss_fn(model, batch).backward()            # a mean over the micro-batch
            if run.ready():
                with run.averaged() as mean:
                    if mean:                                # the mean of all peers, in param.grad
                        optimizer.step()
                        scheduler.step()

A peer applies the true mean of a round or nothing. Where the mean can't be had the local gradients stay, and the round
goes on; where the others have gone on without it, their state takes the place of its own, and the samples that were
accumulated for parameters that are gone are dropped and counted (`status.lost_samples`). Between rounds it costs what
`FlatAccumulator` costs, one question to the engine a micro-batch, and a record for `bareloop swarm watch` a second,
sent with the micro-batches: a peer whose micro-batch takes longer shows up less often.
"""

import atexit
import logging
import math
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from bareloop.swarm.accumulator import FlatAccumulator
from bareloop.swarm.engine import Engine, RoundFailed, StateReplaced, TrainingState
from bareloop.swarm.engines import engine_of
from bareloop.swarm.ranks import over_ranks
from bareloop.swarm.status import Meter, SwarmStatus, peer_name, record

__all__ = ["Swarm", "join"]

_log = logging.getLogger(__name__)

_PUBLISHED_EVERY_S = 1.0


def join(
    run_id: str, *, target_batch: float, engine: str = "hivemind", peers: Sequence[str] = (), options: Any = None
) -> "Swarm":
    """A peer of the run `run_id`. The network is joined when it is attached to a model, which `steps` and Trainer do.

    Args:
        run_id: the run's name, the same for all its peers: letters, digits, "-" and "_".
        target_batch: samples of all peers that make a round, counted as the micro-batches are: `steps` counts what its
            loss_fn counts (labels, as a rule), or micro-batches where loss_fn returns a plain mean; Trainer counts rows.
        engine: "hivemind" for peers that find each other over the internet, "torchft" for a cluster.
        peers: addresses as `bareloop swarm serve` prints them: for hivemind those of any peers, none for the first one;
            for torchft that of the lighthouse.
        options: `HivemindOptions` or `TorchFTOptions`; None takes the defaults.

    Raises:
        ValueError: an argument out of range, an address that the engine can't use, options of the other engine.
        ImportError: the engine's package is not installed.
    """
    if not isinstance(run_id, str) or not run_id or not all(_names(letter) for letter in run_id):
        raise ValueError(f"run_id={run_id!r}: must be a name of letters, digits, '-' and '_', the same for all peers")
    _require_target(target_batch)
    return Swarm(engine_of(engine, run_id, target_batch, peers, options), run_id=run_id, target_batch=target_batch)


class Swarm:
    """This process's part in a run: accumulates, averages with the others, and tells what happens.

    Under DistributedDataParallel every rank makes one, and rank 0's alone talks to the others; a micro-batch's count is
    then that of all ranks, the same on each, and all ranks take the same number of micro-batches.
    """

    def __init__(
        self, engine: Engine, *, run_id: str, target_batch: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`join` makes one; this is for an `engine` of your own.

        Raises:
            ValueError: target_batch is not a number above 0.
        """
        _require_target(target_batch)
        self.run_id = run_id
        self.target = target_batch
        self._engine = engine
        self._clock = clock
        self._meter = Meter(clock)
        self._accumulator: FlatAccumulator | None = None
        self._attached: TrainingState | None = None
        self._start_round = 0
        self._failures = 0
        self._lost_samples = 0.0
        self._is_ready = False
        """The engine has said that the round is whole; it is not asked again until the round was averaged."""
        self._own = self._of_all = 0.0
        """Samples of the last average: this peer's and all peers'."""
        self._published_at = -math.inf
        self._leave: weakref.finalize | None = None
        self._last: SwarmStatus | None = None
        """Set when it is closed."""

    def attach(
        self, model: nn.Module, optimizer: Optimizer, scheduler: Any = None, scaler: GradScaler | None = None
    ) -> None:
        """Joins the run to train `model`; a peer that comes late has the state of the others when it returns.

        Again with the same objects (or without the scheduler) it does nothing.

        Args:
            model: bare or under DistributedDataParallel; all peers have the same.
            optimizer: over parameters of `model`.
            scheduler: stepped once a round, by the caller; a late peer gets its state too.
            scaler: what scales the losses; each peer has its own. As `FlatAccumulator` takes it: inside `averaged` the
                gradient is unscaled, and the optimizer is stepped without the scaler.

        Raises:
            ValueError: attached to other objects already; an optimizer over parameters that are not the model's; and what
                `FlatAccumulator` refuses.
            RuntimeError: closed; no peer answers at the addresses, or their models differ.
        """
        if self._last is not None:
            raise RuntimeError(_closed(self.run_id))
        if self._attached is not None:
            _require_same(self._attached, model, optimizer, scheduler)
            if scaler is not None and scaler is not self._joined().scaler:
                raise ValueError(
                    "attached with another scaler already, or with none: attach(..., scaler=scaler) by hand"
                )
            return
        parameters = _stepped(model, optimizer)
        accumulator = FlatAccumulator(parameters, target=self.target, average=self._average_with_others, scaler=scaler)
        engine = over_ranks(self._engine, model)
        state = TrainingState(model=_bare(model), optimizer=optimizer, scheduler=scheduler)
        leave = weakref.finalize(self, _leave, engine, os.getpid())
        atexit.register(leave)  # now, so that it comes before multiprocessing's, which ends the engine's processes
        try:
            engine.start(state, accumulator.buffers, round=self._start_round)
        except BaseException:
            accumulator.release()
            leave()
            atexit.unregister(leave)
            raise
        self._engine, self._accumulator, self._attached, self._leave = engine, accumulator, state, leave

    def micro_batch(self, count: "float | Tensor", *, reduction: str = "mean") -> AbstractContextManager[None]:
        """As `FlatAccumulator.micro_batch`: a block whose backward passes belong to one micro-batch.

        Raises:
            RuntimeError: not attached, or closed.
        """
        self._meter.begin()
        return self._joined().micro_batch(count, reduction=reduction)

    def ready(self) -> bool:
        """Whether the peers have the samples of a round. To be asked after each micro-batch; it does not read the device.

        A peer that has counted nothing yet is not ready: it has no part in the mean.

        Raises:
            RuntimeError: not attached, or closed.
        """
        accumulator = self._joined()
        samples = accumulator.known_samples
        if not self._is_ready and samples > 0:
            try:
                self._is_ready = self._engine.ready(samples)
            except StateReplaced:
                self.reset()
        if self._clock() - self._published_at >= _PUBLISHED_EVERY_S:
            self._publish()
        return self._is_ready

    @contextmanager
    def averaged(self) -> Iterator[bool]:
        """Enters with True and the mean of all peers in `param.grad`; leaving it ends the round.

        Enters with False where the mean could not be had: step nothing then. The gradients stay and the round goes on,
        unless the others have gone on: then their state was loaded, and this peer's part of the round was dropped.

        When the block raises with the mean in it, this peer's part of the round is dropped: the others apply the mean
        without it, and their state is downloaded in the next round.

        Raises:
            RuntimeError: not attached, or closed; nothing was accumulated; a micro-batch failed halfway.
        """
        accumulator, has_mean = self._joined(), False
        self._is_ready = False
        try:
            with ExitStack() as stack:
                has_mean = self._enter(stack, accumulator)
                yield has_mean
        except BaseException:
            if has_mean:
                self.reset()
            raise
        if has_mean:
            self._engine.applied()
            self._meter.finish(self._own, self._of_all)
        self._publish()

    def reset(self) -> None:
        """Drops this peer's part of the round; its samples are lost.

        Raises:
            RuntimeError: not attached, or closed.
        """
        accumulator = self._joined()
        self._lost_samples += accumulator.samples
        self._is_ready = False
        accumulator.reset()
        self._meter.drop()

    @property
    def round(self) -> int:
        """Rounds that the run has finished: the step number."""
        return self._start_round if self._attached is None else self.status.round

    @property
    def samples(self) -> float:
        """Samples of all peers in this round, as last heard."""
        return self.status.samples

    @property
    def peers(self) -> int:
        """Peers of the run as last heard, this one included."""
        return self.status.peers

    @property
    def status(self) -> SwarmStatus:
        """Where the run is, as last heard; nothing is asked of the network or read from the device."""
        if self._last is not None:
            return self._last
        meter, accumulator = self._meter, self._accumulator
        is_in = accumulator is not None
        here = accumulator.known_samples if accumulator is not None else 0.0
        return SwarmStatus(
            round=self._engine.round if is_in else self._start_round,
            samples=max(self._engine.global_samples, here) if is_in else 0.0,
            local_samples=here,
            target=self.target,
            peers=self._engine.peers if is_in else 0,
            round_samples=meter.round_samples,
            round_s=meter.round_s,
            average_s=meter.average_s,
            local_samples_per_s=meter.samples_per_s(here),
            failures=self._failures,
            lost_samples=self._lost_samples,
        )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds beside model, optimizer and scheduler: plain numbers and names."""
        return {
            "run_id": self.run_id,
            "round": self.round,
            "failures": self._failures,
            "lost_samples": self._lost_samples,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a checkpoint, whose model, optimizer and scheduler you load. Before `attach`: peers that are further
        by then have their state downloaded there.

        Raises:
            ValueError: the checkpoint of another run.
            RuntimeError: attached already.
        """
        if self._attached is not None:
            raise RuntimeError("load_state_dict() of a peer that is attached: load before attach(), steps() or train()")
        if state["run_id"] != self.run_id:
            raise ValueError(
                f"the state is of run {state['run_id']!r} and this is a peer of {self.run_id!r}: join that run, or leave the"
                " state out to begin this run from the checkpoint's model"
            )
        self._start_round = state["round"]
        self._failures, self._lost_samples = state["failures"], state["lost_samples"]

    def close(self) -> None:
        """Leaves the run and gives `param.grad` back to PyTorch. Happens by itself at the end of the process."""
        if self._last is None:
            self._last = self.status
            if self._leave is not None:
                self._leave()
                atexit.unregister(self._leave)
            if self._accumulator is not None:
                self._accumulator.release()

    def __enter__(self) -> "Swarm":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _joined(self) -> FlatAccumulator:
        if self._last is not None:
            raise RuntimeError(_closed(self.run_id))
        if self._accumulator is None:
            raise RuntimeError("the peer has no model yet: call attach(model, optimizer, scheduler) first")
        return self._accumulator

    def _enter(self, stack: ExitStack, accumulator: FlatAccumulator) -> bool:
        """Whether the mean could be had; then it is in `param.grad`, until `stack` ends."""
        self._meter.averaging()
        try:
            stack.enter_context(accumulator.averaged())
        except RoundFailed as failed:
            self._failures += 1
            _log.warning(
                "no mean for round %d (%s): the gradients are kept, nothing is applied", self.round + 1, failed
            )
            return False
        except StateReplaced:
            self.reset()
            return False
        finally:
            self._meter.averaged()
        return True

    def _average_with_others(self, buffers: Sequence[Tensor], samples: float) -> None:
        if not samples:  # its gradients are not finite, and so left out
            self._lost_samples += self._joined().samples
        self._own, self._of_all = samples, self._engine.average(buffers, samples)

    def _publish(self) -> None:
        self._published_at = self._clock()
        self._engine.publish(record(peer_name(), self.status))


def _closed(run_id: str) -> str:
    return f"this peer has left run {run_id!r}: join again, and attach the new one"


def _leave(engine: Engine, process: int) -> None:
    """Closes the engine in the process that opened it, not in one forked from it."""
    if os.getpid() == process:
        engine.close()


def _names(letter: str) -> bool:
    return letter.isascii() and (letter.isalnum() or letter in "-_")


def _require_target(target: Any) -> None:
    is_number = isinstance(target, int | float) and not isinstance(target, bool)
    if not is_number or not 0 < target < math.inf:
        raise ValueError(f"target_batch={target!r}: must be a number of samples above 0")


def _bare(model: nn.Module) -> nn.Module:
    """`model` without wrappers, which put a prefix before the names of its state: a late peer may be wrapped otherwise."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):  # torch.compile's
            model = inner
        else:
            return model


def _require_same(state: TrainingState, model: nn.Module, optimizer: Optimizer, scheduler: Any) -> None:
    others = [
        name
        for name, one, other in (
            ("model", state.model, _bare(model)),
            ("optimizer", state.optimizer, optimizer),
            ("scheduler", state.scheduler, state.scheduler if scheduler is None else scheduler),
        )
        if one is not other
    ]
    if others:
        raise ValueError(
            f"attached to another {' and '.join(others)} already: one peer trains one model. Close it and join again, or "
            "attach all three by hand before steps()"
        )


def _stepped(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """What `optimizer` steps, in the model's order, which is that of all peers.

    Raises:
        ValueError: some of it is not the model's.
    """
    stepped = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    own: list[Tensor] = [stepped.pop(id(parameter)) for parameter in model.parameters() if id(parameter) in stepped]
    if stepped:
        raise ValueError(
            f"optimizer steps {len(stepped)} parameters that are not model's: a peer that comes late could not download"
            " them. Make them part of the model, and build the optimizer from its parameters"
        )
    return own
