"""`steps` against the loop by hand, run in the same test, and against the gradient of the whole batch."""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import token_model as toy
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils._python_dispatch import TorchDispatchMode

from bareloop.trainer.loop import steps

WHOLE = [32]


@pytest.mark.parametrize(
    "options", [{}, {"max_norm": 0.5}, {"precision": "bf16"}, {"precision": "bf16", "max_norm": 0.1}]
)
@pytest.mark.parametrize("accumulate", [1, 3, 4])
def test_equals_the_loop_by_hand_to_the_bit(accumulate: int, options: dict[str, Any]) -> None:
    """Windows are whole, but for the last one of accumulate=4, which has two. Dropout draws the same numbers."""
    runs = []
    for run in (toy.by_hand, ours):
        model = toy.model(dropout=0.2)
        optimizer = toy.adamw(model)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5)
        torch.manual_seed(7)
        record = run(
            model,
            optimizer,
            toy.batches([4] * (9 if accumulate == 3 else 10)),
            toy.mean_loss,
            accumulate=accumulate,
            scheduler=scheduler,
            **options,
        )
        runs.append((record, [*toy.state(model, optimizer), torch.tensor(scheduler.get_last_lr())]))
    equal(runs)


@pytest.mark.parametrize("optimizer_class", [{"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize(("accumulate", "max_norm"), [(1, None), (4, 0.5)])
def test_fp16_equals_the_loop_by_hand_to_the_bit(
    accumulate: int, max_norm: float | None, optimizer_class: dict[str, bool]
) -> None:
    """The second step's gradient overflows: no update, no step of the scheduler, half the scale."""
    runs = []
    for run in (toy.by_hand, ours):
        model = toy.model(dropout=0.2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **optimizer_class)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5)
        scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=5)
        batches = [
            (batch, 1.0 if index // accumulate != 1 else math.inf) for index, batch in enumerate(toy.batches([4] * 16))
        ]
        torch.manual_seed(7)
        record = run(
            model,
            optimizer,
            batches,
            lambda model, pair: toy.mean_loss(model, pair[0]) * pair[1],
            accumulate=accumulate,
            max_norm=max_norm,
            scheduler=scheduler,
            precision="fp16",
            scaler=scaler,
        )
        assert scheduler.last_epoch == 16 // accumulate - 1
        runs.append((record, [*toy.state(model, optimizer), torch.tensor(scaler.get_scale())]))
    equal(runs)


def ours(
    model: nn.Module, optimizer: Any, batches: list[Any], loss_fn: Callable[..., Any], **options: Any
) -> toy.Record:
    record = toy.Record()
    for step in steps(model, optimizer, batches, loss_fn, **options):
        record.losses.append(step.loss)
        if step.gradient_norm is not None:
            record.norms.append(step.gradient_norm)
    return record


def equal(runs: list[tuple[toy.Record, list[Tensor]]]) -> None:
    (by_hand, their_state), (of_steps, our_state) = runs
    assert len(by_hand.losses) == len(of_steps.losses) > 2
    torch.testing.assert_close(of_steps.losses, by_hand.losses, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(of_steps.norms, by_hand.norms, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(our_state, their_state, rtol=0, atol=0)


class Operators(TorchDispatchMode):
    """Counts what is dispatched to a device, reads of it by the host (`_local_scalar_dense`) included."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operators(run: Callable[..., Any], loss_fn: Callable[..., Any], **options: Any) -> Counter[str]:
    """What a run over 8 micro-batches dispatches, once the optimizer has its state."""
    model = toy.model()
    optimizer = toy.adamw(model)
    run(model, optimizer, toy.batches([4] * 8), loss_fn, **options)
    with Operators() as counting:
        run(model, optimizer, toy.batches([4] * 8), loss_fn, **options)
    return counting.counts


def python_calls(run: Callable[..., Any], loss_fn: Callable[..., Any], **options: Any) -> float:
    """Calls of Python functions per micro-batch: of 24 against 8, which leaves out what is called once."""
    model = toy.model()
    optimizer = toy.adamw(model)
    calls: list[int] = []

    def count(frame: Any, event: str, argument: Any) -> None:
        calls[-1] += event == "call"

    for micro_batches in (8, 8, 24):
        calls.append(0)
        sys.setprofile(count)
        try:
            run(model, optimizer, toy.batches([4] * micro_batches), loss_fn, **options)
        finally:
            sys.setprofile(None)
    return (calls[2] - calls[1]) / 16


def drained(*arguments: Any, **options: Any) -> None:
    for _ in steps(*arguments, **options):
        pass


def bare(
    model: nn.Module, optimizer: Any, batches: Any, loss_fn: Any, accumulate: int = 1, max_norm: Any = None
) -> None:
    """The loop by hand with nothing in it but the work; it keeps the last loss, as a loop does that shows it at times."""
    model.train()
    optimizer.zero_grad()
    kept: list[Tensor] = []
    for index, batch in enumerate(batches, start=1):
        result = loss_fn(model, batch)
        loss = result[0] / result[1].clamp(min=1) if isinstance(result, tuple) else result
        (loss / accumulate if accumulate > 1 else loss).backward()
        kept.append(result[0].detach() if isinstance(result, tuple) else loss.detach())
        if index % accumulate == 0:
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("loss_fn", "options"),
    [
        (toy.mean_loss, {}),
        (toy.mean_loss, {"max_norm": 1.0}),
        (toy.mean_loss, {"accumulate": 4}),
        (toy.mean_loss, {"accumulate": 4, "max_norm": 1.0}),
        (toy.summed_loss, {}),
        (toy.summed_loss, {"max_norm": 1.0}),
    ],
)
def test_no_operator_and_no_read_more_than_by_hand(loss_fn: Callable[..., Any], options: dict[str, Any]) -> None:
    assert operators(drained, loss_fn, **options) == operators(bare, loss_fn, **options)
    assert python_calls(drained, loss_fn, **options) - python_calls(bare, loss_fn, **options) <= 20


def test_a_window_of_counted_losses_adds_one_multiplication_of_the_gradients() -> None:
    """Besides, per window: the counts' sum, and 0-d arithmetic for the factor."""
    windows = 2
    by_hand = operators(bare, toy.mean_loss, accumulate=4)
    counted = operators(drained, toy.summed_loss, accumulate=4)
    assert counted["aten._foreach_mul_.Tensor"] - by_hand["aten._foreach_mul_.Tensor"] == windows
    assert counted["aten._local_scalar_dense.default"] == by_hand["aten._local_scalar_dense.default"]
    numbers = operators(drained, toy.counted_on_the_host, accumulate=4)
    assert 0 < numbers["aten._foreach_mul_.Scalar"] - by_hand["aten._foreach_mul_.Scalar"] <= windows


def test_equal_counts_that_are_numbers_add_nothing() -> None:
    def by_rows(model: nn.Module, batch: toy.Batch) -> tuple[Tensor, int]:
        return toy.summed_loss(model, batch)[0], len(batch[0])

    of_steps = operators(drained, by_rows, accumulate=4)
    assert of_steps == operators(bare, lambda model, batch: by_rows(model, batch)[0], accumulate=4)


def test_losses_are_not_read_before_they_are_asked_for() -> None:
    model = toy.model()
    with Operators() as counting:
        for _ in steps(model, toy.sgd(model), toy.batches([4] * 4), toy.summed_loss, accumulate=2, max_norm=1.0):
            pass
    assert counting.counts["aten._local_scalar_dense.default"] == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("loss_fn", [toy.mean_loss, toy.summed_loss])
def test_nothing_waits_for_the_device(loss_fn: Callable[..., Any]) -> None:
    model = toy.model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batches = [tuple(tensor.pin_memory() for tensor in batch) for batch in toy.batches([4] * 8)]
    options: dict[str, Any] = {"accumulate": 2, "max_norm": 1.0, "precision": "bf16"}
    drained(model, optimizer, batches, loss_fn, **options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        drained(model, optimizer, batches, loss_fn, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_last_window_may_be_short() -> None:
    model = toy.model()
    made = list(steps(model, toy.sgd(model), toy.batches([4] * 7), toy.mean_loss, accumulate=3))
    assert [(step.index, step.micro_steps) for step in made] == [(0, 3), (1, 3), (2, 1)]


def test_a_loader_shorter_than_the_window_makes_one_step() -> None:
    model = toy.model()
    optimizer = toy.sgd(model)
    seen = toy.gradients_at_steps(optimizer)
    (step,) = steps(model, optimizer, toy.batches([16, 16]), toy.summed_loss, accumulate=100)
    assert step.micro_steps == 2
    assert toy.distance(seen[0], toy.gradients_of_the_whole()) < 1e-6


def test_batches_are_taken_one_at_a_time() -> None:
    """None is held back or fetched ahead, so that an augmentation draws its numbers when it would in a loop by hand."""
    taken = 0

    def loader() -> Iterator[toy.Batch]:
        nonlocal taken
        for batch in toy.batches([4] * 6):
            taken += 1
            yield batch

    model = toy.model()
    for step in steps(model, toy.sgd(model), loader(), toy.mean_loss, accumulate=2):
        assert taken == 2 * (step.index + 1)


def test_leaving_the_loop_leaves_everything_usable() -> None:
    """A break after two steps and another call equal one call, to the bit."""
    runs = []
    for parts in ([(0, 4), (4, 10)], [(0, 10)]):
        model = toy.model()
        optimizer = toy.adamw(model)
        batches = toy.batches([4] * 10)
        for start, stop in parts:
            left = steps(model, optimizer, iter(batches[start:]), toy.mean_loss, accumulate=2)
            for _ in islice(left, (stop - start) // 2):
                assert all(parameter.grad is None for parameter in model.parameters())
        runs.append(toy.state(model, optimizer))
    torch.testing.assert_close(runs[0], runs[1], rtol=0, atol=0)


def test_an_exception_in_mid_window_drops_the_window() -> None:
    def failing(model: nn.Module, batch: toy.Batch | None) -> Tensor:
        if batch is None:
            raise KeyboardInterrupt
        return toy.mean_loss(model, batch)

    model = toy.model()
    optimizer = toy.sgd(model)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(KeyboardInterrupt):
        list(steps(model, optimizer, [*toy.batches([4]), None], failing, accumulate=3))
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.testing.assert_close(list(model.parameters()), before, rtol=0, atol=0)
    seen = toy.gradients_at_steps(optimizer)
    list(steps(model, optimizer, toy.batches(WHOLE), toy.summed_loss))
    assert toy.distance(seen[0], toy.gradients_of_the_whole()) == 0


def test_the_model_trains_and_old_gradients_are_gone() -> None:
    model = toy.model(dropout=0.5).eval()
    optimizer = toy.sgd(model)
    toy.mean_loss(model, toy.batches([4])[0]).backward()
    seen = toy.gradients_at_steps(optimizer)
    torch.manual_seed(3)
    list(steps(model, optimizer, toy.batches([8]), toy.mean_loss))
    assert model.training
    other = toy.model(dropout=0.5)
    torch.manual_seed(3)
    toy.mean_loss(other, toy.batches([8])[0]).backward()
    assert toy.distance(seen[0], [parameter.grad for parameter in other.parameters()]) == 0


def test_an_infinite_max_norm_only_measures() -> None:
    model = toy.model()
    optimizer = toy.sgd(model)
    seen = toy.gradients_at_steps(optimizer)
    (step,) = steps(model, optimizer, toy.batches(WHOLE), toy.summed_loss, max_norm=math.inf)
    assert toy.distance(seen[0], toy.gradients_of_the_whole()) == 0
    expected = nn.utils.get_total_norm(seen[0])
    assert torch.equal(step.gradient_norm, expected)
