"""What `steps` decides before it starts: each piece by itself."""

import math
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from bareloop.trainer.step import (
    clipping,
    compute_device,
    forwarding,
    gradient_scaler,
    moved,
    multiply,
    trained,
    updating,
)

META, CPU = torch.device("meta"), torch.device("cpu")


# Device


def test_batches_go_to_the_one_accelerator_and_nowhere_else() -> None:
    assert compute_device(nn.Linear(2, 2)) == (CPU, False)
    assert compute_device(nn.Linear(2, 2, device="meta")) == (META, True)
    spread = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Linear(2, 2))
    assert compute_device(spread) == (META, False)
    with pytest.raises(ValueError, match="no parameters"):
        compute_device(nn.ReLU())


def test_moves_tensors_in_what_batches_are_made_of() -> None:
    class Encoding:
        def to(self, device: torch.device) -> str:
            return f"on {device}"

    Pair = namedtuple("Pair", "first second")
    one = torch.ones(2)
    batch = {"list": [one, "text"], "tuple": (one, 3), "named": Pair(one, None), "own": Encoding()}
    placed = moved(batch, META)
    assert [placed["list"][0].device, placed["tuple"][0].device, placed["named"].first.device] == [META] * 3
    assert (placed["list"][1], placed["tuple"][1], placed["named"].second) == ("text", 3, None)
    assert isinstance(placed["named"], Pair)
    assert placed["own"] == "on meta"
    assert one.device == CPU


def test_a_batch_that_needs_no_move_is_passed_as_it_is() -> None:
    batch = object()
    model = nn.Linear(1, 1)
    assert forwarding(lambda model, batch: batch, model, None, CPU, False)(batch) is batch
    assert forwarding(lambda model, batch: batch, model, "bf16", CPU, False)(batch) is batch
    assert forwarding(lambda model, batch: batch.device, model, None, META, True)(torch.ones(1)) == META
    assert forwarding(lambda model, batch: batch.device, model, "bf16", CPU, True)(torch.ones(1)) == CPU


# Precision


@pytest.mark.parametrize(("precision", "expected"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_autocast_is_on_inside_the_loss_function_alone(precision: str, expected: torch.dtype) -> None:
    model = nn.Linear(2, 2)
    forward = forwarding(lambda model, batch: model(batch).dtype, model, precision, CPU, False)
    assert [forward(torch.ones(1, 2)), forward(torch.ones(1, 2))] == [expected] * 2
    assert not torch.is_autocast_enabled("cpu")


def test_autocast_ends_where_the_loss_function_fails() -> None:
    forward = forwarding(lambda model, batch: 1 / 0, nn.Linear(2, 2), "bf16", CPU, False)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            forward(None)
        assert not torch.is_autocast_enabled("cpu")


def test_refuses_a_precision_that_it_does_not_have() -> None:
    with pytest.raises(ValueError, match="precision='fp8': must be 'fp16', 'bf16' or None"):
        forwarding(lambda model, batch: None, nn.Linear(1, 1), "fp8", CPU, False)
    with pytest.raises(ValueError, match="precision='bf16': torch has no such autocast on meta"):
        forwarding(lambda model, batch: None, nn.Linear(1, 1), "bf16", META, False)


def test_a_scaler_goes_with_fp16_alone() -> None:
    own = GradScaler("cpu")
    assert gradient_scaler("fp16", own, CPU) is own
    assert isinstance(gradient_scaler("fp16", None, CPU), GradScaler)
    assert gradient_scaler("bf16", None, CPU) is None
    with pytest.raises(ValueError, match="precision='bf16': only"):
        gradient_scaler("bf16", own, CPU)
    with pytest.raises(ValueError, match="not enabled"):
        gradient_scaler("fp16", GradScaler("cpu", enabled=False), CPU)


# Parameters, factor, clipping


def test_the_optimizer_says_what_is_trained_in_the_order_of_the_model() -> None:
    model, beside = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Parameter(torch.ones(1))
    last, first = list(model[1].parameters()), list(model[0].parameters())
    optimizer = torch.optim.SGD([{"params": [beside, *last]}], lr=0.1)
    parameters = trained(model, optimizer)
    assert list(map(id, parameters())) == list(map(id, [*last, beside]))
    optimizer.add_param_group({"params": first})
    assert list(map(id, parameters())) == list(map(id, [*first, *last, beside]))


def test_refuses_an_optimizer_of_another_model() -> None:
    with pytest.raises(ValueError, match="none of model's parameters"):
        trained(nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))


@pytest.mark.parametrize("factor", [0.5, torch.tensor(0.5)])
def test_multiplies_what_gradients_there_are(factor: Any) -> None:
    parameters = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float64)]
    for parameter in parameters[:2]:
        parameter.grad = torch.full_like(parameter, 3.0)
    multiply(parameters, factor)
    assert [parameter.grad.tolist() for parameter in parameters[:2]] == [[1.5] * 3] * 2
    assert parameters[2].grad is None
    multiply(parameters[2:], factor)


@pytest.mark.parametrize("max_norm", [0, -1.0, math.nan])
def test_refuses_to_clip_to_nothing(max_norm: float) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"must be above 0; None does not clip, math\.inf only measures"):
        clipping(max_norm, lambda: list(model.parameters()), None, torch.optim.SGD(model.parameters()))


# Update


def test_refuses_what_it_cannot_step() -> None:
    parameters = [nn.Parameter(torch.ones(1))]
    with pytest.raises(ValueError, match="LBFGS"):
        updating(torch.optim.LBFGS(parameters), None, None)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    with pytest.raises(ValueError, match="ReduceLROnPlateau"):
        updating(optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), None)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaled_update_leaves_no_hook_behind(fused: bool) -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5, fused=fused)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    scaler = GradScaler("cpu", init_scale=4.0)
    update = updating(optimizer, scheduler, scaler)
    epochs = []
    for gradient in (math.inf, 4.0, math.nan, 4.0):
        scaler.scale(torch.ones(1))  # what makes the scaler its scale
        parameter.grad = torch.tensor([gradient])
        overflow = update()
        assert bool(overflow) == (gradient != 4.0)
        epochs.append(scheduler.last_epoch)
    assert epochs == [0, 1, 1, 2]
    assert not optimizer._optimizer_step_post_hooks
