"""OpsWindow against known numbers on toys, started and stopped in an optimizer hook as the agent does."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.flop_counter import FlopCounterMode

from bareloop.profiler.probes.calls import CallsWindow
from bareloop.profiler.probes.ops import OpsFacts, OpsWindow

STEPS = 2


def train(
    *windows: OpsWindow | CallsWindow, body: Callable[[torch.Tensor], None] = lambda loss: None, steps: int = 6
) -> torch.nn.Module:
    """Trains a toy; the windows, one after the other, take two steps each from the end of step 1 on."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    boundary = [0]

    def hook(*_: object) -> None:
        boundary[0] += 1
        index, remainder = divmod(boundary[0] - 1, STEPS)
        if remainder == 0 and 0 < index <= len(windows):
            windows[index - 1].stop()
        if remainder == 0 and index < len(windows):
            windows[index].start()

    handle = register_optimizer_step_post_hook(hook)
    try:
        for _ in range(steps):
            loss = model(torch.randn(3, 4)).square().mean()
            loss.backward()
            body(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
    finally:
        handle.remove()
    return model


def observe(body: Callable[[], object]) -> OpsFacts:
    window = OpsWindow(lambda: "forward")
    window.start()
    body()
    window.stop()
    return window.result(1)


def test_counts_each_operator_of_forward_and_backward_once() -> None:
    x, weight = torch.ones(2, 3), torch.ones(3, 4, requires_grad=True)
    facts = observe(lambda: (x @ weight).sum().backward())
    # forward: mm, sum; backward: ones_like, expand, t, mm and the gradient's detach
    assert facts.issued_per_step == 7
    assert facts.matmul_dtypes == {"float32": 2.0}
    assert observe(lambda: x.add(1).mul_(2)).issued_per_step == 2


def test_operators_belong_to_the_phase_at_their_time() -> None:
    here = ["forward"]
    window = OpsWindow(lambda: here[0])
    window.start()
    x = torch.ones(3) + 1
    here[0] = "clip"
    x.mul_(2).mul_(2)
    window.stop()
    assert window.result(1).issued_by_phase == {"forward": 2.0, "clip": 2.0}


def test_windows_leave_training_bit_equal() -> None:
    plain, watched = train(), train(OpsWindow(lambda: ""), CallsWindow(lambda: ""))
    for left, right in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(left, right)


def test_two_runs_count_the_same() -> None:
    facts = []
    for _ in range(2):
        window = OpsWindow(lambda: "p")
        train(window)
        facts.append(window.result(STEPS))
    assert facts[0] == facts[1]
    assert facts[0].issued_per_step > 50


def test_step_counters_of_the_optimizer_are_told_apart_from_reads_of_the_script() -> None:
    window = OpsWindow(lambda: "p")
    train(window, body=lambda loss: print(end=f"{loss.item():.0f}"[:0]))
    reads = {read.kind: read for read in window.result(STEPS).host_reads}
    assert reads["optimizer"].per_step == 4  # one per parameter
    assert reads["value"].per_step == 1
    assert reads["value"].source == "loss.item()"
    assert reads["value"].location.startswith(f"{__file__}:")
    assert (reads["value"].in_user_code, reads["value"].device, reads["value"].op) == (
        True,
        "cpu",
        "_local_scalar_dense",
    )


def test_a_nan_filter_reads_twice_and_is_named_by_its_expressions() -> None:
    loss = torch.ones(())

    def nan_filter() -> float:
        if (
            loss is not None
            and (torch.isnan(loss) or torch.isinf(loss))
        ):  # fmt: skip
            return 0.0
        return 1.0

    reads = observe(nan_filter).host_reads
    assert [(read.kind, read.per_step) for read in reads] == [("nan_check", 1.0), ("nan_check", 1.0)]
    assert {read.source for read in reads} == {"torch.isnan(loss)", "torch.isinf(loss)"}


X = torch.arange(6.0)
MASK = X > 2


@pytest.mark.parametrize(
    ("body", "op", "kind"),
    [
        (lambda: float(X[0]), "_local_scalar_dense", "value"),
        (lambda: X.nonzero(), "nonzero", "value"),
        (lambda: X[MASK], "index", "value"),
        (lambda: torch.equal(X, X), "equal", "value"),
        (lambda: torch.masked_select(X, MASK), "masked_select", "value"),
        (lambda: torch.unique(X), "_unique2", "value"),
        (lambda: math.isnan(X[0].item()), "_local_scalar_dense", "value"),
        (lambda: bool(torch.isfinite(X).all()), "_local_scalar_dense", "nan_check"),
    ],
)
def test_what_reads_a_value_is_a_host_read(body: Callable[[], object], op: str, kind: str) -> None:
    (read,) = observe(body).host_reads
    assert (read.op, read.kind, read.per_step) == (op, kind, 1.0)


@pytest.mark.parametrize(
    "body",
    [
        lambda: X.clone().masked_fill_(MASK, 0.0),
        lambda: X.clone().__setitem__(MASK, 0.0),  # one mask and one value: a masked_fill
        lambda: X[[0, 1]],
        lambda: X.sum().add(1),
        lambda: X.cpu(),
    ],
)
def test_what_reads_no_value_is_not(body: Callable[[], object]) -> None:
    assert observe(body).host_reads == ()


def test_a_read_inside_torch_belongs_to_the_line_that_called_torch() -> None:
    weight = torch.ones(3, requires_grad=True)
    weight.grad = torch.ones(3)
    (read,) = observe(lambda: torch.nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)).host_reads
    assert read.location.startswith(f"{__file__}:")
    assert read.source.startswith("torch.nn.utils.clip_grad_norm_(")
    assert read.kind == "nan_check"


def test_lbfgs_reads_values_not_step_counters() -> None:
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    kinds = {read.kind for read in observe(lambda: optimizer.step(closure)).host_reads}  # type: ignore[arg-type]
    assert kinds == {"value"}


def test_autocast_shows_in_dtypes_and_casts() -> None:
    linear = torch.nn.Linear(4, 2)

    def body() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            linear(torch.ones(3, 4))

    facts = observe(body)
    assert facts.matmul_dtypes == {"bfloat16": 1.0}
    (cast,) = facts.copies
    # input, weight and bias become bfloat16
    assert (cast.direction, cast.per_step, cast.bytes_per_step) == ("cast", 3.0, 2.0 * (12 + 8 + 2))


def test_modes_of_the_script_come_and_go_as_without_us() -> None:
    def work() -> torch.Tensor:
        return torch.ones(2, 3) @ torch.ones(3, 4)

    leaving, entering = FlopCounterMode(display=False), FlopCounterMode(display=False)
    window = OpsWindow(lambda: "p")
    leaving.__enter__()
    window.start()
    work()
    leaving.__exit__(None, None, None)
    work()
    entering.__enter__()
    work()
    window.stop()
    work()
    entering.__exit__(None, None, None)
    assert window.result(3).matmul_dtypes == {"float32": 1.0}
    assert (leaving.get_total_flops(), entering.get_total_flops()) == (48, 96)
    assert torch._C._len_torch_dispatch_stack() == 0


def test_stop_restores_after_the_script_raised_inside() -> None:
    window = OpsWindow(lambda: "p")
    window.start()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        torch.mm(torch.ones(2, 3), torch.ones(2, 3))
    window.stop()
    assert torch._C._len_torch_dispatch_stack() == 0
    assert window.result(1).issued_per_step == 2  # the two ones


def test_a_failing_phase_never_reaches_training_and_is_raised_by_result() -> None:
    window = OpsWindow(lambda: str(1 // 0))
    window.start()
    assert torch.ones(2).sum().item() == 2
    window.stop()
    with pytest.raises(RuntimeError, match="not counted to the end: ZeroDivisionError"):
        window.result(1)


def test_a_window_that_began_inside_backward_says_that_it_was_lost() -> None:
    weight = torch.ones(3, requires_grad=True)
    window = OpsWindow(lambda: "p")
    weight.register_hook(lambda gradient: window.start())
    weight.sum().backward()
    window.stop()
    with pytest.raises(RuntimeError, match="gone before the window ended"):
        window.result(1)


@pytest.mark.parametrize("make", [lambda: OpsWindow(lambda: "p"), lambda: CallsWindow(lambda: "p")])
def test_a_window_is_used_once_and_in_order(make: Callable[[], OpsWindow | CallsWindow]) -> None:
    window = make()
    with pytest.raises(RuntimeError, match="not open"):
        window.stop()
    window.start()
    with pytest.raises(RuntimeError, match="already started"):
        window.start()
    with pytest.raises(RuntimeError, match="no result before stop"):
        window.result(1)
    window.stop()
    with pytest.raises(RuntimeError, match="not open"):
        window.stop()
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        window.result(0)


class Doubled(torch.Tensor):
    """Carries a plain tensor and computes on it, as DTensor does."""

    plain: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Doubled":
        tensor = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        tensor.plain = inner
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        plain = [argument.plain if isinstance(argument, Doubled) else argument for argument in args]
        return func(func(*plain, **(kwargs or {})), 2)


def test_a_tensor_subclass_is_counted_by_the_operators_it_becomes() -> None:
    wrapped = Doubled(torch.ones(2))
    assert observe(lambda: torch.ops.aten.mul.Tensor(wrapped, 3)).issued_per_step == 2


class Rows(torch.utils.data.Dataset[bool]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> bool:
        import sys

        return torch._C._len_torch_dispatch_stack() > 0 or sys.getprofile() is not None


@pytest.mark.parametrize("make", [lambda: OpsWindow(lambda: "p"), lambda: CallsWindow(lambda: "p")])
def test_loader_workers_forked_inside_a_window_are_left_alone(make: Callable[[], OpsWindow | CallsWindow]) -> None:
    window = make()
    window.start()
    seen: Iterator[object] = iter(torch.utils.data.DataLoader(Rows(), num_workers=1, multiprocessing_context="fork"))
    watched = [bool(batch) for batch in seen]  # type: ignore[call-overload]
    window.stop()
    assert watched == [False, False]


def test_compiled_regions_stay_compiled() -> None:
    import torch._dynamo.utils

    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.GELU())
    compiled = torch.compile(model, backend="eager")
    compiled(torch.ones(2, 3)).sum().backward()
    frames = dict(torch._dynamo.utils.counters["frames"])
    calls = CallsWindow(lambda: "p")
    for window in (OpsWindow(lambda: "p"), calls):
        window.start()
        compiled(torch.ones(2, 3)).sum().backward()
        window.stop()
    assert dict(torch._dynamo.utils.counters["frames"]) == frames  # neither the model nor our hooks again
    assert not any("GELU" in function.function for function in calls.result(1).functions)
