"""Same batches in the same order, errors in their place, and no thread left behind."""

import threading
from collections.abc import Iterator

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bareloop.data.prefetch import prefetch


def threads() -> list[threading.Thread]:
    """The threads that prefetch."""
    return [thread for thread in threading.enumerate() if thread.name == "bareloop-prefetch"]


@pytest.mark.parametrize("depth", [1, 2, 100])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_all_batches_come_in_order(depth: int, count: int) -> None:
    assert list(prefetch(range(count), depth=depth)) == list(range(count))
    assert threads() == []


def test_depth_batches_are_made_ahead_and_no_more() -> None:
    made: list[int] = []
    reached = threading.Condition()

    def source() -> Iterator[int]:
        for number in range(20):
            with reached:
                made.append(number)
                reached.notify_all()
            yield number

    def wait_for(count: int) -> None:
        with reached:
            assert reached.wait_for(lambda: len(made) >= count, timeout=20)

    batches = prefetch(source(), depth=3)
    assert made == [], "nothing is read before the first batch is asked for"
    for number in range(5):
        assert next(batches) == number
        wait_for(number + 4)
        # Whether the thread goes too far is only seen after some time in which it could.
        threading.Event().wait(0.02)
        assert len(made) == number + 4
    batches.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert threads() == []


def test_an_error_is_raised_where_its_batch_would_have_come() -> None:
    def source() -> Iterator[int]:
        yield from range(3)
        raise OSError("disk gone")

    seen: list[int] = []
    with pytest.raises(OSError, match="disk gone") as caught:
        for number in prefetch(source(), depth=2):
            seen.append(number)
    assert seen == [0, 1, 2]
    assert "source" in [entry.name for entry in caught.traceback]
    assert threads() == []


@pytest.mark.parametrize("depth", [1, 4])
def test_a_break_ends_the_thread_and_closes_the_source(depth: int) -> None:
    closed = threading.Event()

    def source() -> Iterator[int]:
        try:
            yield from range(10_000)
        finally:
            closed.set()

    for number in prefetch(source(), depth=depth):
        if number == 3:
            break
    assert threads() == []
    assert closed.wait(20)


def test_an_error_of_the_loop_ends_the_thread() -> None:
    def loop() -> None:
        for number in prefetch(range(1000)):
            if number == 2:
                raise KeyError("the loop's own")

    with pytest.raises(KeyError, match="the loop's own"):
        loop()
    assert threads() == []


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shuffled_run_with_dropout_is_the_same_to_the_bit(workers: int) -> None:
    rows = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(1)))

    def run(ahead: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(2):
            loader = DataLoader(rows, batch_size=5, shuffle=True, num_workers=workers)
            for (batch,) in prefetch(loader) if ahead else loader:
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        return losses

    assert run(ahead=True) == run(ahead=False)


def test_a_loader_that_accelerate_prepared_and_a_depth_of_zero_are_refused_at_once() -> None:
    loader = Accelerator(cpu=True).prepare(DataLoader(TensorDataset(torch.zeros(4, 1))))
    with pytest.raises(ValueError, match="DataLoaderShard prepared by accelerate"):
        prefetch(loader)
    with pytest.raises(ValueError, match="depth=0"):
        prefetch([1], depth=0)
