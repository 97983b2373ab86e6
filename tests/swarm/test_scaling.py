"""Loss scaling over a round: peers see unscaled gradients, a round that overflows counts for nothing and lowers the scale."""

import copy
import logging

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from bareloop.swarm.accumulator import FlatAccumulator
from bareloop.swarm.scaling import all_finite


@pytest.fixture
def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(5, 3)


@pytest.fixture
def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(20, 5, generator=generator), torch.randn(20, 3, generator=generator)


def round_of(accumulator, model, scaler, factor: float = 1.0) -> None:
    x, y = batch()
    for xs, ys in zip(x.split((4, 16)), y.split((4, 16)), strict=True):
        with accumulator.micro_batch(len(xs)):
            scaler.scale(factor * mse_loss(model(xs), ys)).backward()


def reference(model: nn.Linear) -> Tensor:
    model = copy.deepcopy(model)
    x, y = batch()
    mse_loss(model(x), y).backward()
    assert model.weight.grad is not None
    return model.weight.grad


def test_the_mean_is_unscaled_and_the_scale_grows_after_good_rounds(model, scaler) -> None:
    accumulator = FlatAccumulator(model.parameters(), scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        expected = reference(model)
        round_of(accumulator, model, scaler)
        with accumulator.averaged() as mean:
            assert mean
            torch.testing.assert_close(model.weight.grad, expected)
            optimizer.step()
    assert scaler.get_scale() == 2048.0


def test_a_round_that_overflows_has_no_mean_and_lowers_the_scale(model, scaler) -> None:
    accumulator = FlatAccumulator(model.parameters(), scaler=scaler)
    round_of(accumulator, model, scaler, float("inf"))
    with accumulator.averaged() as mean:
        assert mean is False
        assert not model.weight.grad.any()
    assert (scaler.get_scale(), accumulator.samples) == (512.0, 0)
    round_of(accumulator, model, scaler)
    with accumulator.averaged() as mean:
        assert mean
        torch.testing.assert_close(model.weight.grad, reference(model))


def test_peers_see_the_unscaled_mean_and_nothing_of_one_that_overflowed(model, scaler, caplog) -> None:
    seen = []

    def average(buffers, samples) -> None:
        seen.append((samples, buffers[0][:15].clone()))
        buffers[0].fill_(7.0)  # the others' mean

    accumulator = FlatAccumulator(model.parameters(), average=average, scaler=scaler)
    for factor in (1.0, float("nan")):
        with caplog.at_level(logging.WARNING):
            round_of(accumulator, model, scaler, factor)
        with accumulator.averaged() as mean:
            assert mean
            assert model.weight.grad.eq(7).all()
    (good, gradient), (bad, nothing) = seen
    assert (good, bad) == (20, 0)
    torch.testing.assert_close(gradient.view(3, 5), reference(model))
    assert not nothing.any()
    assert "gradient of 20 samples is not finite" in caplog.text


def test_without_a_scaler_a_gradient_that_is_not_finite_does_not_reach_peers(model) -> None:
    seen = []
    accumulator = FlatAccumulator(model.parameters(), average=lambda buffers, samples: seen.append(samples))
    with accumulator.micro_batch(3):
        (model(batch()[0]).sum() * float("inf")).backward()
    with accumulator.averaged():
        pass
    assert seen == [0]


def test_a_failed_round_is_scaled_back_to_the_bit_and_goes_on(model, scaler) -> None:
    calls = []

    def average(buffers, samples) -> None:
        calls.append(samples)
        if len(calls) == 1:
            raise ConnectionError("no peers")

    accumulator = FlatAccumulator(model.parameters(), average=average, scaler=scaler)
    round_of(accumulator, model, scaler)
    before = accumulator.buffers[0].clone()
    with pytest.raises(ConnectionError), accumulator.averaged():
        pass
    torch.testing.assert_close(accumulator.buffers[0], before, rtol=1e-6, atol=0)
    with accumulator.averaged():
        torch.testing.assert_close(model.weight.grad, reference(model))
    assert calls == [20, 20]


def test_a_failed_round_of_a_gradient_that_is_not_finite_is_dropped(model, scaler) -> None:
    def average(buffers, samples) -> None:
        raise ConnectionError("no peers")

    accumulator = FlatAccumulator(model.parameters(), average=average, scaler=scaler)
    round_of(accumulator, model, scaler, float("inf"))
    with pytest.raises(ConnectionError), accumulator.averaged():
        pass
    assert (accumulator.samples, accumulator.buffers[0].any().item()) == (0, False)


def test_stepping_through_the_scaler_divides_twice_and_is_refused(model, scaler) -> None:
    accumulator = FlatAccumulator(model.parameters(), scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    round_of(accumulator, model, scaler)
    with pytest.raises(RuntimeError, match=r"Call optimizer\.step\(\) itself"), accumulator.averaged():
        scaler.step(optimizer)


def test_a_disabled_scaler_is_refused(model) -> None:
    with pytest.raises(ValueError, match="scaler is not enabled"):
        FlatAccumulator(model.parameters(), scaler=torch.amp.GradScaler("cpu", enabled=False))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_all_finite(value: float) -> None:
    good, bad = torch.ones(9), torch.ones(9)
    bad[4] = value
    assert all_finite([good])
    assert not all_finite([good, bad])
