"""`RunningLoss` has the bits of the sum that the stock loop keeps with an op and two reads for every micro-step."""

import math
import random

import pytest
import torch

from bareloop.trainer import running_loss
from bareloop.trainer.running_loss import RunningLoss


def as_stock(losses: list[torch.Tensor], since_log: list[int], *, filters: bool) -> torch.Tensor:
    """What the stock loop's lines give."""
    total = torch.tensor(0.0)
    for loss, steps in zip(losses, since_log, strict=True):
        if filters and (torch.isnan(loss) or torch.isinf(loss)):
            total += total / steps
        else:
            total += loss
    return total


def some_losses(dtype: torch.dtype) -> tuple[list[torch.Tensor], list[int]]:
    draw = random.Random(7)
    losses = [torch.tensor(draw.uniform(0.1, 9.0), dtype=dtype) for _ in range(200)]
    for bad in (3, 50, 51):
        losses[bad] = torch.tensor(math.nan, dtype=dtype)
    losses[120] = torch.tensor(math.inf, dtype=dtype)
    return losses, [1 + index // 4 for index in range(200)]


@pytest.mark.parametrize("filters", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("where", ["host", "device"])
def test_same_bits_as_the_stock_lines(
    dtype: torch.dtype, filters: bool, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, since_log = some_losses(dtype)
    if not filters:
        losses, since_log = losses[:50], since_log[:50]
        losses[3] = torch.tensor(2.5, dtype=dtype)
    running = RunningLoss(torch.tensor(0.0))
    if where == "device":
        monkeypatch.setattr(RunningLoss, "_fold_on_host", RunningLoss._fold_on_device)
    for loss, steps in zip(losses, since_log, strict=True):
        running.keep(loss, steps if filters else 0)
    assert running.fold().item().hex() == as_stock(losses, since_log, filters=filters).item().hex()
    assert running.dropped() == (4 if filters else 0)


def test_nothing_is_read_until_somebody_asks() -> None:
    running = RunningLoss(torch.tensor(0.0))
    running.keep(torch.tensor(2.0), 1)
    assert running.total.item() == 0.0
    assert running.fold().item() == 2.0
    assert running.total is running.fold()


def test_a_run_that_never_logs_does_not_keep_every_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_loss, "_KEPT_AT_MOST", 10)
    running = RunningLoss(torch.tensor(0.0))
    for _ in range(25):
        running.keep(torch.tensor(1.0), 1)
    assert running.total.item() == 20.0
    assert running.fold().item() == 25.0


def test_losses_of_several_types_are_added() -> None:
    running = RunningLoss(torch.tensor(0.0))
    losses = [torch.tensor(1.5), torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.3, dtype=torch.bfloat16)]
    for loss in losses:
        running.keep(loss, 1)
    assert torch.equal(running.fold(), as_stock(losses, [1, 1, 1], filters=True))


def test_a_loss_with_a_dimension_is_refused_at_once() -> None:
    running = RunningLoss(torch.tensor(0.0))
    with pytest.raises(RuntimeError, match="broadcast"):
        running.keep(torch.tensor([1.0]), 1)


def test_a_loss_on_another_device_is_refused() -> None:
    running = RunningLoss(torch.tensor(0.0))
    with pytest.raises(ValueError, match=r"on meta .* on cpu"):
        running.keep(torch.empty((), device="meta"), 1)
