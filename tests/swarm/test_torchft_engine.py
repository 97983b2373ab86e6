"""Peers on torchft: the oracle is one process that trains on the pooled batch, and the other peers' state.

Peers are threads of this process, but for those that get killed: they are forked from a process that has imported torch and
torchft and done nothing else.
"""

import copy
import functools
import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bareloop.swarm.accumulator import FlatAccumulator
from bareloop.swarm.engine import RoundFailed, StateReplaced, TrainingState
from bareloop.swarm.torchft_engine import LIGHTHOUSE_DEFAULTS, TorchFTEngine, TorchFTOptions
from bareloop.swarm.torchft_group import bound_store
from bareloop.swarm.torchft_records import peers_key, record_key

pytestmark = pytest.mark.filterwarnings("ignore:The 'warn' method is deprecated:DeprecationWarning")

PATIENCE_S = 60.0
"""Guards against a hang; nothing here is judged by its time."""

SWARM = Path(__file__).with_name("torchft_peers.py")


@pytest.fixture
def lighthouse() -> Iterator[str]:
    with _lighthouse() as address:
        yield address


@contextmanager
def _lighthouse(port: int = 0) -> Iterator[str]:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind=f"127.0.0.1:{port}", **LIGHTHOUSE_DEFAULTS)
    try:
        yield f"127.0.0.1:{server.address().rsplit(':', 1)[1]}"
    finally:
        server.shutdown()


def patient(**options: Any) -> TorchFTOptions:
    """Options under which a busy machine is not taken for a dead one."""
    return TorchFTOptions(silence_timeout_s=10.0, **options)


@dataclass
class Peer:
    """A model, its accumulator and its engine."""

    address: str
    target: float
    seed: int = 0
    options: TorchFTOptions = field(default_factory=patient)
    run_id: str = "run"
    width: int = 3
    optimize: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.model = nn.Sequential(nn.Linear(4, self.width), nn.Tanh(), nn.Linear(self.width, 2))
        self.optimizer = self.optimize(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)
        self.engine = TorchFTEngine(self.run_id, self.target, [self.address], self.options)
        self.accumulator = FlatAccumulator(self.model.parameters(), average=self._average)
        self.totals: list[float] = []
        self.states: dict[int, Any] = {}
        """Round -> state at its beginning."""

    def _average(self, buffers: Any, samples: float) -> None:
        self.totals.append(self.engine.average(buffers, samples))

    def start(self, round: int = 0) -> "Peer":
        state = TrainingState(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)
        self.engine.start(state, self.accumulator.buffers, round=round)
        self.states[self.engine.round] = self.state()
        return self

    def state(self) -> Any:
        return copy.deepcopy(
            [self.model.state_dict(), self.optimizer.state_dict(), self.scheduler.state_dict(), self.engine.round]
        )

    def backward(self, x: Tensor) -> None:
        with self.accumulator.micro_batch(len(x)):
            self.model(x).square().mean().backward()

    def wait(self) -> None:
        """Until all have the samples."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.engine.ready(self.accumulator.samples):
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def step(self) -> Tensor:
        """Steps on the mean, and returns it."""
        with self.accumulator.averaged():
            mean = torch.cat([p.grad.flatten().clone() for p in self.model.parameters() if p.grad is not None])
            self.optimizer.step()
            self.scheduler.step()
        self.engine.applied()
        self.states[self.engine.round] = self.state()
        return mean

    def train(self, rounds: int, size: int = 4) -> None:
        """Rounds of random samples, until `rounds` have been applied since the run began."""
        generator = torch.Generator().manual_seed(self.seed)
        while self.engine.round < rounds:
            self.backward(torch.randn(size, 4, generator=generator))
            time.sleep(0.002)
            try:
                if self.engine.ready(self.accumulator.samples):
                    self.step()
            except StateReplaced:
                self.accumulator.reset()


def together(*tasks: Callable[[], Any]) -> list[Any]:
    """Runs peers in threads and returns what they return, or raises what one of them raised."""
    results: list[Any] = [None] * len(tasks)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = tasks[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(tasks))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + PATIENCE_S
    while any(thread.is_alive() for thread in threads) and not errors:
        assert time.monotonic() < deadline, "a peer hangs"
        time.sleep(0.01)
    if errors:
        raise errors[0]
    return results


@contextmanager
def peers(*all_of_them: Peer) -> Iterator[None]:
    try:
        yield
    finally:
        together(*(peer.engine.close for peer in all_of_them))


def equal(a: Any, b: Any) -> bool:
    """To the bit."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def gradient_of(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def with_values(peer: Peer, round: int) -> nn.Module:
    """A model of its own, as that of `peer` was when `round` began."""
    model = nn.Sequential(nn.Linear(4, peer.width), nn.Tanh(), nn.Linear(peer.width, 2))
    model.load_state_dict(peer.states[round][0])
    return model


def test_rounds_equal_single_process_training_on_the_pooled_batch(lighthouse: str) -> None:
    sizes, rounds, target = [[3, 5, 8], [4, 2]], 20, 22
    momentum = functools.partial(torch.optim.SGD, momentum=0.9)
    torch.manual_seed(7)
    data = [[[torch.randn(n, 4) for n in mine] for mine in sizes] for _ in range(rounds)]
    both = [Peer(lighthouse, target, seed, patient(min_peers=2), optimize=momentum) for seed in range(2)]

    def train(index: int) -> list[Tensor]:
        means = []
        for round in range(rounds):
            for x in data[round][index]:
                both[index].backward(x)
                both[index].engine.ready(both[index].accumulator.samples)
            both[index].wait()
            means.append(both[index].step())
        return means

    with peers(*both):
        together(*(peer.start for peer in both))
        assert equal(both[0].state(), both[1].state())  # two seeds, one beginning
        means = together(lambda: train(0), lambda: train(1))
        assert both[0].totals == both[1].totals == [target] * rounds
        assert equal(both[0].state(), both[1].state())
    alone = with_values(both[0], 0)
    optimizer = momentum(alone.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for round in range(rounds):
        pooled = torch.cat([x for mine in data[round] for x in mine])
        expected = gradient_of(with_values(both[0], round), pooled)
        assert torch.equal(means[0][round], means[1][round])
        assert (means[0][round] - expected).abs().max() <= 1e-6 * expected.abs().max()
        optimizer.zero_grad()
        alone(pooled).square().mean().backward()
        optimizer.step()
        scheduler.step()
    for ours, reference in zip(both[0].model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-6, atol=1e-7)
    assert both[0].scheduler.state_dict() == scheduler.state_dict()


def test_late_joiner_has_the_state_of_the_others_to_the_bit_and_the_batch_is_constant(lighthouse: str) -> None:
    two = [Peer(lighthouse, 48, seed) for seed in range(2)]
    late = Peer(lighthouse, 48, 2)

    def join() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while two[0].engine.round < 3:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        late.start().train(30)

    with peers(*two, late):
        together(lambda: two[0].start().train(30), lambda: two[1].start().train(30, size=5), join)
        entered = min(late.states)
        assert 3 <= entered < 30
        for round in range(entered, 31):
            donors = [peer for peer in two if round in peer.states]
            assert donors and all(equal(late.states[round], donor.states[round]) for donor in donors)
        assert all(48 <= total < 48 + 4 + 5 + 4 for peer in (*two, late) for total in peer.totals)


def test_resumed_run_goes_on_and_a_beginner_gets_its_state(lighthouse: str) -> None:
    resumed, beginner = Peer(lighthouse, 16, 0), Peer(lighthouse, 16, 1)
    with peers(resumed, beginner):
        together(lambda: resumed.start(round=7).train(20), lambda: beginner.start().train(20))
        entered = min(beginner.states)
        assert min(resumed.states) == 7 and entered >= 7
        assert equal(beginner.states[entered], resumed.states[entered])
        assert equal(beginner.state(), resumed.state())


def test_peer_that_missed_a_commit_downloads_the_state_and_its_samples_counted(lighthouse: str) -> None:
    """The worst moment: the sum is whole for one survivor, and fails for the other."""
    first, second = (Peer(lighthouse, 8, seed, patient(min_peers=2)) for seed in range(2))
    x = torch.randn(4, 4)

    def commits() -> None:
        first.backward(x)
        first.wait()
        first.step()
        first.backward(x)
        first.wait()
        first.step()

    def misses() -> None:
        second.backward(x)
        second.wait()
        member = second.engine._member
        assert member is not None
        member.sum, honest, before = (
            _failing_after(member.sum, calls=2),
            member.sum,
            second.accumulator.buffers[0].clone(),
        )
        with pytest.raises(RoundFailed):
            second.step()
        member.sum = honest
        torch.testing.assert_close(second.accumulator.buffers[0], before, rtol=1e-6, atol=1e-8)
        with pytest.raises(StateReplaced):
            second.wait()
        assert second.engine.round == 1
        assert equal(second.state(), first.states[1])
        second.accumulator.reset()
        second.backward(x)
        second.wait()
        second.step()

    with peers(first, second):
        together(first.start, second.start)
        together(commits, misses)
        assert first.totals == [8, 8]
        assert equal(first.state(), second.state())


def _failing_after(call: Callable[[Tensor], None], calls: int) -> Callable[[Tensor], None]:
    made = 0

    def sum_then_fail(tensor: Tensor) -> None:
        nonlocal made
        call(tensor)
        made += 1
        if made == calls:
            raise RuntimeError("connection reset")

    return sum_then_fail


def test_mean_that_was_not_applied_is_not_counted(lighthouse: str) -> None:
    peer = Peer(lighthouse, 4)
    with peers(peer):
        peer.start()
        peer.backward(torch.randn(4, 4))
        peer.wait()
        with pytest.raises(ZeroDivisionError):
            with peer.accumulator.averaged():
                raise ZeroDivisionError
        assert peer.engine.round == 0
        peer.backward(torch.randn(4, 4))
        peer.wait()
        peer.step()
        assert peer.engine.round == 1


def test_average_that_the_peers_did_not_agree_to_fails_and_changes_nothing(lighthouse: str) -> None:
    peer = Peer(lighthouse, 100)
    with peers(peer):
        peer.start()
        peer.backward(torch.randn(4, 4))
        before = peer.accumulator.buffers[0].clone()
        with pytest.raises(RoundFailed, match="4 of 100 samples"):
            peer.step()
        assert torch.equal(peer.accumulator.buffers[0], before)
        assert peer.engine.global_samples == 4 and peer.engine.peers == 1


def test_nobody_answers_is_an_error_that_says_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    peer = Peer(f"127.0.0.1:{port}", 8, options=TorchFTOptions(connect_timeout_s=0.3))
    with pytest.raises(RuntimeError, match=f"no lighthouse answers at 127.0.0.1:{port}.*bareloop swarm serve"):
        peer.start()
    peer.engine.close()
    with pytest.raises(RuntimeError, match="no member of run 'run'"):
        peer.engine.ready(1)


def test_too_few_peers_is_an_error_after_start_timeout(lighthouse: str) -> None:
    peer = Peer(lighthouse, 8, options=patient(min_peers=2, start_timeout_s=0.5))
    with peers(peer), pytest.raises(RuntimeError, match="min_peers=2 there were 1"):
        peer.start()


@pytest.mark.parametrize(
    ("different", "message"),
    [
        ({"run_id": "other"}, "serves another run than 'other'"),
        ({"width": 5}, "another model, optimizer or scheduler"),
        ({"target": 9}, "for another target_batch than 9"),
        ({"optimize": torch.optim.SGD}, "another model, optimizer or scheduler"),
    ],
)
def test_stranger_is_refused_and_harms_nobody(lighthouse: str, different: dict[str, Any], message: str) -> None:
    settled = Peer(lighthouse, 8)
    stranger = Peer(**{"address": lighthouse, "target": 8, "seed": 1, **different})
    refused = threading.Event()

    def refuse() -> None:
        with pytest.raises(RuntimeError, match=message):
            stranger.start()
        stranger.engine.close()
        refused.set()

    def train() -> None:
        while not refused.is_set():
            settled.train(settled.engine.round + 1)
        settled.train(settled.engine.round + 2)

    with peers(settled):
        settled.start()
        together(train, refuse)
        assert all(8 <= total <= 8 + 3 * 4 for total in settled.totals)  # a micro-batch each time that it was there


def test_scheduler_that_only_pickle_could_send_is_refused_at_the_start(lighthouse: str) -> None:
    peer = Peer(lighthouse, 8)
    peer.scheduler.what = object()  # type: ignore[attr-defined]
    with peers(peer), pytest.raises(ValueError, match=r"scheduler.*what"):
        peer.start()


def test_close_leaves_no_thread_and_listens_nowhere(lighthouse: str) -> None:
    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    two = [Peer(lighthouse, 8, seed) for seed in range(2)]
    before = threads()
    together(lambda: two[0].start().train(3), lambda: two[1].start().train(3))
    assert threads() > before
    together(*(peer.engine.close for peer in two))
    two[0].engine.close()
    deadline = time.monotonic() + PATIENCE_S
    while threads() > before:
        assert time.monotonic() < deadline, [thread.name for thread in threading.enumerate()]
        time.sleep(0.05)


def test_every_port_is_on_the_given_address(lighthouse: str) -> None:
    peer = Peer(lighthouse, 8)
    before = _listening_elsewhere()
    with peers(peer):
        peer.start().train(1)
        assert _listening_elsewhere() <= before


def _listening_elsewhere() -> set[str]:
    """Sockets of this process that listen on other addresses than 127.0.0.1."""
    mine = {
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    }
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            address, state, inode = (line.split()[column] for column in (1, 3, 9))
            if state == "0A" and f"socket:[{inode}]" in mine and not address.startswith("0100007F"):
                found.add(address)
    return found


def test_records_are_where_watch_looks() -> None:
    for _ in range(100):
        with socket.create_server(("127.0.0.1", 0)) as found:
            port = found.getsockname()[1]
        try:
            store = bound_store("127.0.0.1", port + 1)
            break
        except OSError:
            continue
    store.set_timeout(timedelta(seconds=PATIENCE_S))
    with _lighthouse(port) as address:
        peer = Peer(address, 8)
        with peers(peer):
            peer.start()
            peer.engine.publish(json.dumps({"peer": "me", "round": 0}))
            assert json.loads(store.get(record_key("run", "me"))) == {"peer": "me", "round": 0}
            assert store.get(peers_key("run")).decode().split() == ["me"]
            deadline = time.monotonic() + PATIENCE_S
            while json.loads(store.get(record_key("run", "me")))["round"] != 1:
                assert time.monotonic() < deadline
                peer.engine.publish(json.dumps({"peer": "me", "round": 1}))
                time.sleep(0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host": "a-name"}, "host='a-name'"),
        ({"host": "192.0.2.1"}, "host='192.0.2.1'"),
        ({"min_peers": 0}, "min_peers=0"),
        ({"min_peers": True}, "min_peers=True"),
        ({"connect_timeout_s": 0}, "connect_timeout_s=0"),
        ({"silence_timeout_s": float("nan")}, "silence_timeout_s=nan"),
        ({"state_timeout_s": "5"}, "state_timeout_s='5'"),
    ],
)
def test_bad_options_are_refused_when_they_are_made(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TorchFTOptions(**options)


@pytest.mark.parametrize(
    "addresses", [[], ["a:1", "b:2"], ["127.0.0.1"], ["127.0.0.1:0"], ["/ip4/1.2.3.4"], "127.0.0.1:5"]
)
def test_bad_addresses_are_refused(addresses: Any) -> None:
    with pytest.raises(ValueError, match=r"^peers.*bareloop swarm serve"):
        TorchFTEngine("run", 8, addresses)


class Nursery:
    """A process that forks peers, and what they tell."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(SWARM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.told: list[dict[str, Any]] = []
        self.address = ""
        self.until(lambda: self.having("ready"))

    def fork(self, **order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"pause_s": 0.01, "dies": False, **order}) + "\n")
        self._process.stdin.flush()

    def having(self, what: str, **facts: Any) -> list[dict[str, Any]]:
        """What was told of this kind."""
        return [told for told in self.told if {"what": what, **facts}.items() <= told.items()]

    def until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            told = self._lines.get(timeout=max(0.01, deadline - time.monotonic()))
            if told.get("address", self.address) == self.address:  # else of peers that an earlier test has killed
                self.told.append(told)
                assert told["what"] != "error", told["error"]

    def kill(self, *peers: int) -> None:
        for peer in peers:
            os.kill(self.having("started", peer=peer)[0]["pid"], signal.SIGKILL)

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(json.loads(line))


@pytest.fixture(scope="module")
def forked() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def nursery(forked: Nursery, lighthouse: str) -> Nursery:
    forked.told.clear()
    forked.address = lighthouse
    return forked


def survivors_lost_nothing(nursery: Nursery, survivors: list[int], after: int) -> None:
    """Each sample of a survivor is in exactly one mean that was applied, and no mean is of the wrong samples.

    Rounds after `after` are made by the survivors alone.
    """
    ends = [max(told["round"] for told in nursery.having("applied", peer=peer)) for peer in survivors]
    for round in range(1, min(ends) + 1):
        applied = nursery.having("applied", round=round)
        assert len({told["total"] for told in applied}) == len({told["parameters"] for told in applied}) == 1
        if round > after:
            by = sum(told["samples"] for told in applied)
            missed = [told for peer in survivors for told in _counted_elsewhere(nursery, peer, round)]
            assert applied[0]["total"] == by + sum(told["samples"] for told in missed)
    for peer in survivors:
        replaced = nursery.having("replaced", peer=peer)
        # It happens where the sum was whole for others only: then it was counted there, but for the micro-batch after it.
        assert all(_counted_elsewhere(nursery, peer, told["round"]) for told in replaced)
        assert len(replaced) <= 1


def _counted_elsewhere(nursery: Nursery, peer: int, round: int) -> list[dict[str, Any]]:
    """What `peer` gave to the mean of `round`, which failed for it and was had by the others."""
    if nursery.having("applied", peer=peer, round=round):
        return []
    return nursery.having("failed", peer=peer, round=round - 1)[-1:]


def test_peer_killed_between_quorum_and_all_reduce_costs_its_own_samples_alone(
    nursery: Nursery, lighthouse: str
) -> None:
    for peer in range(3):
        nursery.fork(peer=peer, address=lighthouse, target=48, rounds=10_000, size=4, dies=peer == 2)
    nursery.until(lambda: nursery.having("started", peer=2))
    nursery.until(lambda: all(nursery.having("failed", peer=peer) for peer in (0, 1)))
    round = nursery.having("failed")[0]["round"]
    nursery.until(lambda: all(nursery.having("applied", peer=peer, round=round + 3) for peer in (0, 1)))
    nursery.kill(0, 1)
    assert not nursery.having("applied", peer=2, round=round + 1)
    for told in nursery.having("applied", round=round + 1):
        assert told["peers"] == 2 and 48 <= told["total"] < 48 + 2 * 4
        # The gradients of the failed attempt are in it.
        assert told["samples"] > nursery.having("failed", peer=told["peer"], round=round)[0]["samples"]
    survivors_lost_nothing(nursery, [0, 1], after=round)
    assert not nursery.having("replaced")
    _tell_stall(nursery, max(told["moment"] for told in nursery.having("applied", round=round)), round + 1)


@pytest.mark.parametrize("seed", [0, 1])
def test_peer_killed_at_a_random_moment_costs_its_own_samples_alone(
    nursery: Nursery, lighthouse: str, seed: int
) -> None:
    for peer in range(3):
        nursery.fork(peer=peer, address=lighthouse, target=48, rounds=10_000, size=4)
    nursery.until(lambda: all(nursery.having("applied", peer=peer, peers=3) for peer in range(3)))
    (victim,) = nursery.having("started", peer=2)
    time.sleep(random.Random(seed).uniform(0.0, 0.3))
    os.kill(victim["pid"], signal.SIGKILL)
    killed = time.monotonic()

    def gone_on() -> bool:
        return all(len(nursery.having("applied", peer=peer, peers=2)) >= 3 for peer in (0, 1))

    nursery.until(gone_on)
    nursery.kill(0, 1)
    last_of_victim = max(told["round"] for told in nursery.having("applied", peer=2))
    three = {told["round"] for told in nursery.having("applied", peers=3)}
    first_alone = min(told["round"] for told in nursery.having("applied", peers=2) if told["round"] > min(three))
    assert first_alone <= last_of_victim + 3
    survivors_lost_nothing(nursery, [0, 1], after=first_alone - 1)
    _tell_stall(nursery, killed, first_alone)


def _tell_stall(nursery: Nursery, since: float, round: int) -> None:
    moments = [told["moment"] for told in nursery.having("applied", round=round)]
    print(f"survivors stepped again {max(moments) - since:.2f} s after the kill (or the last round before it)")
