"""torchft's LocalSGD and DiLoCo around a `FlatAccumulator`: rounds are local, and parameters are averaged every few steps.

They need no engine of ours, since nobody's gradients are averaged:

    accumulator = FlatAccumulator(model.parameters(), target=256)
    with LocalSGD(manager, model, optimizer, sync_every=10):
        for step in steps(model, optimizer, batches, loss_fn, accumulate=accumulator): ...

Both hang on hooks of the optimizer's step, which `steps` makes inside `accumulator.averaged()`: DiLoCo's outer optimizer
then puts gradients of its own in `param.grad` and drops them, and leaving the block puts the seals there again. The
accumulator holds nothing at that moment, so a step that torchft refuses costs no sample of the next round. What they count,
as ever, are steps: peers of different speed average after the same number of them.

What torchft asks for: DiLoCo needs Manager(use_async_quorum=False); one outer optimizer for several fragments steps all
parameters whenever one fragment is due, so give a list of them.
"""

import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bareloop.swarm.accumulator import FlatAccumulator
from bareloop.swarm.sealed import SealedGradient
from bareloop.swarm.torchft_engine import LIGHTHOUSE_DEFAULTS
from bareloop.swarm.torchft_group import bound_store
from bareloop.trainer.loop import steps

pytestmark = pytest.mark.filterwarnings("ignore:The 'warn' method is deprecated:DeprecationWarning")

SIZES = [4, 8, 8, 12]
"""A round; the mean over it is not the mean of its micro-batches' means."""
TARGET = sum(SIZES)
STEPS, SYNC_EVERY, PEERS = 4, 2, 2
PATIENCE_S = 60.0

Around = Callable[[Any, nn.Module, torch.optim.Optimizer], AbstractContextManager[Any]]


@pytest.fixture(scope="module")
def lighthouse() -> Iterator[str]:
    from torchft.coordination import LighthouseServer

    # Both must be there, or one would go through its steps alone.
    server = LighthouseServer(bind="127.0.0.1:0", **{**LIGHTHOUSE_DEFAULTS, "min_replicas": PEERS})
    yield f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}"
    server.shutdown()


def rows(peer: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(peer)
    return [torch.randn(n, 4, generator=generator) for _ in range(STEPS) for n in SIZES]


def model_of_all() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def loss_sum(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    return model(x).square().mean(dim=1).sum(), len(x)


def train(peer: int, model: nn.Module, lighthouse: str, around: Around, trained: list[Any]) -> None:
    from torchft.checkpointing.pg_transport import PGTransport
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    store = bound_store("127.0.0.1")
    group = ProcessGroupGloo(timedelta(seconds=30))
    manager = Manager(
        pg=group,
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=PEERS,
        use_async_quorum=False,
        timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"{uuid.uuid4().hex}p",
        hostname="127.0.0.1",
        init_sync=False,  # all begin from one seed
        # HTTPTransport, which is the default, never closes its socket.
        checkpoint_transport=PGTransport(group, timedelta(seconds=30), torch.device("cpu")),
    )
    accumulator = FlatAccumulator(model.parameters(), target=TARGET)
    try:
        with around(manager, model, optimizer):
            made = 0
            for _ in steps(model, optimizer, rows(peer), loss_sum, accumulate=accumulator):
                made += 1
                assert all(isinstance(p.grad, SealedGradient) for p in model.parameters())
                assert accumulator.samples == 0 and not accumulator.buffers[0].any()
        assert made == STEPS and manager.current_step() == STEPS // SYNC_EVERY
        trained[peer] = [p.detach().clone() for p in model.parameters()]
    finally:
        manager.shutdown()


def trained(lighthouse: str, around: Around) -> list[list[Tensor]]:
    """Parameters of each peer at the end."""
    results: list[Any] = [None] * PEERS
    models = [model_of_all() for _ in range(PEERS)]  # not in the threads: they share the generator of random numbers
    threads = [
        threading.Thread(target=train, args=(n, models[n], lighthouse, around, results), daemon=True)
        for n in range(PEERS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert all(result is not None for result in results), "a peer failed or hangs"
    return results


def alone(synchronise: Callable[[Sequence[nn.Module]], None]) -> nn.Module:
    """The same in one process: each peer steps on its pooled rounds, and every `SYNC_EVERY` steps `synchronise` is called."""
    models = [model_of_all() for _ in range(PEERS)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    for step in range(STEPS):
        for peer in range(PEERS):
            optimizers[peer].zero_grad()
            pooled = torch.cat(rows(peer)[step * len(SIZES) : (step + 1) * len(SIZES)])
            models[peer](pooled).square().mean().backward()
            optimizers[peer].step()
        if (step + 1) % SYNC_EVERY == 0:
            synchronise(models)
    return models[0]


@torch.no_grad()
def set_all(models: Sequence[nn.Module], values: Sequence[Tensor]) -> None:
    for model in models:
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)


def mean_of(models: Sequence[nn.Module]) -> list[Tensor]:
    return [
        torch.stack([p.detach() for p in of_all]).mean(0)
        for of_all in zip(*(m.parameters() for m in models), strict=True)
    ]


def test_local_sgd_averages_what_rounds_of_the_accumulator_made(lighthouse: str) -> None:
    from torchft.local_sgd import LocalSGD

    peers = trained(lighthouse, lambda manager, model, optimizer: LocalSGD(manager, model, optimizer, SYNC_EVERY))
    reference = alone(lambda models: set_all(models, mean_of(models)))
    for first, second, expected in zip(*peers, reference.parameters(), strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-6)


def test_diloco_steps_its_outer_optimizer_inside_the_round(lighthouse: str) -> None:
    from torchft.local_sgd import DiLoCo

    def outer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)

    peers = trained(
        lighthouse,
        lambda manager, model, optimizer: DiLoCo(manager, [model], optimizer, outer(model), sync_every=SYNC_EVERY),
    )
    kept = model_of_all()
    outer_optimizer = outer(kept)

    def synchronise(models: Sequence[nn.Module]) -> None:
        for parameter, mean in zip(kept.parameters(), mean_of(models), strict=True):
            parameter.grad = parameter.detach() - mean
        outer_optimizer.step()
        set_all(models, [p.detach() for p in kept.parameters()])

    reference = alone(synchronise)
    for first, second, expected in zip(*peers, reference.parameters(), strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-6)


def test_step_outside_of_the_averaged_block_is_refused_before_torchft_hears_of_it() -> None:
    model = model_of_all()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    heard: list[object] = []
    optimizer.register_step_post_hook(lambda *_: heard.append(1))
    accumulator = FlatAccumulator(model.parameters())
    with accumulator.micro_batch(4):
        model(torch.randn(4, 4)).square().mean().backward()
    with pytest.raises(RuntimeError, match="in the middle of a round"):
        optimizer.step()
    assert not heard
