"""CallsWindow against known numbers on toys; its operator count against torch's own profiler."""

import cProfile
import io
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

from bareloop.profiler.probes.calls import CallsFacts, CallsWindow


def observe(body: Callable[[], object], *, steps: int = 1, model: torch.nn.Module | None = None) -> CallsFacts:
    window = CallsWindow(lambda: "forward", model)
    window.start()
    body()
    window.stop()
    return window.result(steps)


def leaf() -> None:
    pass


def branch(leaves: int) -> None:
    for _ in range(leaves):
        leaf()


def test_python_calls_are_counted_one_by_one() -> None:
    facts = observe(lambda: [branch(3), branch(2)])
    assert facts.python_calls_per_step == 1 + 2 + 5  # the lambda, two branches, five leaves
    counts = {function.function: function for function in facts.functions}
    assert (counts["leaf"].per_step, counts["branch"].per_step) == (5, 2)
    assert counts["leaf"].file == __file__
    assert counts["leaf"].line == leaf.__code__.co_firstlineno
    assert counts["leaf"].caller == f"{__file__}:{branch.__code__.co_firstlineno + 2}"


def test_two_windows_over_the_same_steps_count_the_same() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.1))
    optimizer = torch.optim.AdamW(model.parameters())

    def steps() -> None:
        for _ in range(2):
            model.train()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    steps()
    first, second = observe(steps, steps=2, model=model), observe(steps, steps=2, model=model)
    assert first == second
    assert first.modules == 3
    assert first.module_train_calls_per_step == 3  # the container and its two children
    assert first.python_calls_per_step is not None and first.ops_per_step is not None


def test_frames_that_were_on_the_stack_before_the_start_are_seen() -> None:
    window = CallsWindow(lambda: "p")

    def boundary() -> None:
        window.start()

    def loop() -> None:
        boundary()
        leaf()
        leaf()

    loop()
    window.stop()
    assert window.result(1).python_calls_per_step == 2


def test_calls_and_operators_belong_to_the_phase_at_their_time() -> None:
    here = ["forward"]
    window = CallsWindow(lambda: here[0])

    def enter(phase: str) -> None:
        here[0] = phase

    window.start()
    x = torch.ones(3) * 1.0  # ones: empty, fill_
    enter("clip")
    x.neg_()
    leaf()
    enter("other")
    window.stop()
    facts = window.result(1)
    # A call belongs to the phase that it finds, so each `enter` to the one before.
    assert facts.python_calls_by_phase == {"forward": 1.0, "clip": 2.0}
    assert facts.ops_by_phase["clip"] == 1.0
    assert facts.ops_per_step == sum(facts.ops_by_phase.values())


def test_operators_are_counted_as_torch_profiler_counts_them() -> None:
    model = torch.nn.Sequential(
        torch.nn.Embedding(9, 16), torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    )
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step() -> None:
        model(torch.ones(2, 5, dtype=torch.long)).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
    expected = sum(event.name.startswith("aten::") for event in profiler.events() or [])
    assert observe(step).ops_per_step == expected
    assert expected > 500


def test_watched_functions_are_listed_however_rare() -> None:
    class Bar:
        def set_postfix(self) -> None:
            pass

        def rarely(self) -> None:
            pass

    def body() -> None:
        Bar().set_postfix()
        Bar().rarely()

    functions = {function.function.rpartition(".")[2] for function in observe(body, steps=2).functions}
    assert "set_postfix" in functions
    assert "rarely" not in functions


def test_watched_builtins_are_listed_by_line() -> None:
    out = io.StringIO()
    parameters = [torch.ones(2), torch.ones(3)]

    def body() -> int:
        out.write("x")
        return sum(parameter.numel() for parameter in parameters)

    builtins = {builtin.name: builtin for builtin in observe(body).builtins}
    assert builtins["numel"].per_step == 2
    assert builtins["numel"].source == "parameter.numel()"
    assert builtins["write"].per_step == 1
    assert builtins["write"].location.startswith(f"{__file__}:")


def test_the_profile_function_of_the_script_is_called_on_and_put_back() -> None:
    events: list[str] = []

    def theirs(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            events.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(theirs)
    try:
        facts = observe(lambda: branch(2))
        assert sys.getprofile() is theirs
    finally:
        sys.setprofile(before)
    assert events.count("leaf") == 2
    assert facts.python_calls_per_step == 4


def test_a_profiler_below_python_is_left_alone() -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        facts = observe(lambda: branch(2))
    finally:
        profiler.disable()
    assert facts.python_calls_per_step is None
    assert facts.notes == ("the script runs Profile: Python calls were not counted",)
    assert any(entry.code is leaf.__code__ and entry.callcount == 2 for entry in profiler.getstats())


def test_a_profile_function_that_the_script_sets_inside_stays() -> None:
    def theirs(frame: FrameType, event: str, argument: Any) -> None:
        pass

    try:
        facts = observe(lambda: sys.setprofile(theirs))
        assert sys.getprofile() is theirs
    finally:
        sys.setprofile(None)
    assert facts.python_calls_per_step is None


def test_the_torch_profiler_of_the_script_goes_first() -> None:
    original = vars(torch.autograd.profiler)["_enable_profiler"]

    def body() -> int:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            torch.ones(3).neg()
        return sum(event.name == "aten::neg" for event in profiler.events() or [])

    counted: list[int] = []
    facts = observe(lambda: counted.append(body()))
    assert counted == [1]
    assert facts.ops_per_step is None
    assert facts.notes == ("the script started its own profiler: operators inside operators were not counted",)
    assert facts.python_calls_per_step is not None
    assert vars(torch.autograd.profiler)["_enable_profiler"] is original


def test_stop_restores_after_the_script_raised_inside() -> None:
    before = sys.getprofile()
    window = CallsWindow(lambda: "p")
    window.start()
    with pytest.raises(ValueError, match="theirs"):
        raise ValueError("theirs")
    window.stop()
    assert sys.getprofile() is before
    assert not vars(torch._C)["_autograd"]._profiler_enabled()


def test_a_failing_phase_never_reaches_training_and_is_raised_by_result() -> None:
    answers = iter(["p"])
    window = CallsWindow(lambda: next(answers, None) or str(1 // 0))
    window.start()
    leaf()
    window.stop()
    with pytest.raises(RuntimeError, match="not counted to the end: ZeroDivisionError"):
        window.result(1)
