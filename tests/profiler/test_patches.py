"""The wrappers report what happens, change nothing, and leave torch as it was."""

from typing import Any

import pytest
import torch

from bareloop.profiler.probes import patches
from bareloop.profiler.probes.phase_clock import PhaseClock
from bareloop.trace import PHASES

OWNERS = (
    torch,
    torch.optim.Optimizer,
    torch.nn.Module,
    torch.utils.data.dataloader._BaseDataLoaderIter,
    torch.autograd,
    torch.nn.utils,
    torch.nn.utils.clip_grad,
    torch.optim.lr_scheduler.LRScheduler,
    torch.optim.lr_scheduler.ReduceLROnPlateau,
    torch.amp.GradScaler,
    torch.Tensor,
    torch.distributed,
    torch.distributed.distributed_c10d,
)


class Notes:
    """A listener that writes down what it hears."""

    def __init__(self) -> None:
        self.clock = PhaseClock()
        self.gradients_ready = False
        self.heard: list[Any] = []

    def loaded(self, loader: Any, batch: Any) -> Any:
        self.heard.append(("loaded", loader.batch_size))
        return batch

    def backward(self, tensors: Any) -> None:
        self.heard.append(("backward", float(tensors.detach())))

    def clipped(self, kind: str, limit: float, norm: Any) -> None:
        self.heard.append(("clipped", kind, limit))

    def scaled(self, scaler: Any) -> None:
        self.heard.append(("scaled", scaler.get_scale()))

    def before_step(self, optimizer: Any) -> None:
        self.heard.append("before step")

    def after_step(self, optimizer: Any, *, skipped: bool = False) -> None:
        self.heard.append(("after step", skipped))

    def saved(self) -> None:
        self.heard.append("saved")


@pytest.fixture
def notes() -> Any:
    before = {id(owner): dict(vars(owner)) for owner in OWNERS}
    listener = Notes()
    patches.install(listener)
    patches.watch_transfers(listener)
    wrapped = [(owner, name) for owner, name, _ in patches._replaced]
    assert {id(owner) for owner, _ in wrapped} >= {id(owner) for owner in OWNERS}
    yield listener
    patches.uninstall()
    for owner, name in wrapped:
        if id(owner) in before:
            was = before[id(owner)]
            assert (name in vars(owner)) == (name in was), f"{owner}.{name}: what was inherited is inherited again"
            assert vars(owner).get(name) is was.get(name), f"{owner}.{name} is the very object again"


def steps() -> list[torch.Tensor]:
    """Two steps with everything in them; returns the weights."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    data = torch.utils.data.TensorDataset(torch.ones(4, 3))
    for (batch,) in torch.utils.data.DataLoader(data, batch_size=2):
        model(batch).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_what_is_heard_in_a_step(notes: Notes) -> None:
    steps()
    first = notes.heard[: len(notes.heard) // 2]
    assert [item if isinstance(item, str) else item[0] for item in first] == [
        "loaded",
        "backward",
        "clipped",
        "before step",
        "after step",
    ]
    assert first[2] == ("clipped", "norm", 0.1)
    spent = dict(zip(PHASES, notes.clock.resolve(), strict=True))
    assert all(spent[phase] > 0 for phase in ("data wait", "backward", "clip", "optimizer", "scheduler"))


def test_results_are_the_same_to_the_bit(notes: Notes) -> None:
    watched = steps()
    patches.uninstall()
    assert all(torch.equal(a, b) for a, b in zip(watched, steps(), strict=True))
    patches.install(notes)


def test_a_step_that_the_scaler_skips(notes: Notes) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.full((1, 2), float("inf"))).sum()).backward()
    scaler.step(optimizer)
    assert ("after step", True) in notes.heard
    assert ("scaled", 4.0) in notes.heard


def test_a_clip_that_an_ablation_overrides(notes: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "clip_override", lambda parameters, max_norm: "no clip")
    assert torch.nn.utils.clip_grad_norm_([], 1.0) == "no clip"
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.full((2,), 3.0)
    torch.nn.utils.clip_grads_with_norm_([weight], 1.0, torch.tensor(18.0**0.5))
    assert weight.grad.tolist() == [3.0, 3.0]
    assert notes.heard == []


def test_a_clip_to_a_norm_that_was_computed_before(notes: Notes) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([3.0, 4.0])
    norm = torch.nn.utils.get_total_norm([weight.grad])
    torch.nn.utils.clip_grads_with_norm_([weight], 1.0, norm)
    assert weight.grad.norm() == pytest.approx(1.0)
    assert notes.heard == [("clipped", "norm", 1.0)]


def test_host_tensors_that_move_are_a_transfer(notes: Notes) -> None:
    notes.clock.reset()
    torch.ones(2).to(torch.float64)
    spent = dict(zip(PHASES, notes.clock.resolve(), strict=True))
    assert spent["transfer"] > 0


def test_reductions_count_as_gradients_only_after_a_backward(notes: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for ready in (False, True):
            notes.clock.reset()
            notes.gradients_ready = ready
            torch.distributed.all_reduce(torch.ones(1))
            spent = dict(zip(PHASES, notes.clock.resolve(), strict=True))
            assert (spent["gradient reduction"] > 0) is ready
    finally:
        torch.distributed.destroy_process_group()
