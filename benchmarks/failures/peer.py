"""One peer of a swarm that is being broken on purpose: it trains, and writes down what must be judged afterwards.

Everything that is judged comes from outside of the swarm's code: the rows that went through the loss since the last step,
the gradient of those rows computed anew by plain autograd from the parameters at that time, and the gradient that the
optimizer was given. So a micro-batch that the accumulator lost, or a mean that is no mean, can't hide. That costs one more
pass over the round's rows (about 2 ms) and 150 kB of log per round. Each peer is forked from a process that has imported
all, into a process group of its own, so that the processes which its engine starts die with it.
"""

import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bareloop import swarm
from bareloop.swarm.engine import StateReplaced
from bareloop.trainer.loop import steps
from failures.log import Log

__all__ = [
    "MICRO_BATCH",
    "TARGET",
    "Part",
    "Witness",
    "data",
    "fork",
    "network",
    "parameters_of",
    "peer",
    "serve",
]

MICRO_BATCH = 8
TARGET = 512
_NEW_NETWORK = 0x40000000
"""CLONE_NEWNET of setns(2)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What one process of a run is told."""

    name: str
    engine: str
    """"hivemind" or "torchft" through the door; "hivemind.Optimizer" or "torchft.DDP", plain, for comparison."""
    folder: Path
    """Where logs and orders of the run lie."""
    seed: int
    pause_s: float = 0.05
    """Duration of a micro-batch, slept."""
    host: str = "127.0.0.1"
    namespace: str | None = None
    """Network namespace to live in; None for the machine's own."""
    dies_at: str | None = None
    """"all-reduce" or "commit": kills itself there, once the order "armed" is given."""
    freezes: bool = False
    """Stops itself there instead, once, until it is told to go on."""

    def ordered(self, order: str) -> bool:
        """Whether the run was given an order: "stop" or "armed"."""
        return (self.folder / order).exists()


class _Said(logging.Handler):
    """What the library tells its user, as events."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.INFO)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.write("said", level=record.levelname, logger=record.name, message=record.getMessage())


def network() -> nn.Module:
    """An MLP of 18,755 parameters, the same on each call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 75), nn.ReLU(), nn.Linear(75, 10))


def data() -> tuple[Tensor, Tensor]:
    """Scikit-learn's digits: pixels[1797, 64] in 0..1 and classes[1797]."""
    digits: Any = load_digits()
    return torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)


class Witness:
    """What a peer has done since its last step, and its log of that."""

    def __init__(self, part: Part, log: Log, model: nn.Module) -> None:
        self.part, self.log, self.model = part, log, model
        self.pixels, self.classes = data()
        self.rows: list[int] = []
        """Rows that went through the loss since the last step."""
        self.round, self.tried = 0, 0
        """Round and rows of the last attempt."""
        self.averaging = False
        """Whether the engine is in `average`."""
        self.frozen = False
        """Whether it has stopped itself once."""

    def micro_batches(self) -> Iterator[Tensor]:
        """Random rows, one micro-batch each `pause_s`, until the run is stopped."""
        draw = torch.Generator().manual_seed(self.part.seed)
        while not self.part.ordered("stop"):
            time.sleep(self.part.pause_s)
            yield torch.randint(len(self.classes), (MICRO_BATCH,), generator=draw)

    def loss(self, model: nn.Module, rows: Tensor) -> tuple[Tensor, int]:
        """(summed loss, rows)."""
        self.rows += rows.tolist()
        return cross_entropy(model(self.pixels[rows]), self.classes[rows], reduction="sum"), len(rows)

    def attempt(self, round: int, samples: float) -> None:
        """Writes down, before the peers are asked, what this peer has to give."""
        parameters = {name: p.detach().clone().requires_grad_() for name, p in self.model.named_parameters()}
        found = torch.func.functional_call(self.model, parameters, (self.pixels[self.rows],))
        loss = cross_entropy(found, self.classes[self.rows])
        gradient = _joined(torch.autograd.grad(loss, list(parameters.values())))
        self.round, self.tried = round, len(self.rows)
        self.log.write("attempt", round=round, samples=samples, rows=len(self.rows), vector=gradient)

    def drop(self, where: str) -> None:
        """Writes down that the rows since the last step came to nothing."""
        self.log.write("replaced", rows=len(self.rows), where=where, round=self.round)
        self.rows.clear()

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Writes down each step of the optimizer: the gradient it was given, and the parameters afterwards."""
        # The optimizer's, not the model's: hivemind's own optimizer works on copies.
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients: list[Tensor] = []

        def before(*_: Any) -> None:
            gradients[:] = [_joined(p.grad if p.grad is not None else torch.zeros_like(p) for p in own)]

        def after(*_: Any) -> None:
            self.log.write(
                "applied", round=self.round, rows=len(self.rows), vector=gradients[0], parameters=_joined(own)
            )
            self.rows.clear()

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    def timed(self, call: Callable[..., Any], kind: str, *values: Any, **named: Any) -> Any:
        """Calls; writes down how long it blocked and what came of it."""
        begun, outcome, result = time.time(), "done", None
        try:
            result = call(*values, **named)
        except StateReplaced as error:
            outcome = repr(error)
            self.drop(kind)
            raise
        except BaseException as error:
            outcome = repr(error)
            raise
        finally:
            blocked_s = time.time() - begun
            if kind != "ready" or blocked_s > 0.01 or outcome != "done":
                total = result if isinstance(result, float) else None
                self.log.write("waited", on=kind, seconds=blocked_s, outcome=outcome, total=total)
        return result

    def dying(self, place: str) -> None:
        """Kills or stops this peer with all its processes, where it was told to die at `place`."""
        if self.part.dies_at == place and self.part.ordered("armed") and not self.frozen:
            self.log.write("dies", at=place)
            if self.part.freezes:
                self.frozen = True
                os.killpg(os.getpgrp(), signal.SIGSTOP)
                return
            os.killpg(os.getpgrp(), signal.SIGKILL)
            time.sleep(60)


def _joined(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def parameters_of(model: nn.Module) -> Tensor:
    """All parameters in one vector."""
    return _joined(model.parameters())


def peer(part: Part, address: str) -> None:
    """Trains until the run is stopped; in a process of its own."""
    torch.set_num_threads(1)
    log = Log(part.folder, part.name)
    logging.getLogger("bareloop").addHandler(_Said(log))
    logging.getLogger("bareloop").setLevel(logging.INFO)
    model = network()
    witness = Witness(part, log, model)
    if part.engine == "hivemind":
        import bareloop.swarm.hivemind_engine  # noqa: F401  its averager too is one that the victim may die in
    if part.dies_at is not None:
        _plant(witness)
    if part.engine in ("hivemind", "torchft"):
        _through_the_door(witness, address)
    else:
        from failures.plain import train

        train(witness, address)
    log.write("ended")


def _through_the_door(witness: Witness, address: str) -> None:
    part = witness.part
    optimizer = torch.optim.SGD(witness.model.parameters(), lr=0.05, momentum=0.9)
    witness.watch(optimizer)
    _observe(_engine(part.engine), witness)
    options = (
        swarm.HivemindOptions(host=part.host) if part.engine == "hivemind" else swarm.TorchFTOptions(host=part.host)
    )
    joined = swarm.join(
        part.folder.name,
        target_batch=TARGET,
        engine=part.engine,
        peers=[address],
        options=options,
    )
    try:
        for _ in steps(witness.model, optimizer, witness.micro_batches(), witness.loss, accumulate=joined):
            pass
    finally:
        begun = time.time()
        joined.close()
        witness.log.write("closed", seconds=time.time() - begun)


def _engine(name: str) -> type:
    if name == "hivemind":
        from bareloop.swarm.hivemind_engine import HivemindEngine

        return HivemindEngine
    from bareloop.swarm.torchft_engine import TorchFTEngine

    return TorchFTEngine


def _observe(engine: type, witness: Witness) -> None:
    """Puts the witness around the engine's calls, in this process only."""
    start, ready, average = engine.start, engine.ready, engine.average

    def started(self: Any, *values: Any, **named: Any) -> None:
        witness.timed(start, "start", self, *values, **named)
        witness.log.write("joined", round=self.round, parameters=parameters_of(witness.model))

    def asked(self: Any, samples: float) -> bool:
        return witness.timed(ready, "ready", self, samples)

    def averaged(self: Any, buffers: Any, samples: float) -> float:
        witness.attempt(self.round, samples)
        witness.averaging = True
        try:
            return witness.timed(average, "average", self, buffers, samples)
        finally:
            witness.averaging = False

    engine.start, engine.ready, engine.average = started, asked, averaged


def _plant(witness: Witness) -> None:
    """Puts the victim's death between two phases of its round, in this process and those forked from it later."""
    if witness.part.engine.startswith("torchft"):
        from torchft.manager import Manager
        from torchft.process_group import ProcessGroupWrapper

        for place, owner, name in (
            ("all-reduce", ProcessGroupWrapper, "allreduce"),
            ("commit", Manager, "should_commit"),
        ):
            setattr(owner, name, _dying_before(getattr(owner, name), place, witness))
        return
    from hivemind.averaging import DecentralizedAverager

    for averager in (DecentralizedAverager, *_heirs(DecentralizedAverager)):
        for place, name in (("all-reduce", "_run_allreduce_inplace_"), ("commit", "_agree")):
            if name in vars(averager):
                setattr(averager, name, _dying_in_group(getattr(averager, name), place, witness))


def _heirs(kind: type) -> set[type]:
    return set(kind.__subclasses__()).union(*map(_heirs, kind.__subclasses__()))


def _dying_before(method: Callable[..., Any], place: str, witness: Witness) -> Callable[..., Any]:
    def doomed(self: Any, *values: Any, **named: Any) -> Any:
        if witness.averaging:  # not while it is only asked whether to average
            witness.dying(place)
        return method(self, *values, **named)

    return doomed


def _dying_in_group(method: Callable[..., Any], place: str, witness: Witness) -> Callable[..., Any]:
    async def doomed(self: Any, *values: Any, **named: Any) -> Any:
        if "state" not in self.prefix:  # gradients, not parameters
            witness.dying(place)
        return await method(self, *values, **named)

    return doomed


def serve(part: Part) -> None:
    """The run's meeting point, which takes no part in it; writes its address into the run's folder."""
    if part.engine.startswith("torchft"):
        from torchft.coordination import LighthouseServer

        from bareloop.swarm.torchft_engine import LIGHTHOUSE_DEFAULTS

        lighthouse = LighthouseServer(bind=f"{part.host}:0", **LIGHTHOUSE_DEFAULTS)
        address = f"{part.host}:{lighthouse.address().rsplit(':', 1)[1].rstrip('/')}"
    else:
        import hivemind

        node = hivemind.DHT(
            host_maddrs=[f"/ip4/{part.host}/tcp/0"], start=True, use_relay=False, use_auto_relay=False, use_ipfs=False
        )
        address = str(node.get_visible_maddrs()[0])
    ready = part.folder / "address.new"
    ready.write_text(address)
    ready.rename(part.folder / "address")
    while not part.ordered("stop serving"):
        time.sleep(0.1)


def fork(part: Part, body: Callable[[], None]) -> int:
    """Runs `body` in a child that leads a process group, in the part's namespace, with its output in a file; its pid."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()
        if part.namespace is not None:
            handle = os.open(f"/run/netns/{part.namespace}", os.O_RDONLY)
            if ctypes.CDLL(None, use_errno=True).setns(handle, _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), f"setns to {part.namespace}")
        output = os.open(part.folder / f"{part.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
        body()
        code = 0
    except BaseException:
        logging.exception("the peer ended")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
