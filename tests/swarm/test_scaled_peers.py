"""Peers whose losses are scaled: each has a scale of its own, the mean has none, and an overflow stays with its peer."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).parent))
from in_process import InProcessEngine, Meeting, threads

from bareloop.swarm.accumulator import FlatAccumulator
from bareloop.swarm.door import Swarm
from bareloop.trainer.loop import steps

Batch = tuple[Tensor, Tensor]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))


def batches(sizes: list[int], seed: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(sum(sizes), 5, generator=generator), torch.randint(0, 3, (sum(sizes),), generator=generator)
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


def loss_fn(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    x, y = batch
    return cross_entropy(model(x).float(), y, reduction="sum"), len(y)


def trained(given: list[list[Batch]], scales: list[float], rounds: int) -> list[nn.Module]:
    """Models of as many peers as there are lists in `given`, each of which goes through its own once a round."""
    target = sum(len(y) for own in given for _, y in own)
    meeting = Meeting(target, peers=len(given))
    models = [net() for _ in given]

    def peer(index: int) -> None:
        model = models[index]
        run = Swarm(InProcessEngine(meeting), run_id="run", target_batch=target)
        scaler = torch.amp.GradScaler("cpu", init_scale=scales[index])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.attach(model, optimizer, scaler=scaler)
        for _ in range(rounds):
            for batch in given[index]:
                with run.micro_batch(len(batch[1]), reduction="sum"), torch.autocast("cpu", torch.float16):
                    scaler.scale(loss_fn(model, batch)[0]).backward()
            while not run.ready():
                pass
            with run.averaged() as mean:
                assert mean
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        run.close()

    threads(*(lambda index=index: peer(index) for index in range(len(given))))
    return models


def test_peers_with_different_scales_train_as_one_process() -> None:
    given = [batches([3, 5, 8], 1), batches([16], 2)]
    models = trained(given, [64.0, 4096.0], 3)
    alone = net()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    whole = (torch.cat([x for part in given for x, _ in part]), torch.cat([y for part in given for _, y in part]))
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss, count = loss_fn(alone, whole)
        (loss / count).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        optimizer.step()
    for model in models:
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=2e-4)  # half precision rounds each micro-batch its own way
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_gradient_that_is_not_finite_stays_with_its_peer() -> None:
    meeting = Meeting(8, peers=2)
    good, bad = batches([4], 1), [(torch.full((4, 5), float("nan")), torch.zeros(4, dtype=torch.long))]
    models, runs = [net(), net()], []
    before = copy.deepcopy(models[0])

    def peer(model: nn.Module, given: list[Batch]) -> None:
        run = Swarm(InProcessEngine(meeting), run_id="run", target_batch=8)
        run.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        runs.append(run)
        for x, y in given:
            with run.micro_batch(len(y)):
                cross_entropy(model(x), y).backward()
        while not run.ready():
            pass
        with run.averaged() as mean:
            assert mean
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer.step()

    threads(lambda: peer(models[0], good), lambda: peer(models[1], bad))
    x, y = good[0]
    cross_entropy(before(x), y).backward()
    torch.optim.SGD(before.parameters(), lr=0.1).step()
    for model in models:
        for p, q in zip(model.parameters(), before.parameters(), strict=True):
            torch.testing.assert_close(p, q)
    assert sorted(run.status.lost_samples for run in runs) == [0, 4]
    assert {run.status.round_samples for run in runs} == {4}


def test_steps_hands_its_scaler_to_the_swarm() -> None:
    made, alone = net(), net()
    run = Swarm(InProcessEngine(Meeting(8)), run_id="run", target_batch=8)
    given = batches([4, 4, 8, 8], 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    steps_made = list(
        steps(made, optimizer, given, loss_fn, accumulate=run, precision="fp16", scaler=scaler, max_norm=1.0)
    )
    assert [(step.micro_steps, step.overflow) for step in steps_made] == [(2, None), (1, None), (1, None)]
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    windows = [given[:2], given[2:3], given[3:]]
    for window in windows:
        for _ in steps(
            alone, optimizer, window, loss_fn, accumulate=len(window), precision="fp16", scaler=scaler, max_norm=1.0
        ):
            pass
    for p, q in zip(made.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-5)


def test_steps_with_a_plain_accumulator_needs_the_same_scaler_on_both_sides() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with pytest.raises(ValueError, match="give the same scaler to both"):
        steps(
            model,
            optimizer,
            batches([4], 1),
            loss_fn,
            accumulate=FlatAccumulator(model.parameters(), target=4),
            precision="fp16",
            scaler=scaler,
        )
    accumulator = FlatAccumulator(model.parameters(), target=8, scaler=scaler)
    made = list(
        steps(
            model,
            optimizer,
            batches([4, 4, 8], 1),
            loss_fn,
            accumulate=accumulator,
            precision="fp16",
            scaler=scaler,
        )
    )
    assert [step.micro_steps for step in made] == [2, 1]
    assert next(model.parameters()).isfinite().all()
