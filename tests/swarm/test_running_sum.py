"""The sum beneath a loop of hivemind's: native cost, exact weights, and nothing that changes it unseen."""

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bareloop.swarm.running_sum import RunningSum

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)
    import hivemind

pytestmark = pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself:FutureWarning")


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))


def batches(sizes: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 6, generator=generator), torch.randn(n, 1, generator=generator)) for n in sizes]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def pooled(model: nn.Module, parts: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """The gradient of the mean over all samples, by PyTorch, on parameters of their own."""
    copy = network()
    copy.load_state_dict(model.state_dict())
    loss(copy, (torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))).backward()
    return [parameter.grad for parameter in copy.parameters()]  # type: ignore[misc]


def error(found: Any, wanted: list[Tensor]) -> float:
    scale = max(tensor.abs().max().item() for tensor in wanted)
    return max((a - b).abs().max().item() for a, b in zip(found, wanted, strict=True)) / scale


def native(model: nn.Module, **options: Any) -> RunningSum:
    return RunningSum(list(model.parameters()), **{"compat": False, "scaled": False, **options})


ZERO = {
    "none": lambda model: model.zero_grad(),
    "zero": lambda model: model.zero_grad(set_to_none=False),
    "never": lambda model: None,
}


@pytest.mark.parametrize("zero", ZERO)
@pytest.mark.parametrize("sizes", [(8, 8, 8, 8), (4, 8, 8, 12), (3, 5, 8), (5,)])
def test_the_mean_is_the_pooled_gradient(sizes: tuple[int, ...], zero: str) -> None:
    model = network()
    total = native(model)
    for _ in range(2):  # a second round begins at zero
        for batch in batches(sizes):
            ZERO[zero](model)
            with total.micro_batch(len(batch[0])):
                loss(model, batch).backward()
            total.count(len(batch[0]))
        total.load(sum(sizes))
        assert error(total.host_views, pooled(model, batches(sizes))) < 1e-6
        total.reset()


def test_equal_sizes_need_no_block() -> None:
    model = network()
    total = native(model)
    for batch in batches((8, 8, 8)):
        model.zero_grad()
        loss(model, batch).backward()
        total.count(8)
    total.load(24)
    assert error(total.host_views, pooled(model, batches((8, 8, 8)))) < 1e-6


@pytest.mark.parametrize("sizes", [(4, 8, 8, 12), (3, 5, 8)])
def test_compat_weights_each_gradient_at_the_end(sizes: tuple[int, ...]) -> None:
    model = network()
    total = native(model, compat=True)
    for batch in batches(sizes):
        model.zero_grad()
        loss(model, batch).backward()
        total.count(len(batch[0]))
    total.load(sum(sizes))
    assert error(total.host_views, pooled(model, batches(sizes))) < 1e-6


def test_compat_takes_the_gradient_as_it_was_clipped() -> None:
    model = network()
    total = native(model, compat=True)
    clipped = []
    for batch in batches((8, 8)):
        model.zero_grad()
        loss(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        clipped.append([parameter.grad.clone() for parameter in model.parameters()])  # type: ignore[union-attr]
        total.count(8)
    total.load(16)
    assert error(total.host_views, [(a + b) / 2 for a, b in zip(*clipped, strict=True)]) < 1e-6


def test_two_blocks_may_make_one_step() -> None:
    model = network()
    total = native(model)
    for batch in batches((3, 5)):
        with total.micro_batch(len(batch[0])):
            loss(model, batch).backward()
    with pytest.raises(ValueError, match=r"give opt.step\(batch_size=8\)"):
        total.count(3)
    total.count(8)
    total.load(8)
    assert error(total.host_views, pooled(model, batches((3, 5)))) < 1e-6


def test_channels_last_arrives_in_the_order_of_the_indices() -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    images = torch.randn(2, 3, 8, 8)
    total = native(model)
    model(images).square().mean().backward()
    total.count(2)
    total.load(2)
    wanted = torch.autograd.grad(model(images).square().mean(), list(model.parameters()))
    assert all(view.is_contiguous() for view in total.host_views)
    assert error(total.host_views, list(wanted)) < 1e-6


def test_frozen_parameters_are_zeros_and_keep_their_place() -> None:
    model = network()
    model[2].requires_grad_(False)
    total = native(model)
    batch = batches((8,))[0]
    loss(model, batch).backward()
    total.count(8)
    total.load(8)
    wanted = pooled(model, [batch])
    wanted[2], wanted[3] = torch.zeros(8, 16), torch.zeros(8)
    assert error(total.host_views, wanted) < 1e-6
    model[2].requires_grad_(True)
    with pytest.raises(RuntimeError, match="unfrozen"):
        total.load(8)


class Operators(TorchDispatchMode):
    """Counts what is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_a_micro_step_makes_the_operators_of_native_accumulation() -> None:
    batch = batches((8,))[0]
    model = network()
    loss(model, batch).backward()  # from here on autograd adds
    with Operators() as wanted:
        loss(model, batch).backward()
    model = network()
    total = native(model)
    loss(model, batch).backward()
    total.count(8)
    for zero in ({}, {"set_to_none": True}):
        model.zero_grad(**zero)
        with Operators() as found:
            loss(model, batch).backward()
            total.count(8)
        assert found.counts == wanted.counts
    model = network()
    total = native(model, compat=True)
    loss(model, batch).backward()
    total.count(8)
    model.zero_grad()
    with Operators() as compat:
        loss(model, batch).backward()
        total.count(8)
    adds = {name: n for name, n in compat.counts.items() if "add_" in name}
    assert adds == {"aten._foreach_add_.List": 1}


def test_what_would_change_the_sum_is_refused() -> None:
    model = network()
    total = native(model)
    loss(model, batches((8,))[0]).backward()
    with pytest.raises(RuntimeError, match="register_step_pre_hook"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(RuntimeError, match="compat=True"):
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.zeros(()))
        scaler.unscale_(torch.optim.SGD(model.parameters()))
    total.count(8)
    total.load(8)
    assert error(total.host_views, pooled(model, batches((8,)))) < 1e-6


def test_another_size_without_a_block_is_refused_and_drops_the_round() -> None:
    model = network()
    total = native(model)
    for batch in batches((8, 5)):
        model.zero_grad()
        loss(model, batch).backward()
        if len(batch[0]) == 8:
            total.count(8)
    with pytest.raises(ValueError, match="micro-batches of 8"):
        total.count(5)
    loss(model, batches((5,))[0]).backward()
    total.count(5)
    total.load(5)
    assert error(total.host_views, pooled(model, batches((5,)))) < 1e-6


class Fails(torch.autograd.Function):
    """Raises in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ZeroDivisionError("in the middle")


@pytest.mark.parametrize("block", [True, False])
def test_a_backward_that_fails_halfway_is_not_used(block: bool) -> None:
    model = network()
    total = native(model)
    x, y = batches((8,))[0]
    broken = nn.functional.mse_loss(model[2:](Fails.apply(model[:2](x))), y)
    with pytest.raises(ZeroDivisionError):
        if block:
            with total.micro_batch(8):
                broken.backward()
        else:
            broken.backward()
    loss(model, (x, y)).backward()
    with pytest.raises(RuntimeError, match="reset_accumulated_grads_"):
        total.count(8)
    total.reset()
    loss(model, (x, y)).backward()
    total.count(8)
    total.load(8)
    assert error(total.host_views, pooled(model, [(x, y)])) < 1e-6


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
def test_a_gradient_that_leaves_the_buffer_is_seen() -> None:
    model = network()
    total = native(model)
    with pytest.raises(RuntimeError, match="left the buffer"):
        loss(model, batches((8,))[0]).backward(create_graph=True)
    with pytest.raises(RuntimeError, match="left the buffer"):
        total.count(8)


def test_the_scaler_of_hivemind_reaches_the_sum() -> None:
    model = network()
    total = native(model, scaled=True)
    scaler = hivemind.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters())
    for batch in batches((4, 12)):
        with total.micro_batch(len(batch[0])):
            scaler.scale(loss(model, batch)).backward()
        assert scaler.are_grads_finite(optimizer)
        total.count(len(batch[0]))
    found_inf = torch.zeros(1)
    scaler._unscale_grads_(optimizer, torch.tensor(1 / 1024.0), found_inf, True)
    total.load(16)
    assert error(total.host_views, pooled(model, batches((4, 12)))) < 1e-6
    model.zero_grad()
    with pytest.raises(RuntimeError, match="zero_grad"):
        total.count(4)


@pytest.mark.parametrize("count", [0, -1, 2.0, True])
def test_a_block_of_no_samples_is_refused(count: Any) -> None:
    with pytest.raises(ValueError, match="micro_batch"), native(network()).micro_batch(count):
        pass


def test_release_gives_the_gradients_back() -> None:
    model = network()
    native(model).release()
    batch = batches((8,))[0]
    loss(model, batch).backward()
    assert error([parameter.grad for parameter in model.parameters()], pooled(model, [batch])) < 1e-6
