"""The hivemind engine among real peers on loopback: true means or none, late joiners in step, killed peers survived.

The peers share one process (hivemind's own are beside it); the one that is killed is a fork of it. The reference is torch:
the gradient of the pooled batch, and single-process training with the same batches.
"""

import contextlib
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import pytest

pytest.importorskip("hivemind")

import torch
from hivemind.utils import MPFuture
from torch import Tensor, nn

from bareloop.swarm.accumulator import FlatAccumulator
from bareloop.swarm.engine import RoundFailed, StateReplaced, TrainingState
from bareloop.swarm.hivemind_engine import HivemindEngine, HivemindOptions
from bareloop.swarm.state import pack, unpack

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:hivemind"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

PATIENCE_S = 90.0
"""Guard against hanging, nothing that is judged."""

FORGET_S = 6.0

Batch = tuple[Tensor, Tensor]


def _model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, affine=False), nn.Tanh(), nn.Linear(3, 1))


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    return ((model(batch[0]) - batch[1]) ** 2).mean()


def _batches(*sizes: int) -> list[Batch]:
    return [(torch.randn(n, 4), torch.randn(n, 1)) for n in sizes]


class _Learner:
    """A model in training, the way the door trains one."""

    def __init__(self, seed: int, options: dict[str, Any], *, target: float = 22, run_id: str = "run") -> None:
        self.model = _model(seed).eval()  # batch statistics would make the pooled batch another function
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.7)
        self.state = TrainingState(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)
        self.accumulator = FlatAccumulator(self.model.parameters(), average=self._average)
        self.options, self.target, self.run_id = HivemindOptions(**options), target, run_id
        self.engine: HivemindEngine | None = None
        self.after: dict[int, tuple[str, list[Tensor]]] = {}
        """Round -> this peer's whole state when it had been applied."""

    def start(self, peers: Sequence[str] = (), round: int = 0) -> list[str]:
        self.engine = HivemindEngine(self.run_id, self.target, peers, self.options)
        self.engine.start(self.state, self.accumulator.buffers, round=round)
        return self.engine.addresses

    def _average(self, buffers: Sequence[Tensor], samples: float) -> None:
        assert self.engine is not None
        self.total = self.engine.average(buffers, samples)

    def accumulate(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            with self.accumulator.micro_batch(len(batch[0])):
                _loss(self.model, batch).backward()

    def wait_ready(self) -> None:
        assert self.engine is not None
        _until(lambda: self.engine is not None and self.engine.ready(self.accumulator.samples))

    def step(self) -> tuple[float, list[Tensor]]:
        """All peers' samples, and the gradient that was stepped with."""
        assert self.engine is not None
        with self.accumulator.averaged():
            gradients = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
            self.optimizer.step()
            self.scheduler.step()
        self.engine.applied()
        self.after[self.engine.round] = pack(self.state)
        return self.total, gradients

    def round(self, batches: Sequence[Batch]) -> tuple[float, list[Tensor]]:
        self.accumulate(batches)
        self.wait_ready()
        return self.step()

    def settle(self, others: int) -> None:
        """Waits until `others` peers hold the same state as this one, taking theirs where it has to."""
        assert self.engine is not None
        engine = self.engine

        def settled() -> bool:
            with contextlib.suppress(StateReplaced):
                engine.ready(0)
            return len(engine._company.beside(engine._lineage)) == others

        _until(settled)


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def _pooled(model: nn.Module, batches: Sequence[Batch]) -> list[Tensor]:
    """The gradient of all batches as one."""
    x, y = (torch.cat(part) for part in zip(*batches, strict=True))
    return list(torch.autograd.grad(_loss(model, (x, y)), list(model.parameters())))


def _difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    scale = max(t.abs().max().item() for t in theirs)
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True)) / scale


def _equal(ours: tuple[str, list[Tensor]], theirs: tuple[str, list[Tensor]]) -> bool:
    return ours[0] == theirs[0] and all(torch.equal(a, b) for a, b in zip(ours[1], theirs[1], strict=True))


def _victim(pipe: Connection) -> None:
    """In the fork: joins when told to, begins a round, and waits to be killed."""
    os.setsid()
    MPFuture.reset_backend()  # its locks are shared with the other peers, and a killed peer may hold one
    learner, parent = _Learner(2, {"forget_after_s": FORGET_S}), os.getppid()
    while not pipe.poll(1):
        if os.getppid() != parent:
            os._exit(1)
    learner.start(pipe.recv())
    learner.accumulate(_batches(4))
    assert learner.engine is not None
    learner.engine.ready(4)
    pipe.send((learner.engine.round, pack(learner.state)))
    while os.getppid() == parent:
        learner.engine.ready(4)
        time.sleep(0.01)
    os._exit(1)


class _Peers:
    """Two peers of one run, and a third, forked before there were threads, that can be killed."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.victim = context.Process(target=_victim, args=(theirs,))
        self.victim.start()
        theirs.close()
        self.threads = ThreadPoolExecutor(3)
        self.a, self.b = (_Learner(seed, {"forget_after_s": FORGET_S}) for seed in (0, 1))
        self.addresses = self.a.start()
        self.b.start(self.addresses)

    def both(self, method: Any, *args: Any) -> "Future[Any]":
        return self.threads.submit(method, *args)

    def round(self, of_a: Sequence[Batch], of_b: Sequence[Batch]) -> tuple[Any, Any]:
        a, b = self.both(self.a.round, of_a), self.both(self.b.round, of_b)
        return a.result(PATIENCE_S), b.result(PATIENCE_S)

    def close(self) -> None:
        for learner in (self.a, self.b):
            if learner.engine is not None:
                learner.engine.close()
        self.threads.shutdown()
        _end_group(self.victim)


def _end_group(process: Any) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join(PATIENCE_S)


def _group(leader: int) -> list[int]:
    """Processes of a process group that have not ended."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            with open(f"/proc/{int(name)}/stat", encoding="ascii", errors="replace") as file:
                state, _, group = file.read().rsplit(")", 1)[1].split()[:3]
            if int(group) == leader and state != "Z":
                found.append(int(name))
    return found


def _descendants() -> set[int]:
    parents = {}
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            with open(f"/proc/{int(name)}/stat", encoding="ascii", errors="replace") as file:
                state, parent = file.read().rsplit(")", 1)[1].split()[:2]
            if state != "Z":
                parents[int(name)] = int(parent)
    found, grown = {os.getpid()}, True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in found} | found
        grown, found = more != found, more
    return found - {os.getpid()}


@pytest.fixture(scope="module")
def peers() -> Iterator[_Peers]:
    before = _descendants()
    made = _Peers()
    try:
        yield made
    finally:
        made.close()
    _until(lambda: _helpers(_descendants() - before) == [])


def _helpers(pids: set[int]) -> list[str]:
    """Command lines of those that are hivemind's or forks of ours; torch keeps one process for its shared memory."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                line = file.read().decode(errors="replace").replace("\0", " ")
            if "torch_shm_manager" not in line and "resource_tracker" not in line:
                found.append(line)
    return found


def test_peers_begin_with_one_of_their_models(peers: _Peers) -> None:
    both = [peers.threads.submit(learner.settle, 1) for learner in (peers.a, peers.b)]
    for settled in both:
        settled.result(PATIENCE_S)
    assert _equal(pack(peers.a.state), pack(peers.b.state))
    assert peers.a.engine is not None and peers.a.engine.peers == 2


def test_rounds_equal_single_process_training(peers: _Peers) -> None:
    alone = _Learner(0, {})
    unpack(alone.state, *pack(peers.a.state))
    for _ in range(20):
        of_a, of_b = _batches(3, 5, 8), _batches(4, 2)
        pooled = _pooled(alone.model, of_a + of_b)
        (total_a, grad_a), (total_b, grad_b) = peers.round(of_a, of_b)
        assert total_a == total_b == 22
        assert _difference(grad_a, pooled) < 1e-6
        assert _difference(grad_b, pooled) < 1e-6
        for parameter, gradient in zip(alone.model.parameters(), pooled, strict=True):
            parameter.grad = gradient
        alone.optimizer.step()
        alone.scheduler.step()
        for learner in (peers.a, peers.b):
            assert _difference(list(learner.model.parameters()), list(alone.model.parameters())) < 1e-6
    assert peers.a.engine is not None and peers.b.engine is not None
    assert peers.a.engine.round == peers.b.engine.round == 20


def test_garbage_on_the_port_changes_nothing(peers: _Peers) -> None:
    port = int(peers.addresses[0].split("/")[4])
    for garbage in (b"\x00" * 4096, b"GET / HTTP/1.1\r\n\r\n", os.urandom(1 << 16), b"\x13/multistream/1.0.0\n" * 99):
        with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", port), 10) as connection:
            connection.sendall(garbage)
    assert peers.a.engine is not None
    engine = peers.a.engine
    for garbage in ("no record", {"peer": b"x"}, [1, 2], 7):
        assert engine._dht.store(engine._roster._key, garbage, time.time() + 5, subkey=b"someone")
    of_a, of_b = _batches(3, 5, 8), _batches(4, 2)
    pooled = _pooled(peers.a.model, of_a + of_b)
    for total, gradient in peers.round(of_a, of_b):
        assert total == 22
        assert _difference(gradient, pooled) < 1e-6


def test_a_late_joiner_has_the_state_to_the_bit_and_a_killed_one_costs_the_others_nothing(peers: _Peers) -> None:
    peers.pipe.send(peers.addresses)
    # It arrives while the others are in the middle of a round, and waits for nobody's micro-batch.
    of_a, of_b = _batches(3, 5, 4), _batches(4)
    peers.a.accumulate(of_a)
    peers.b.accumulate(of_b)
    assert peers.pipe.poll(PATIENCE_S)
    round, state = peers.pipe.recv()
    assert round == 21
    assert _equal(state, peers.a.after[21]) or _equal(state, peers.b.after[21])

    assert peers.a.engine is not None and peers.b.engine is not None
    engine = peers.a.engine
    peers.b.engine.ready(4)
    _until(lambda: not engine.ready(12) and engine.global_samples == 20)
    os.kill(peers.victim.pid or 0, signal.SIGKILL)
    last = _batches(2)
    of_a += last
    pooled = _pooled(peers.a.model, of_a + of_b)
    steps = peers.both(peers.a.round, last), peers.both(peers.b.round, [])
    for total, gradient in (step.result(PATIENCE_S) for step in steps):
        assert total == 18  # all that the survivors had
        assert _difference(gradient, pooled) < 1e-6
    assert peers.a.engine.peers == 2
    _until(lambda: _group(peers.victim.pid or 0) == [])  # its helpers end by themselves


def test_a_peer_that_leaves_is_forgotten_at_once_and_the_last_one_goes_on_alone(peers: _Peers) -> None:
    assert peers.a.engine is not None and peers.b.engine is not None
    peers.b.engine.close()
    peers.b.engine.close()
    batches = _batches(22)
    pooled = _pooled(peers.a.model, batches)
    total, gradient = peers.a.round(batches)
    assert total == 22
    assert _difference(gradient, pooled) < 1e-6


def test_two_that_went_apart_come_together_on_the_side_that_is_further(peers: _Peers) -> None:
    """b comes back from an old checkpoint: another state, fewer rounds."""
    peers.b = _Learner(5, {"forget_after_s": FORGET_S})
    peers.b.start(peers.addresses, round=1)
    assert peers.a.engine is not None and peers.b.engine is not None
    assert peers.b.engine.round == peers.a.engine.round
    assert _equal(pack(peers.b.state), pack(peers.a.state))


def test_a_mean_that_cannot_be_had_leaves_the_gradients(peers: _Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    assert peers.a.engine is not None and peers.b.engine is not None
    of_a, of_b = _batches(16), _batches(6)
    pooled = _pooled(peers.a.model, of_a + of_b)
    peers.a.accumulate(of_a)
    engine, before = peers.a.engine, [b.clone() for b in peers.a.accumulator.buffers]
    peers.b.accumulate(of_b)
    peers.b.engine.ready(6)
    peers.a.wait_ready()
    with monkeypatch.context() as patched:
        patched.setattr(
            engine._company, "members", lambda lineage, waited_s: frozenset({engine._roster.mine.peer, b"nobody"})
        )
        patched.setattr(engine._company, "patience_s", lambda lineage: -20.0)
        with pytest.raises(RoundFailed):
            peers.a.step()
    assert all(torch.allclose(b, c) for b, c in zip(peers.a.accumulator.buffers, before, strict=True))
    for total, gradient in peers.round([], []):
        assert total == 22
        assert _difference(gradient, pooled) < 1e-6


@pytest.mark.parametrize(("compression", "error"), [("fp16", 5e-3), ("8bit", 0.3)])
def test_compressed_means_are_near_and_a_peer_that_cannot_be_reached_takes_part(compression: str, error: float) -> None:
    """8 bits take the few values beyond three deviations for one another, which weighs much in so small a model."""
    options = {"forget_after_s": FORGET_S, "compression": compression}
    a, b = _Learner(0, options), _Learner(1, options | {"client": True})
    with ThreadPoolExecutor(2) as threads:
        try:
            b.start(a.start())
            for settled in [threads.submit(learner.settle, 1) for learner in (a, b)]:
                settled.result(PATIENCE_S)
            of_a, of_b = _batches(12), _batches(10)
            pooled = _pooled(a.model, of_a + of_b)
            steps = threads.submit(a.round, of_a), threads.submit(b.round, of_b)
            for total, gradient in (step.result(PATIENCE_S) for step in steps):
                assert total == 22
                assert _difference(gradient, pooled) < error
        finally:
            for learner in (b, a):
                if learner.engine is not None:
                    learner.engine.close()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"compression": "power"}, "compression"),
        ({"port": -1}, "port"),
        ({"host": "/ip4"}, "host"),
        ({"min_peers": 0}, "min_peers"),
        ({"forget_after_s": 0.1}, "forget_after_s"),
        ({"patience_s": float("inf")}, "patience_s"),
        ({"authorizer": object()}, "authorizer"),
        ({"announce": "/ip4/1.2.3.4/tcp/1"}, "announce"),
        ({"client": True, "announce": ["/ip4/1.2.3.4/tcp/1"]}, "announce"),
    ],
)
def test_options_are_refused_when_they_are_built(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}="):
        HivemindOptions(**options)


def test_arguments_are_refused_when_the_engine_is_built() -> None:
    for arguments in (("a.b", 8), ("", 8), ("run", 0), ("run", 8, "/ip4/1.2.3.4/tcp/1/p2p/x")):
        with pytest.raises(ValueError, match=r"run_id|target_batch|peers"):
            HivemindEngine(*arguments)  # type: ignore[arg-type]


def test_nobody_at_the_address_is_said() -> None:
    nobody = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWDtbq62fLhmEdAknYamvoEqhCk2nzJhm4ivMaB6NjHtTL"
    with pytest.raises(RuntimeError, match=r"no peer answers at /ip4/127\.0\.0\.1/tcp/9"):
        _Learner(0, {}).start([nobody])


def test_state_is_packed_without_pickle_and_to_the_bit() -> None:
    learner, other = _Learner(0, {}), _Learner(1, {})
    for p in learner.model.parameters():
        p.grad = torch.randn_like(p)
    learner.optimizer.step()
    learner.scheduler.step()
    unpack(other.state, *pack(learner.state))
    assert _equal(pack(other.state), pack(learner.state))
    with pytest.raises(ValueError, match="does not fit"):
        unpack(other.state, "{}", [])
    with pytest.raises(ValueError, match="does not fit"):
        unpack(TrainingState(model=nn.Linear(2, 2), optimizer=other.optimizer, scheduler=None), *pack(learner.state))


def test_what_cannot_be_sent_is_refused_by_name() -> None:
    learner = _Learner(0, {})
    learner.scheduler.last_lr_of = object()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"scheduler\['last_lr_of'\] holds a object"):
        pack(learner.state)
