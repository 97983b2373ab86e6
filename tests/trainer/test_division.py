"""Losses with counts: any split of a batch has the gradient of the whole, whatever the count is made of."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import token_model as toy
import torch
from torch import Tensor, nn

from bareloop.trainer.division import over_window, per_micro_batch
from bareloop.trainer.loop import steps
from bareloop.trainer.ranks import Reduction

CPU = torch.device("cpu")
WHOLE = [32]
SPLITS = [[32], [8, 8, 8, 8], [1] * 32, [4, 8, 8, 12], [3, 29]]


@pytest.mark.parametrize("loss_fn", [toy.summed_loss, toy.counted_on_the_host])
@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_any_split_gives_the_gradient_of_the_whole(sizes: list[int], loss_fn: Callable[..., Any]) -> None:
    model = toy.model()
    optimizer = toy.sgd(model)
    seen = toy.gradients_at_steps(optimizer)
    (step,) = steps(model, optimizer, toy.batches(sizes), loss_fn, accumulate=len(sizes))
    assert step.micro_steps == len(sizes)
    assert toy.distance(seen[0], toy.gradients_of_the_whole()) < 1e-6
    loss, count = toy.summed_loss(toy.model(), toy.batches(WHOLE)[0])
    assert int(step.count) == int(count) > 0
    torch.testing.assert_close(step.loss, (loss / count).detach(), rtol=1e-6, atol=0)


def test_mean_losses_of_uneven_micro_batches_do_not() -> None:
    """The reason for (loss_sum, count): what loops do with masked labels is off by far more than rounding."""
    model = toy.model()
    optimizer = toy.sgd(model)
    seen = toy.gradients_at_steps(optimizer)
    list(steps(model, optimizer, toy.batches([4, 8, 8, 12]), toy.mean_loss, accumulate=4))
    assert toy.distance(seen[0], toy.gradients_of_the_whole()) > 1e-2


def test_where_no_label_counts_the_gradient_is_zero() -> None:
    tokens, labels = toy.batches([8])[0]
    masked = (tokens, torch.full_like(labels, toy.IGNORED))
    for accumulate in (1, 2):
        for loss_fn in (toy.summed_loss, toy.counted_on_the_host):
            model = toy.model()
            optimizer = toy.sgd(model)
            seen = toy.gradients_at_steps(optimizer)
            (step,) = steps(model, optimizer, [masked] * accumulate, loss_fn, accumulate=accumulate)
            assert float(step.loss) == 0
            assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in seen[0])


def test_a_masked_first_micro_batch_weighs_nothing() -> None:
    tokens, labels = toy.batches(WHOLE)[0]
    masked = (tokens, torch.full_like(labels, toy.IGNORED))
    for loss_fn in (toy.summed_loss, toy.counted_on_the_host):
        model = toy.model()
        optimizer = toy.sgd(model)
        seen = toy.gradients_at_steps(optimizer)
        list(steps(model, optimizer, [masked, (tokens, labels)], loss_fn, accumulate=2))
        assert toy.distance(seen[0], toy.gradients_of_the_whole()) < 1e-6


def test_counts_may_be_weights_below_one() -> None:
    def weighted(model: nn.Module, batch: toy.Batch) -> tuple[Tensor, Tensor]:
        loss, count = toy.summed_loss(model, batch)
        return loss * 1e-3, count * 1e-3

    for sizes in ([32], [4, 28]):
        model = toy.model()
        optimizer = toy.sgd(model)
        seen = toy.gradients_at_steps(optimizer)
        list(steps(model, optimizer, toy.batches(sizes), weighted, accumulate=len(sizes)))
        assert toy.distance(seen[0], toy.gradients_of_the_whole()) < 1e-6


def test_a_counted_loss_of_one_micro_batch_equals_the_division_by_hand_to_the_bit() -> None:
    by_hand, of_steps = toy.model(), toy.model()
    optimizer = toy.adamw(by_hand)
    for batch in toy.batches([4] * 3):
        loss, count = toy.summed_loss(by_hand, batch)
        (loss / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    list(steps(of_steps, toy.adamw(of_steps), toy.batches([4] * 3), toy.summed_loss))
    for left, right in zip(of_steps.parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(left, right)


def test_the_stand_in_for_a_count_is_a_power_of_two_and_stays() -> None:
    """Then it changes no bit of the result, whichever it is: after a break in mid-epoch it may be another."""
    division = over_window(2, Reduction(), CPU)
    units = []
    for counts in ([100, 3], [7, 1000]):
        unit = None
        for count in counts:
            loss = torch.ones((), requires_grad=True) * 1.0
            _, weighed, _, unit = division.weigh((loss, torch.tensor(count)), unit)
            units.append(float(unit))
            assert float(weighed.detach()) == 1 / 64
    assert units == [64.0] * 4


def test_a_first_count_of_zero_stands_for_one() -> None:
    for zero in (torch.tensor(0), torch.tensor(0.0)):
        _, weighed, _, unit = over_window(2, Reduction(), CPU).weigh((torch.ones((), requires_grad=True), zero), None)
        assert float(unit) == float(weighed.detach()) == 1


@pytest.mark.parametrize("count", [0, 0.0, torch.tensor(0), torch.tensor(0.0)])
def test_nothing_counted_is_divided_to_zero(count: Any) -> None:
    loss = torch.zeros((), requires_grad=True)
    _, weighed, _, _ = per_micro_batch(Reduction()).weigh((loss, count), None)
    weighed.backward()
    assert float(weighed.detach()) == 0
    assert math.isfinite(float(loss.grad)), "times a gradient of 0 it must be 0"
