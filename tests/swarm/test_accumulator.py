"""FlatAccumulator against the gradient of the pooled batch, and against PyTorch's own accumulation."""

import copy
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from bareloop.swarm.accumulator import FlatAccumulator
from bareloop.trainer.loop import steps

SPLITS = [(32,), (8, 8, 8, 8), (1,) * 32, (4, 8, 8, 12), (12, 8, 8, 4)]


class Net(nn.Module):
    """A convolution, a frozen layer, a weight used twice, and a head that can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.LayerNorm(36)
        self.twice = nn.Linear(36, 36, bias=False)
        self.frozen = nn.Linear(36, 36).requires_grad_(False)
        self.tied = nn.Linear(36, 36, bias=False)
        self.tied.weight = self.twice.weight
        self.head = nn.Linear(144, 3)
        self.extra = nn.Linear(36, 3)

    def forward(self, x: Tensor, *, extra: bool = True, checkpointed: bool = False) -> Tensor:
        # x[B, 1, 8, 8] -> logits[B, 3]
        features = self.conv(x).flatten(2)
        middle = lambda h: self.tied(self.frozen(self.twice(self.norm(h))).tanh())  # noqa: E731
        hidden = checkpoint(middle, features, use_reentrant=False) if checkpointed else middle(features)
        logits = self.head(hidden.flatten(1))
        return logits + self.extra(hidden.mean(1)) if extra else logits


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(size: int = 32, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 1, 8, 8, generator=generator), torch.randint(0, 3, (size,), generator=generator)


def pooled(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Gradients of the mean loss over the whole batch, by PyTorch alone."""
    model = copy.deepcopy(model)
    cross_entropy(model(x), y).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def worst(model: nn.Module, expected: dict[str, Tensor]) -> float:
    """Largest error relative to the largest entry of the gradient. (That of a bias before a norm is nothing but noise.)"""
    got = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert got.keys() == expected.keys()
    largest = max(float(e.abs().max()) for e in expected.values())
    return max(float((got[n] - e).abs().max()) for n, e in expected.items()) / largest


@pytest.mark.parametrize("compat", [False, True])
@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_any_split_gives_the_gradient_of_the_whole(model: Net, sizes: tuple[int, ...], compat: bool) -> None:
    x, y = batch()
    accumulator = FlatAccumulator(model.parameters(), compat=compat)
    for xs, ys in zip(x.split(sizes), y.split(sizes), strict=True):
        with accumulator.micro_batch(len(xs)):
            cross_entropy(model(xs), ys).backward()
    assert (accumulator.samples, accumulator.micro_batches) == (32, len(sizes))
    with accumulator.averaged():
        assert worst(model, pooled(model, x, y)) < 1e-6
    assert accumulator.samples == accumulator.micro_batches == 0


@pytest.mark.parametrize("compat", [False, True])
def test_sums_with_counts_that_stay_on_the_device(model: Net, compat: bool) -> None:
    x, y = batch()
    y[::5] = -100
    expected = pooled(model, x, y)
    accumulator = FlatAccumulator(model.parameters(), compat=compat)
    for xs, ys in zip(x.split((4, 8, 8, 12)), y.split((4, 8, 8, 12)), strict=True):
        with accumulator.micro_batch((ys != -100).sum(), reduction="sum"):
            cross_entropy(model(xs), ys, reduction="sum").backward()
    with accumulator.averaged():
        assert worst(model, expected) < 1e-6
        assert accumulator.samples == int((y != -100).sum())


def test_rounds_train_as_a_plain_loop_does(model: Net) -> None:
    plain, x, y = copy.deepcopy(model), *batch(96)
    accumulator = FlatAccumulator(model.parameters())
    ours = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for xs, ys in zip(x.split(32), y.split(32), strict=True):
        for part, labels in zip(xs.split((12, 20)), ys.split((12, 20)), strict=True):
            with accumulator.micro_batch(len(part)):
                cross_entropy(model(part), labels).backward()
            ours.zero_grad()
        with accumulator.averaged():
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            ours.step()
        theirs.zero_grad()
        cross_entropy(plain(xs), ys).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        theirs.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


class Ops(TorchDispatchMode):
    """Counts every operator that reaches the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_a_micro_batch_makes_the_operators_of_native_accumulation(model: Net) -> None:
    x, y = batch(8)
    plain = copy.deepcopy(model)
    for _ in range(2):
        cross_entropy(plain(x), y).backward()
    with Ops() as native:
        cross_entropy(plain(x), y).backward()
    accumulator = FlatAccumulator(model.parameters())
    for _ in range(2):
        with accumulator.micro_batch(8):
            cross_entropy(model(x), y).backward()
    with Ops() as ours, accumulator.micro_batch(8):
        cross_entropy(model(x), y).backward()
    assert ours.seen == native.seen
    assert not any("_local_scalar_dense" in name for name in ours.seen)


def test_the_gradients_are_the_only_memory(model: Net) -> None:
    accumulator = FlatAccumulator(model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(b.numel() for b in accumulator.buffers) < trained + 16 * len(list(model.parameters()))
    with accumulator.micro_batch(4):
        cross_entropy(model(batch(4)[0]), batch(4)[1]).backward()
        starts = {b.untyped_storage().data_ptr() for b in accumulator.buffers}
        assert {p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None} == starts


@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_sum_survives_zero_grad_between_micro_batches(model: Net, set_to_none: bool) -> None:
    x, y = batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = FlatAccumulator(model.parameters())
    for xs, ys in zip(x.split(8), y.split(8), strict=True):
        optimizer.zero_grad(set_to_none=set_to_none)
        model.zero_grad(set_to_none=set_to_none)
        with accumulator.micro_batch(8):
            cross_entropy(model(xs), ys).backward()
        optimizer.zero_grad(set_to_none=set_to_none)
    with accumulator.averaged():
        assert worst(model, pooled(model, x, y)) < 1e-6


@pytest.mark.parametrize(
    "use",
    [
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda model: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda model: torch.optim.AdamW(model.parameters()).step(),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, fused=True).step(),
        lambda model: model.head.weight.grad.norm(),
    ],
)
def test_using_a_gradient_in_mid_round_is_refused_and_harmless(model: Net, use) -> None:
    x, y = batch(8)
    weights = copy.deepcopy(model.state_dict())
    accumulator = FlatAccumulator(model.parameters())
    with accumulator.micro_batch(8):
        cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match=r"middle of a round.*inside `with accumulator.averaged"):
        use(model)
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    with accumulator.averaged():
        assert worst(model, pooled(model, x, y)) < 1e-6


def test_compat_lets_each_micro_batch_be_clipped(model: Net) -> None:
    x, y = batch(16)
    expected: dict[str, Tensor] = {}
    for xs, ys in zip(x.split(8), y.split(8), strict=True):
        plain = copy.deepcopy(model)
        cross_entropy(plain(xs), ys).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        for name, p in plain.named_parameters():
            if p.grad is not None:
                expected[name] = expected.get(name, 0) + p.grad / 2
    accumulator = FlatAccumulator(model.parameters(), compat=True)
    for xs, ys in zip(x.split(8), y.split(8), strict=True):
        with accumulator.micro_batch(8):
            model.zero_grad()
            cross_entropy(model(xs), ys).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    with accumulator.averaged():
        assert worst(model, expected) < 1e-6


def test_grad_scaler_unscales_the_average_and_skips_a_bad_round(model: Net) -> None:
    x, y = batch(16)
    expected = pooled(model, x, y)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = FlatAccumulator(model.parameters())
    for factor in (1.0, float("inf")):
        weights = copy.deepcopy(model.state_dict())
        for xs, ys in zip(x.split((4, 12)), y.split((4, 12)), strict=True):
            with accumulator.micro_batch(len(xs)):
                scaler.scale(factor * cross_entropy(model(xs), ys)).backward()
        with accumulator.averaged():
            scaler.unscale_(optimizer)
            if factor == 1.0:
                assert worst(model, expected) < 1e-5
            scaler.step(optimizer)
        scaler.update()
        stepped = any(not torch.equal(weights[n], v) for n, v in model.state_dict().items())
        assert stepped == (factor == 1.0)
    assert scaler.get_scale() == 512.0


def test_bfloat16_and_float32_parameters_have_a_buffer_each(model: Net) -> None:
    model.head.to(torch.bfloat16)
    accumulator = FlatAccumulator(model.parameters())
    assert {b.dtype for b in accumulator.buffers} == {torch.float32, torch.bfloat16}
    with accumulator.micro_batch(4):
        hidden = model.conv(batch(4)[0]).flatten(1)
        model.head(hidden.to(torch.bfloat16)).float().sum().backward()
    with accumulator.averaged():
        assert model.head.weight.grad.dtype == torch.bfloat16
        assert model.head.weight.grad.abs().sum() > 0


def test_checkpointed_blocks_and_channels_last(model: Net) -> None:
    x, y = batch(16)
    expected = pooled(model, x, y)
    model.conv.to(memory_format=torch.channels_last)
    accumulator = FlatAccumulator(model.parameters())
    for xs, ys in zip(x.split((4, 12)), y.split((4, 12)), strict=True):
        with accumulator.micro_batch(len(xs)):
            cross_entropy(model(xs, checkpointed=True), ys).backward()
            assert model.conv.weight.grad.stride() == model.conv.weight.stride()
    with accumulator.averaged():
        assert worst(model, expected) < 1e-6


def test_a_parameter_without_gradient_in_some_micro_batches(model: Net) -> None:
    x, y = batch(16)
    plain = copy.deepcopy(model)
    loss = sum(cross_entropy(plain(xs, extra=xs is first), ys) / 2 for (xs, ys), first in _halves(x, y))
    loss.backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    accumulator = FlatAccumulator(model.parameters())
    for (xs, ys), first in _halves(x, y):
        with accumulator.micro_batch(8):
            cross_entropy(model(xs, extra=xs is first), ys).backward()
    with accumulator.averaged():
        assert worst(model, expected) < 1e-6


def _halves(x: Tensor, y: Tensor) -> list[tuple[tuple[Tensor, Tensor], Tensor]]:
    parts = list(zip(x.split(8), y.split(8), strict=True))
    return [(part, parts[0][0]) for part in parts]


def test_a_micro_batch_of_nothing_counts_for_nothing(model: Net) -> None:
    x, y = batch(8)
    accumulator = FlatAccumulator(model.parameters())
    with accumulator.micro_batch(8):
        cross_entropy(model(x), y).backward()
    with accumulator.micro_batch(0):
        cross_entropy(model(x), torch.full_like(y, -100)).backward()  # a mean over nothing: NaN
    with accumulator.averaged():
        assert worst(model, pooled(model, x, y)) < 1e-6


def test_what_averages_with_peers_gets_the_mean_and_its_weight(model: Net) -> None:
    x, y = batch(16)
    seen = []

    def average(buffers, samples) -> None:
        seen.append(samples)
        for buffer in buffers:
            buffer.mul_(3)

    accumulator = FlatAccumulator(model.parameters(), average=average)
    with accumulator.micro_batch(16):
        cross_entropy(model(x), y).backward()
    with accumulator.averaged():
        assert worst(model, {name: 3 * g for name, g in pooled(model, x, y).items()}) < 1e-6
    assert seen == [16]


def test_a_round_whose_averaging_failed_is_whole_and_goes_on(model: Net) -> None:
    x, y = batch(16)
    accumulator = FlatAccumulator(model.parameters(), average=_no_peers)
    with accumulator.micro_batch(12):
        cross_entropy(model(x[:12]), y[:12]).backward()
    with pytest.raises(ConnectionError), accumulator.averaged():
        raise AssertionError("the block ran without an average")
    with accumulator.micro_batch(4):
        cross_entropy(model(x[12:]), y[12:]).backward()
    accumulator._average = None
    with accumulator.averaged():
        assert worst(model, pooled(model, x, y)) < 1e-6


def _no_peers(buffers, samples) -> None:
    raise ConnectionError("no peers")


def test_a_micro_batch_that_fails_halfway_spoils_its_round_only(model: Net) -> None:
    x, y = batch(8)
    accumulator = FlatAccumulator(model.parameters())
    with pytest.raises(MemoryError), accumulator.micro_batch(8):
        cross_entropy(model(x), y).backward()
        raise MemoryError("no room")
    with accumulator.micro_batch(8):
        cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match=r"MemoryError in the middle.*reset\(\)"), accumulator.averaged():
        pass
    accumulator.reset()
    with pytest.raises(ValueError), accumulator.micro_batch(8):
        raise ValueError("before any backward: nothing was added")
    with accumulator.micro_batch(8):
        cross_entropy(model(x), y).backward()
    with accumulator.averaged():
        assert worst(model, pooled(model, x, y)) < 1e-6


def test_compiled_models(model: Net) -> None:
    x, y = batch(16)
    expected = pooled(model, x, y)
    accumulator = FlatAccumulator(model.parameters())
    compiled = torch.compile(model, backend="aot_eager")
    for xs, ys in zip(x.split(8), y.split(8), strict=True):
        with accumulator.micro_batch(8):
            cross_entropy(compiled(xs), ys).backward()
    with accumulator.averaged():
        assert worst(model, expected) < 1e-6


def test_a_gradient_that_leaves_its_buffer_is_refused(model: Net) -> None:
    x, y = batch(8)
    accumulator = FlatAccumulator(model.parameters())
    with pytest.raises(RuntimeError, match="gradient_as_bucket_view=False"), accumulator.micro_batch(8):
        model.zero_grad()
        cross_entropy(model(x), y).backward()
    assert accumulator.samples == accumulator.micro_batches == 0, "what is not in the buffers is not counted"
    with accumulator.micro_batch(8):
        cross_entropy(model(x), y).backward()
    with accumulator.averaged():
        assert worst(model, pooled(model, x, y)) < 1e-6


def test_a_round_that_counts_nothing_has_no_mean(model: Net) -> None:
    accumulator = FlatAccumulator(model.parameters())
    with accumulator.micro_batch(torch.tensor(0), reduction="sum"):
        pass
    with pytest.raises(RuntimeError, match=r"counts 0.*reset\(\)"), accumulator.averaged():
        pass


def test_release_gives_the_gradients_back(model: Net) -> None:
    FlatAccumulator(model.parameters()).release()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda a: a.micro_batch(-1), "count=-1"),
        (lambda a: a.micro_batch(float("nan")), "count=nan"),
        (lambda a: a.micro_batch(4, reduction="max"), "reduction='max'"),
        (lambda a: a.micro_batch(torch.tensor(4)), "count is a tensor"),
    ],
)
def test_bad_counts(model: Net, call, match: str) -> None:
    accumulator = FlatAccumulator(model.parameters())
    with pytest.raises(ValueError, match=match), call(accumulator):
        pass
    assert accumulator.samples == 0


def test_blocks_do_not_nest_and_rounds_have_one_kind(model: Net) -> None:
    accumulator = FlatAccumulator(model.parameters())
    with pytest.raises(RuntimeError, match=r"averaged\(\) before any"), accumulator.averaged():
        pass
    with accumulator.micro_batch(1), pytest.raises(RuntimeError, match="inside micro_batch"):
        accumulator.averaged().__enter__()
    with pytest.raises(ValueError, match="one round, one kind"), accumulator.micro_batch(1, reduction="sum"):
        pass


def test_a_round_is_ready_at_its_target(model: Net) -> None:
    x, y = batch(8)
    accumulator = FlatAccumulator(model.parameters(), target=20)
    for _ in range(2):
        seen = []
        for _ in range(3):
            with accumulator.micro_batch(8):
                cross_entropy(model(x), y).backward()
            seen.append(accumulator.ready())
        assert seen == [False, False, True]
        with accumulator.averaged():
            pass
    with pytest.raises(RuntimeError, match="target"):
        FlatAccumulator(model.parameters()).ready()
    with pytest.raises(ValueError, match="target=0"):
        FlatAccumulator(model.parameters(), target=0)


def test_steps_takes_it(model: Net) -> None:
    """The two rooms know nothing of each other; their protocol is one."""
    plain, x, y = copy.deepcopy(model), *batch(64)
    y[::7] = -100
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = list(zip(x.split((4, 8, 8, 12, 32)), y.split((4, 8, 8, 12, 32)), strict=True))

    def loss_fn(net: nn.Module, part: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return cross_entropy(net(part[0]), part[1], reduction="sum"), (part[1] != -100).sum()

    accumulator = FlatAccumulator(model.parameters(), target=int((y[:32] != -100).sum()))
    made = list(steps(model, optimizer, batches, loss_fn, accumulate=accumulator, max_norm=0.5))
    assert [step.micro_steps for step in made] == [4, 1]
    for half in (slice(0, 32), slice(32, 64)):
        plain.zero_grad()
        cross_entropy(plain(x[half]), y[half]).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        with torch.no_grad():
            for p in plain.parameters():
                if p.grad is not None:
                    p -= 0.1 * p.grad
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_nothing_to_train() -> None:
    with pytest.raises(ValueError, match="none that requires a gradient"):
        FlatAccumulator(nn.Linear(2, 2).requires_grad_(False).parameters())
