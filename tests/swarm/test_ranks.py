"""DDP inside a peer: two gloo processes, of which rank 0's engine meets another peer, a thread beside it.

Both are forked from this process, which has imported torch; each case prints a line for each rank.
"""

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))
from in_process import LIMIT_S, InProcessEngine, Meeting

from bareloop.swarm.door import Swarm
from bareloop.swarm.ranks import RankedEngine, over_ranks
from bareloop.trainer.loop import steps

Batch = tuple[Tensor, Tensor]
RANKS = 2


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))


def batches(sizes: list[int], seed: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    rows = sum(sizes)
    x, y = torch.randn(rows, 5, generator=generator), torch.randint(0, 3, (rows,), generator=generator)
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


def pooled(model: nn.Module, given: list[Batch]) -> list[Tensor]:
    model.zero_grad()
    cross_entropy(model(torch.cat([x for x, _ in given])), torch.cat([y for _, y in given])).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def distance(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(one, other, strict=True))


def summed(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    x, y = batch
    return cross_entropy(model(x), y, reduction="sum"), len(y)


def adam(model: nn.Module) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


def made(meeting: Meeting) -> tuple[Swarm, InProcessEngine]:
    engine = InProcessEngine(meeting)
    return Swarm(engine, run_id="run", target_batch=meeting.target), engine


def same_on_all_ranks(model: nn.Module, optimizer: Any, scheduler: Any) -> None:
    state = [*model.state_dict().values()]
    state += [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    whole = torch.cat([tensor.detach().flatten().float() for tensor in state])
    numbers = torch.tensor([optimizer.param_groups[0]["lr"], scheduler.last_epoch], dtype=torch.float64)
    for own in (whole, numbers):
        first = own.clone()
        dist.broadcast(first, 0)
        assert torch.equal(own, first)
    assert len(whole) > 400


def the_mean_is_that_of_all_ranks_and_peers() -> None:
    """Ranks with 3, 5, 8 rows and 8, 2, 6; a peer beside them with 4, 2: sums, of the ranks and over the swarm."""
    rank, meeting = dist.get_rank(), Meeting(38)
    own = [batches([3, 5, 8], 1), batches([8, 2, 6], 2)]
    others = batches([4, 2], 3)
    expected = pooled(net(), [*own[0], *own[1], *others])
    errors: list[BaseException] = []
    ready = threading.Event()

    def beside() -> None:
        try:
            model = net()
            run, _ = made(meeting)
            run.attach(model, torch.optim.SGD(model.parameters(), lr=1.0))
            ready.set()
            for x, y in others:
                with run.micro_batch(len(y)):
                    cross_entropy(model(x), y).backward()
            while not run.ready():
                ready.wait(0.001)
            with run.averaged() as mean:
                assert mean
                found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
                assert distance(found, expected) < 1e-6
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=beside, daemon=True)
    if rank == 0:
        thread.start()
        assert ready.wait(LIMIT_S)
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    run, engine = made(meeting)
    before = [p.detach().clone() for p in model.parameters()]
    (step,) = steps(model, optimizer, own[rank], summed, accumulate=run)
    moved = [old - new for old, new in zip(before, (p.detach() for p in model.parameters()), strict=True)]
    assert distance(moved, expected) < 2e-6
    assert (run.round, run.peers, run.status.round_samples) == (1, 2, 38)
    assert int(step.count) == 32
    assert engine.asked == (0 if rank else 3), "rank 0 alone asks"
    assert bool(engine.records) is (rank == 0)
    if rank == 0:
        thread.join(LIMIT_S)
        if errors:
            raise errors[0]
    run.close()
    assert engine.closed == (0 if rank else 1)


def a_failed_average_fails_on_all_ranks_and_is_had_later() -> None:
    rank, meeting = dist.get_rank(), Meeting(8)
    meeting.failures = 1
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    run, _ = made(meeting)
    own = [batches([4, 4], 1), batches([4, 4], 2)]
    expected = pooled(net(), [*own[0], *own[1]])
    before = [p.detach().clone() for p in model.parameters()]
    (step,) = steps(model, optimizer, own[rank], summed, accumulate=run)
    assert step.micro_steps == 2
    assert run.status.failures == 1
    moved = [old - new for old, new in zip(before, (p.detach() for p in model.parameters()), strict=True)]
    assert distance(moved, expected) < 2e-6


def advanced(meeting: Meeting, rounds: int) -> None:
    """Rounds that a peer of one process makes, on rank 0."""
    if dist.get_rank() == 0:
        model = net(7)
        optimizer, scheduler = adam(model)
        run, engine = made(meeting)
        engine.round = meeting.round
        with run:
            for number in range(rounds):
                given = batches([8], number)
                list(steps(model, optimizer, given, summed, accumulate=run, scheduler=scheduler))


def a_late_peer_has_the_state_on_all_ranks() -> None:
    meeting = Meeting(8)
    advanced(meeting, 3)
    model = DistributedDataParallel(net())
    optimizer, scheduler = adam(model)
    run, _ = made(meeting)
    run.attach(model, optimizer, scheduler)
    assert run.round == 3 and scheduler.last_epoch == 3
    same_on_all_ranks(model, optimizer, scheduler)
    list(steps(model, optimizer, batches([4], dist.get_rank()), summed, accumulate=run, scheduler=scheduler))
    assert run.round == 4
    same_on_all_ranks(model, optimizer, scheduler)


def a_peer_left_behind_follows_on_all_ranks() -> None:
    meeting = Meeting(8)
    model = DistributedDataParallel(net())
    optimizer, scheduler = adam(model)
    run, _ = made(meeting)
    list(steps(model, optimizer, batches([3], dist.get_rank()), summed, accumulate=run, scheduler=scheduler))
    assert run.status.local_samples == 6
    joined = dict(meeting.samples)
    meeting.samples.clear()
    advanced(meeting, 2)
    meeting.samples.update(joined)
    own = batches([4, 4], dist.get_rank())
    made_steps = list(steps(model, optimizer, own, summed, accumulate=run, scheduler=scheduler))
    assert len(made_steps) == 1
    assert (run.round, run.status.lost_samples) == (3, 14)
    same_on_all_ranks(model, optimizer, scheduler)


def an_engine_that_breaks_on_rank_0_ends_all_ranks() -> None:
    meeting = Meeting(8)
    model = DistributedDataParallel(net())
    run, engine = made(meeting)

    def ready(samples: float) -> bool:
        raise LookupError("the network is gone")

    engine.ready = ready  # type: ignore[method-assign]
    expected = (LookupError, "the network is gone") if dist.get_rank() == 0 else (RuntimeError, "rank 0")
    with pytest.raises(expected[0], match=expected[1]):
        list(steps(model, torch.optim.SGD(model.parameters(), lr=1.0), batches([4], 1), summed, accumulate=run))


def one_rank_or_none_is_the_engine_itself() -> None:
    engine = InProcessEngine(Meeting(1))
    assert over_ranks(engine, net()) is engine
    alone = [dist.new_group([rank]) for rank in range(RANKS)][dist.get_rank()]
    assert over_ranks(engine, DistributedDataParallel(net(), process_group=alone)) is engine
    assert isinstance(over_ranks(engine, DistributedDataParallel(net())), RankedEngine)


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (
        the_mean_is_that_of_all_ranks_and_peers,
        a_failed_average_fails_on_all_ranks_and_is_had_later,
        a_late_peer_has_the_state_on_all_ranks,
        a_peer_left_behind_follows_on_all_ranks,
        an_engine_that_breaks_on_rank_0_ends_all_ranks,
        one_rank_or_none_is_the_engine_itself,
    )
}


def _rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=LIMIT_S))
    outcomes = {}
    for name, case in CASES.items():
        try:
            case()
            outcomes[name] = "ok"
        except BaseException:
            outcomes[name] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(outcomes))
    dist.barrier()


@pytest.fixture(scope="module", name="outcomes")
def outcomes_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, str]]]:
    """Of each rank: case -> "ok" or a traceback."""
    folder = tmp_path_factory.mktemp("ranks")
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if not child:
            try:
                signal.alarm(3 * LIMIT_S)
                _rank(rank, folder)
            finally:
                os._exit(0)  # the destructors of DDP and gloo may wait for each other
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    yield [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("case", CASES)
def test_on_both_ranks(case: str, outcomes: list[dict[str, str]]) -> None:
    found = [of_rank.get(case, "did not come to it") for of_rank in outcomes]
    assert found == ["ok"] * RANKS, "\n".join(found)
