"""The referee itself: stock against stock is equal, and a trainer with one small thing wrong is told from stock by it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from matrix import data
from matrix.journal import Journal, first_difference
from matrix.recorder import record
from matrix.settings import Setting
from matrix.subclasses import watching
from matrix.verdict import ALL_EVENTS, NO_EVENTS, problems, stock

pytestmark = pytest.mark.usefixtures("frozen_heap")

BUSY = Setting(
    name="busy",
    arguments={
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "logging_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
    },
    held_out=data.held_out,
)
ULP = 1 + 2.0**-23


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return record(BUSY, stock, tmp_path_factory.mktemp("stock") / "run", ALL_EVENTS)[0].written


@pytest.mark.parametrize("watch", [ALL_EVENTS, NO_EVENTS], ids=["all events", "no events"])
def test_stock_equals_stock(watch: tuple[str, ...], tmp_path: Path) -> None:
    assert problems(BUSY, tmp_path, watch, {"stock again": stock}) == []


def test_a_run_is_written_as_a_whole(expected: list[str]) -> None:
    """Every kind of fact is there, as often as the setting asks for it."""
    facts = [line.partition(" = ")[0] for line in expected]
    assert facts.count("optimizer step") == facts.count("event on_step_end") == 4
    assert facts.count("event on_substep_end") == 3, "windows of 2, 2 and 1 in an epoch of five micro-batches, then 2"
    assert facts.count("event on_evaluate") == facts.count("event on_save") == 2
    assert facts.count("forward") == facts.count("answer") == 7 + 2 * 2
    saved = "file checkpoint-2/"
    names = {fact.removeprefix(saved).split(".")[0] for fact in facts if fact.startswith(saved)}
    state = {"optimizer", "rng_state", "scheduler", "trainer_state", "training_args"}
    assert names == {"config", "generation_config", "model", *state}


def wrong(name: str, change: Callable[..., Any]) -> Callable[[Setting, Journal], type]:
    """A Trainer whose method `name` is `change(self, inherited, *args)`."""

    def side(setting: Setting, journal: Journal) -> type:
        inherited = getattr(transformers.Trainer, name)

        def method(self: Any, *args: Any, **keywords: Any) -> Any:
            return change(self, lambda: inherited(self, *args, **keywords), *args, **keywords)

        return type("Wrong", (transformers.Trainer,), {name: method})

    return side


def loses_an_event(self: Any, inherited: Callable, *args: Any, **keywords: Any) -> Any:
    self.callback_handler.on_substep_end = lambda args, state, control: control
    return inherited()


def leaves_modes(self: Any, inherited: Callable, *args: Any, **keywords: Any) -> Any:
    found = inherited()
    self.model.train = lambda mode=True: self.model
    return found


def nudges_a_weight(self: Any, inherited: Callable, *args: Any) -> Any:
    next(self.model.parameters()).data.view(-1)[5].mul_(ULP)
    return inherited()


def nudges_a_moment(self: Any, inherited: Callable, *args: Any) -> Any:
    state = self.optimizer.state[next(self.model.parameters())]
    state["exp_avg"].view(-1)[5].mul_(ULP)
    return inherited()


def keeps_a_gradient(self: Any, inherited: Callable, *args: Any) -> Any:
    parameter = next(self.model.parameters())
    parameter.grad = torch.zeros_like(parameter)
    return inherited()


def writes_one_more_file(self: Any, inherited: Callable, *args: Any) -> Any:
    found = inherited()
    Path(self.args.output_dir, "checkpoint-2", "more.txt").write_text("more")
    return found


def saves_otherwise(self: Any, inherited: Callable, output_dir: str) -> Any:
    found = inherited()
    torch.save({**self.lr_scheduler.state_dict(), "_step_count": 0}, Path(output_dir, "scheduler.pt"))
    return found


def logs_later(self: Any, inherited: Callable, *args: Any, learning_rate: float) -> Any:
    return transformers.Trainer._maybe_log_save_evaluate(self, *args)


def draws(self: Any, inherited: Callable, *args: Any) -> Any:
    torch.rand(1)
    return inherited()


def draws_in_numpy(self: Any, inherited: Callable, *args: Any) -> Any:
    np.random.rand()
    return inherited()


def clips_a_little_less(self: Any, inherited: Callable, model: Any) -> Any:
    norm = inherited()
    for parameter in model.parameters():
        parameter.grad.mul_(ULP)
    return norm


WRONG = {
    "logged loss": ("training_step", lambda self, inherited, *args: inherited() * ULP, "trainer.loss"),
    "clip": ("_clip_grad_norm", clips_a_little_less, "stepped"),
    "rate logged after the scheduler": ("_maybe_log_save_evaluate", logs_later, "logs.learning_rate"),
    "event lost": ("_inner_training_loop", loses_an_event, "event on_substep_end"),
    "a random number": ("get_batch_samples", draws, "forward.random"),
    "a random number of numpy's": ("get_batch_samples", draws_in_numpy, "random[1]"),
    "modes": ("evaluate", leaves_modes, "forward.modes"),
    "operations": (
        "floating_point_ops",
        lambda self, inherited, inputs: inherited() + 1,
        "event on_substep_end.trainer.flops",
    ),
    "a weight": ("_finalize_training", nudges_a_weight, "weight."),
    "a moment": ("_finalize_training", nudges_a_moment, "optimizer.state"),
    "a gradient left": ("_finalize_training", keeps_a_gradient, "gradient."),
    "a file more": ("_save_checkpoint", writes_one_more_file, "file checkpoint-2/more.txt"),
    "a file's content": (
        "_save_optimizer_and_scheduler",
        saves_otherwise,
        "file checkpoint-2/scheduler.pt._step_count",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_one_wrong_thing_is_found(name: str, expected: list[str], tmp_path: Path) -> None:
    method, change, fact = WRONG[name]
    journal, _ = record(BUSY, wrong(method, change), tmp_path / "run", ALL_EVENTS)
    difference = first_difference(expected, journal.written, context=0)
    assert difference is not None and fact in difference, difference


def test_a_method_called_once_more_is_found(tmp_path: Path) -> None:
    calls = Setting(name="calls", subclass=watching("floating_point_ops"), arguments={"max_steps": 2})

    def side(setting: Setting, journal: Journal) -> type:
        class Twice(stock(setting, journal)):
            def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
                self.floating_point_ops(inputs)
                return super().training_step(model, inputs, num_items_in_batch)

        return Twice

    (problem,) = problems(calls, tmp_path, NO_EVENTS, {"Twice": side})
    assert "lean:  call floating_point_ops" in problem


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (1.0, 1),
        (1, True),
        (0.0, -0.0),
        (1.0, 1.0 + 2.0**-52),
        (np.float64(1), 1.0),
        (torch.tensor(1.0), torch.tensor(1.0, dtype=torch.float64)),
        (torch.zeros(2, 8), torch.zeros(8, 2)),
        (torch.tensor([0.0] * 9), torch.tensor([0.0] * 8 + [-0.0])),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ([1, 2], (1, 2)),
        (None, "None"),
        ({"loss": 1.0}, {"loss": 1.0, "train_runtime": 2.0}),
    ],
)
def test_small_differences_count(left: Any, right: Any, tmp_path: Path) -> None:
    journals = Journal(tmp_path), Journal(tmp_path)
    for journal, value in zip(journals, (left, right), strict=True):
        journal.add("value", value)
    assert first_difference(journals[0].written, journals[1].written) is not None
    assert first_difference(journals[0].written, journals[0].written) is None


def test_only_clocks_and_the_folder_are_masked(tmp_path: Path) -> None:
    journals = Journal(tmp_path / "a"), Journal(tmp_path / "b")
    for index, journal in enumerate(journals):
        journal.add("log", {"train_runtime": 1.5 + index, "eval_steps_per_second": index, "at": journal.folder + "/x"})
    assert journals[0].written == journals[1].written
    assert "log.at = str '<folder>/x'" in journals[0].written


def test_what_has_no_bits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="no leaf of a journal"):
        Journal(tmp_path).add("object", object())
