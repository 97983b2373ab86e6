"""Norm, clip and step have the bits of torch's and accelerate's own."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from bareloop.trainer.gradients import (
    clips_unexpectedly,
    norm_and_clip,
    one_kernel_takes_all,
    optimizer_step_of,
    total_norm,
    wraps_unexpectedly,
)


def parameters(dtype: torch.dtype = torch.float32, scale: float = 1.0) -> list[nn.Parameter]:
    """Parameters of odd sizes with gradients."""
    draw = torch.Generator().manual_seed(1)
    made = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in ((7, 5), (3,), (1, 2, 33))]
    for parameter in made:
        parameter.grad = (scale * torch.randn(parameter.shape, generator=draw)).to(dtype)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("max_norm", [0.01, 1.0, 1e9])
@pytest.mark.parametrize("scale", [1.0, float("inf"), float("nan")])
def test_clips_as_torch(dtype: torch.dtype, max_norm: float, scale: float) -> None:
    expected, ours = parameters(dtype, scale), parameters(dtype, scale)
    norm = nn.utils.clip_grad_norm_(expected, max_norm)
    gradients = [parameter.grad for parameter in ours]
    assert torch.equal(total_norm(gradients).nan_to_num(-1), norm.nan_to_num(-1))
    assert torch.equal(norm_and_clip(ours, gradients, max_norm).nan_to_num(-1), norm.nan_to_num(-1))
    for one, other in zip(expected, ours, strict=True):
        assert torch.equal(one.grad.nan_to_num(-1), other.grad.nan_to_num(-1))


def test_one_kernel_takes_plain_parameters_of_one_type() -> None:
    plain = parameters()
    assert one_kernel_takes_all(plain) is None
    frozen = nn.Parameter(torch.zeros(3, dtype=torch.float64), requires_grad=False)
    assert one_kernel_takes_all([*plain, frozen]) is None
    frozen.requires_grad_(True)
    assert one_kernel_takes_all([*plain, frozen]) == "parameters are of 2 types or devices"
    assert "no fused kernel" in str(one_kernel_takes_all([nn.Parameter(torch.zeros(3, device="meta"))]))

    class Own(nn.Parameter):
        pass

    assert one_kernel_takes_all([Own(torch.zeros(2))]) == "parameters are Own"


def test_an_accelerator_with_another_clip_is_noticed() -> None:
    accelerator = Accelerator(cpu=True)
    assert clips_unexpectedly(accelerator) is None
    accelerator.clip_grad_norm_ = lambda *args, **kwargs: None
    assert clips_unexpectedly(accelerator) == "accelerator.clip_grad_norm_ was replaced on the object"


def prepared(wrap: Callable[[Any], None] = lambda optimizer: None) -> tuple[Any, list[nn.Parameter]]:
    made = parameters()
    optimizer = Accelerator(cpu=True).prepare_optimizer(torch.optim.AdamW(made, lr=0.1))
    wrap(optimizer)
    return optimizer, made


def schedule(optimizer: Any) -> None:
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


@pytest.mark.parametrize("wrap", [lambda optimizer: None, schedule])
def test_steps_as_accelerates_wrapper(wrap: Callable[[Any], None]) -> None:
    (expected, theirs), (optimizer, ours) = prepared(wrap), prepared(wrap)
    assert wraps_unexpectedly(optimizer) is None
    expected.step()
    optimizer_step_of(SimpleNamespace(optimizer=optimizer), by_stock=False)()
    assert all(torch.equal(one, other) for one, other in zip(theirs, ours, strict=True))
    assert getattr(optimizer, "_opt_called", None) == getattr(expected, "_opt_called", None)


def test_a_step_that_was_replaced_is_called() -> None:
    optimizer, _ = prepared()
    steps = []
    optimizer.step = lambda closure=None: steps.append(closure)
    assert wraps_unexpectedly(optimizer) == "optimizer.step was replaced on the object"
    optimizer_step_of(SimpleNamespace(optimizer=optimizer), by_stock=False)()
    assert steps == [None]
    assert wraps_unexpectedly(torch.optim.SGD(parameters())) == "the optimizer is a SGD, not accelerate's wrapper"
