"""`steps` with an accumulator that decides when to step, and the errors of bad input."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import token_model as toy
import torch
from torch import Tensor

from bareloop.trainer.loop import Accumulator, Step, steps

WHOLE = [32]


def test_an_accumulator_decides_when_to_step() -> None:
    model = toy.model()
    optimizer = toy.sgd(model)
    seen = toy.gradients_at_steps(optimizer)
    rounds = toy.Rounds(model, target=int(toy.summed_loss(model, toy.batches(WHOLE)[0])[1]))
    assert isinstance(rounds, Accumulator)
    batches = toy.batches([4, 8, 8, 12])
    made = list(steps(model, optimizer, [*batches, batches[0]], toy.summed_loss, accumulate=rounds, max_norm=math.inf))
    assert [step.micro_steps for step in made] == [4]
    assert toy.distance(seen[0], toy.gradients_of_the_whole()) < 1e-6
    assert rounds.items > 0, "the fifth micro-batch waits for the next call"
    (step,) = steps(model, optimizer, batches[1:], toy.summed_loss, accumulate=rounds)
    assert step.micro_steps == 3, "of this call"
    assert rounds.items == 0


def test_a_round_whose_average_fails_goes_on() -> None:
    model = toy.model()
    optimizer = toy.sgd(model)
    seen = toy.gradients_at_steps(optimizer)
    rounds = toy.Rounds(model, target=1, failures=3)
    (step,) = steps(model, optimizer, toy.batches([4, 8, 8, 12]), toy.summed_loss, accumulate=rounds)
    assert (step.index, step.micro_steps) == (0, 4)
    assert toy.distance(seen[0], toy.gradients_of_the_whole()) < 1e-6


def test_an_accumulator_of_plain_means_weighs_each_micro_batch_alike() -> None:
    model, other = toy.model(), toy.model()
    first, second = toy.sgd(model), toy.sgd(other)
    seen, expected = toy.gradients_at_steps(first), toy.gradients_at_steps(second)
    list(steps(model, first, toy.batches([4, 8]), toy.mean_loss, accumulate=toy.Rounds(model, target=2)))
    list(steps(other, second, toy.batches([4, 8]), toy.mean_loss, accumulate=2))
    assert toy.distance(seen[0], expected[0]) < 1e-6


# Bad input


def refused(match: str, **changes: Any) -> None:
    model = toy.model()
    arguments: dict[str, Any] = {
        "model": model,
        "optimizer": toy.sgd(model),
        "batches": toy.batches([4, 4]),
        "loss_fn": toy.summed_loss,
        **changes,
    }
    with pytest.raises(ValueError, match=match):
        list(steps(**arguments))


@pytest.mark.parametrize("accumulate", [0, -1, True, 2.0, None])
def test_refuses_an_accumulate_that_is_no_number_of_micro_batches(accumulate: Any) -> None:
    refused(f"accumulate={accumulate}", accumulate=accumulate)


def test_refuses_scaled_gradients_in_an_accumulator() -> None:
    refused("bf16", accumulate=toy.Rounds(toy.model(), target=1), precision="fp16")


def test_refuses_arguments_at_once_and_not_at_the_first_step() -> None:
    model = toy.model()
    with pytest.raises(ValueError, match="max_norm=0"):
        steps(model, toy.sgd(model), toy.batches([4]), toy.mean_loss, max_norm=0)


def test_names_a_loader_that_is_empty_and_a_generator_that_is_used_up() -> None:
    refused("batches has no batch", batches=[])
    generator = iter(toy.batches([4]))
    list(generator)
    refused("can be gone through once", batches=generator, accumulate=2)


def test_a_step_is_frozen() -> None:
    model = toy.model()
    (step,) = steps(model, toy.sgd(model), toy.batches([4]), toy.mean_loss)
    assert isinstance(step, Step)
    assert step.count is None
    with pytest.raises(AttributeError):
        step.index = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("returned", "match"),
    [
        (lambda loss: loss.item(), "returned 2[.]"),
        (lambda loss: None, "returned None"),
        (lambda loss: loss.expand(3), r"tensor of shape \[3\]"),
        (lambda loss: (loss, None), r"tensor of shape \[\], None"),
        (lambda loss: (loss, 3, 4), "3, 4"),
        (lambda loss: (loss, torch.ones(2)), r"\[2\]"),
        (lambda loss: {"loss": loss}, "a dict"),
        (lambda loss: loss.detach(), "no gradient"),
        (lambda loss: (loss.detach(), 3), "no gradient"),
    ],
)
def test_names_what_loss_fn_returned(returned: Callable[[Tensor], Any], match: str) -> None:
    refused(match, loss_fn=lambda model, batch: returned(toy.mean_loss(model, batch)))


def test_names_a_mixture_of_both_forms() -> None:
    forms = iter([toy.mean_loss, toy.summed_loss])
    refused("1 of the 2 micro-batches", loss_fn=lambda model, batch: next(forms)(model, batch), accumulate=2)
