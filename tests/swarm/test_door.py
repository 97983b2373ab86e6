"""The door against the gradient of the pooled batch and training in one process; its peers are threads that meet."""

import copy
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).parent))
from in_process import LIMIT_S, InProcessEngine, Meeting, threads

from bareloop import swarm
from bareloop.swarm.door import Swarm
from bareloop.trainer.loop import steps

Batch = tuple[Tensor, Tensor]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))


def plain() -> nn.Module:
    """Without batch normalisation, which makes a loss depend on how a batch is split."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))


def batches(sizes: list[int], seed: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    rows = sum(sizes)
    x, y = torch.randn(rows, 5, generator=generator), torch.randint(0, 3, (rows,), generator=generator)
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def pooled(given: list[Batch]) -> list[Tensor]:
    model = plain()
    cross_entropy(model(torch.cat([x for x, _ in given])), torch.cat([y for _, y in given])).backward()
    return gradients(model)


def distance(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(one, other, strict=True))


def summed(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    x, y = batch
    return cross_entropy(model(x), y, reduction="sum"), len(y)


def peer(meeting: Meeting, **options: Any) -> Swarm:
    return Swarm(InProcessEngine(meeting), run_id="run", target_batch=meeting.target, **options)


def attached(meeting: Meeting, model: nn.Module | None = None, **options: Any) -> tuple[Swarm, nn.Module, Any]:
    model = plain() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = peer(meeting, **options)
    made.attach(model, optimizer)
    return made, model, optimizer


def feed(run: Swarm, model: nn.Module, given: list[Batch]) -> None:
    for x, y in given:
        with run.micro_batch(len(y)):
            cross_entropy(model(x), y).backward()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize(
    "sizes", [[[4, 8, 8, 12]], [[3, 5, 8], [4, 2]], [[4, 8, 8, 12], [3], [5, 5], [1] * 6]], ids=len
)
def test_the_mean_is_that_of_the_pooled_batch(sizes: list[list[int]]) -> None:
    meeting = Meeting(sum(map(sum, sizes)))
    given = [batches(own, seed) for seed, own in enumerate(sizes)]
    expected = pooled([batch for own in given for batch in own])
    peers = [attached(meeting) for _ in sizes]
    found: list[float] = []

    def work(run: Swarm, model: nn.Module, own: list[Batch]) -> None:
        feed(run, model, own)
        until(run.ready)
        with run.averaged() as mean:
            assert mean is True
            found.append(distance(gradients(model), expected))
        assert run.round == 1 and run.status.round_samples == meeting.target
        assert run.status.local_samples == 0

    threads(*(lambda p=p, own=own: work(p[0], p[1], own) for p, own in zip(peers, given, strict=True)))
    assert len(found) == len(sizes)
    assert max(found) < 1e-6


def test_steps_train_as_one_process_does() -> None:
    """Two peers at their own pace; each writes down which micro-batches made which round."""
    meeting = Meeting(24, peers=2)
    rounds: list[dict[int, list[Batch]]] = [{} for _ in range(20)]

    def work(number: int, model: nn.Module) -> None:
        taken: list[Batch] = []

        def source() -> Any:
            for batch in batches([3, 5, 8, 2, 1] * 40, number):
                taken.append(batch)
                yield batch

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        with peer(meeting) as run:
            for step in steps(model, optimizer, source(), summed, accumulate=run, max_norm=0.5, scheduler=scheduler):
                rounds[run.round - 1][number] = list(taken)
                taken.clear()
                assert step.count == sum(len(y) for _, y in rounds[run.round - 1][number])
                if run.round == len(rounds):
                    break

    models = [plain(), plain()]
    threads(lambda: work(0, models[0]), lambda: work(1, models[1]))
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    for given in rounds:
        assert len(given) == 2
        together = [batch for own in given.values() for batch in own]
        list(steps(model, optimizer, together, summed, accumulate=len(together), max_norm=0.5, scheduler=scheduler))
    for other in models:
        for a, b in zip(other.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_failed_average_keeps_the_gradients_and_says_so() -> None:
    meeting = Meeting(10)
    run, model, _ = attached(meeting)
    given = batches([3, 7, 4], 1)
    feed(run, model, given[:2])
    meeting.failures = 2
    for failed in (1, 2):
        assert run.ready()
        with run.averaged() as mean:
            assert mean is False
        assert (run.status.failures, run.status.lost_samples, run.status.local_samples) == (failed, 0, 10)
        assert run.round == 0
    feed(run, model, given[2:])
    assert run.ready()
    with run.averaged() as mean:
        assert mean is True
        assert distance(gradients(model), pooled(given)) < 1e-6
    assert (run.round, run.status.failures) == (1, 2)


def test_steps_make_no_step_of_a_mean_that_could_not_be_had() -> None:
    meeting = Meeting(8)
    meeting.failures = 1
    model, run = plain(), peer(meeting)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = copy.deepcopy(model.state_dict())
    given = batches([8, 8, 8], 2)
    made = []
    for step in steps(model, optimizer, given, summed, accumulate=run):
        made.append(step.micro_steps)
    assert made == [2, 1]
    expected = plain()
    by_hand = torch.optim.SGD(expected.parameters(), lr=1.0)
    expected.load_state_dict(before)
    list(steps(expected, by_hand, given[:2], summed, accumulate=2))
    list(steps(expected, by_hand, given[2:], summed))
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def finish_a_round(run: Swarm, model: nn.Module, optimizer: Any, given: list[Batch]) -> None:
    feed(run, model, given)
    assert run.ready()
    with run.averaged() as mean:
        assert mean is True
        optimizer.step()


def same_state(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_a_late_peer_has_the_others_state() -> None:
    meeting = Meeting(8)
    run, model, optimizer = attached(meeting, net())
    for number in range(3):
        finish_a_round(run, model, optimizer, batches([8], number))
    torch.manual_seed(9)
    other = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
    late, _, _ = attached(meeting, other)
    assert late.round == 3
    assert late.peers == 2
    assert same_state(model, other)


@pytest.mark.parametrize("when", ["ready", "average"])
def test_a_peer_that_was_left_behind_drops_what_is_stale_and_counts_it(when: str) -> None:
    meeting = Meeting(8)
    (slow, its, _), (fast, model, optimizer) = attached(meeting), attached(meeting)
    feed(slow, its, batches([3, 2], 1))
    if when == "average":
        assert not slow.ready()
        slow._is_ready = True  # it had heard so before it was cut off
    meeting.samples.pop(id(slow._engine))  # cut off
    finish_a_round(fast, model, optimizer, batches([8], 2))
    if when == "ready":
        assert not slow.ready()
    else:
        with slow.averaged() as mean:
            assert mean is False
    assert slow.round == 1
    assert (slow.status.lost_samples, slow.status.local_samples, slow.status.failures) == (5, 0, 0)
    assert same_state(model, its)
    meeting.samples[id(slow._engine)] = 0
    given = batches([4, 4], 3)
    feed(slow, its, given[:1])
    feed(fast, model, given[1:])
    expected = copy.deepcopy(model)
    x, y = (torch.cat(part) for part in zip(*given, strict=True))
    cross_entropy(expected(x), y).backward()

    def end(run: Swarm, model: nn.Module) -> None:
        until(run.ready)
        with run.averaged() as mean:
            assert mean is True
            assert distance(gradients(model), gradients(expected)) < 1e-6

    threads(lambda: end(slow, its), lambda: end(fast, model))


def test_an_error_with_the_mean_in_place_does_not_leave_it_as_a_local_gradient() -> None:
    run, model, _ = attached(Meeting(4))
    feed(run, model, batches([4], 1))
    assert run.ready()
    with pytest.raises(LookupError), run.averaged():
        raise LookupError
    assert (run.round, run.status.lost_samples, run.status.local_samples) == (0, 4, 0)
    given = batches([6], 2)
    feed(run, model, given)
    assert run.ready()
    with run.averaged() as mean:
        assert mean is True
        assert distance(gradients(model), pooled(given)) < 1e-6


def test_the_engine_is_asked_once_for_a_round_that_is_whole_and_never_for_nothing() -> None:
    meeting = Meeting(4)
    run, model, _ = attached(meeting)
    engine: Any = run._engine
    with run.micro_batch(0):
        pass
    assert not run.ready()
    assert engine.asked == 0
    feed(run, model, batches([4], 1))
    assert run.ready() and run.ready()
    assert engine.asked == 1


def test_times_and_records() -> None:
    now = [100.0]
    run, model, _ = attached(Meeting(8), clock=lambda: now[0])
    engine: Any = run._engine
    meet = engine.average

    def average(buffers: Any, samples: float) -> float:
        now[0] += 1.0
        return meet(buffers, samples)

    engine.average = average
    given = batches([4] * 6, 1)
    now[0] += 50  # waits for data before it begins
    for count, batch in enumerate(given[:2]):
        with run.micro_batch(4):
            cross_entropy(model(batch[0]), batch[1]).backward()
            now[0] += 0.4
        assert run.ready() is (count == 1)
    assert run.status.local_samples_per_s == pytest.approx(10)
    with run.averaged():
        pass
    status = run.status
    assert (status.round_s, status.average_s) == pytest.approx((1.8, 1.0))
    assert status.local_samples_per_s == pytest.approx(10)
    assert status.round_samples == 8
    assert "1.8 s" in str(status)
    records = [json.loads(record) for record in engine.records]
    assert len(records) == 2, "one at the first micro-batch, none 0.4 s later, one at the end of the round"
    assert records[-1].pop("peer").endswith(f"-{os.getpid()}")
    assert abs(records[-1].pop("time") - time.time()) < LIMIT_S
    assert records[-1] == pytest.approx(
        {
            "round": 1,
            "samples": 0,
            "local_samples": 0,
            "samples_per_s": 10,
            "target": 8,
            "peers": 1,
            "round_s": 1.8,
            "average_s": 1.0,
            "failures": 0,
            "lost_samples": 0,
        }
    )


def test_attach_knows_its_objects() -> None:
    meeting = Meeting(4)
    run, model, optimizer = attached(meeting)
    run.attach(model, optimizer)
    with pytest.raises(ValueError, match="another optimizer"):
        run.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="another model and optimizer and scheduler"):
        other = plain()
        run.attach(other, torch.optim.SGD(other.parameters(), lr=0.1), object())
    fresh, other = peer(meeting), plain()
    with pytest.raises(ValueError, match="2 parameters that are not model's"):
        fresh.attach(other[2], torch.optim.SGD(other[:1].parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="attach"):
        fresh.ready()
    with pytest.raises(RuntimeError, match="attach"):
        fresh.micro_batch(1)
    assert (fresh.round, fresh.peers, fresh.samples) == (0, 0, 0)


def test_a_peer_that_could_not_join_leaves_the_model_as_it_was() -> None:
    model, run = plain(), peer(Meeting(4))
    engine: Any = run._engine

    def start(*arguments: Any, **named: Any) -> None:
        raise RuntimeError("nobody there")

    engine.start = start
    with pytest.raises(RuntimeError, match="nobody there"):
        run.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert engine.closed == 1
    assert all(parameter.grad is None for parameter in model.parameters())


def test_close_leaves_once_and_gives_the_gradients_back() -> None:
    meeting = Meeting(4)
    run, model, optimizer = attached(meeting)
    engine: Any = run._engine
    finish_a_round(run, model, optimizer, batches([4], 1))
    with run:
        pass
    run.close()
    assert engine.closed == 1
    assert run.round == 1 and run.status.round_samples == 4
    cross_entropy(model(torch.ones(1, 5)), torch.zeros(1, dtype=torch.long)).backward()
    assert type(next(model.parameters()).grad) is Tensor
    for call in (run.ready, lambda: run.micro_batch(1), lambda: run.attach(model, optimizer)):
        with pytest.raises(RuntimeError, match="join again"):
            call()


def test_a_peer_that_is_forgotten_leaves_but_not_a_copy_of_it_in_a_child() -> None:
    run, model, optimizer = attached(Meeting(4))
    engine: Any = run._engine
    child = os.fork()
    if not child:
        run.close()
        os._exit(engine.closed)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    del run, model, optimizer
    gc.collect()
    assert engine.closed == 1


def test_state_goes_on_from_a_checkpoint() -> None:
    meeting = Meeting(4)
    run, model, optimizer = attached(meeting)
    for number in range(2):
        finish_a_round(run, model, optimizer, batches([4], number))
    run._failures = 3
    saved = json.loads(json.dumps(run.state_dict()))
    with pytest.raises(RuntimeError, match="attached"):
        run.load_state_dict(saved)
    alone = peer(Meeting(4))
    alone.load_state_dict(saved)
    alone.attach(model, optimizer)
    assert (alone.round, alone.status.failures) == (2, 3)
    finish_a_round(alone, model, optimizer, batches([4], 5))
    assert alone.round == 3
    behind = peer(alone._engine.meeting)  # type: ignore[attr-defined]
    behind.load_state_dict(saved)
    other = plain()
    behind.attach(other, torch.optim.SGD(other.parameters(), lr=0.1))
    assert behind.round == 3 and same_state(model, other)
    with pytest.raises(ValueError, match="of run 'run'"):
        Swarm(InProcessEngine(meeting), run_id="another", target_batch=4).load_state_dict(saved)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"run_id": "a b"}, "run_id='a b'"),
        ({"run_id": ""}, "run_id=''"),
        ({"run_id": "a.b"}, "run_id='a.b'"),
        ({"target_batch": 0}, "target_batch=0"),
        ({"target_batch": True}, "target_batch=True"),
        ({"target_batch": float("inf")}, "target_batch=inf"),
        ({"engine": "gossip"}, "'hivemind', 'torchft'"),
        ({"peers": "/ip4/127.0.0.1/tcp/1/p2p/Qm"}, "must be a list"),
        ({"peers": ["127.0.0.1:29510"]}, "swarm serve --engine hivemind"),
        ({"peers": [7]}, "peers has 7"),
        ({"engine": "torchft"}, "one lighthouse"),
        ({"engine": "torchft", "peers": ["localhost:1", "localhost:2"]}, "2 addresses"),
        ({"engine": "torchft", "peers": ["http://localhost:29510"]}, "swarm serve --engine torchft"),
    ],
    ids=str,
)
def test_join_refuses(options: dict[str, Any], named: str) -> None:
    arguments = {"run_id": "run", "target_batch": 8} | options
    with pytest.raises(ValueError) as refusal:
        swarm.join(arguments.pop("run_id"), **arguments)
    assert named in str(refusal.value)


PROGRAM = """
import sys
from bareloop import swarm
assert not {"torch", "hivemind", "torchft"} & sys.modules.keys()
import bareloop.swarm.door
assert callable(swarm.join) and "join" in dir(swarm)
sys.modules["torchft"] = sys.modules["hivemind"] = None
for ask in (
    lambda: swarm.join("run", target_batch=1, engine="torchft", peers=["localhost:1"]),
    lambda: swarm.join("run", target_batch=1),
    lambda: swarm.HivemindOptions,
    lambda: swarm.native_averager,
):
    try:
        ask()
    except ImportError as error:
        assert type(error) is ImportError and "pip install 'bareloop[swarm]'" in str(error), error
    else:
        raise AssertionError("nothing was missing")
try:
    swarm.nothing
except AttributeError:
    print("as it should be")

import torch
from in_process import InProcessEngine, Meeting

class Telling(InProcessEngine):
    def close(self):
        print("left")

run, model = swarm.Swarm(Telling(Meeting(1)), run_id="run", target_batch=1), torch.nn.Linear(1, 1)
run.attach(model, torch.optim.SGD(model.parameters(), lr=1.0))
"""


def test_the_rooms_names_are_loaded_when_asked_for_and_a_peer_leaves_when_the_process_ends() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=Path(__file__).parent,
    )
    assert done.stdout.splitlines() == ["as it should be", "left"], done.stderr
