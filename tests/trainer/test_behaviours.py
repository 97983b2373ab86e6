"""transformers' own trainer tests as the judge: every behaviour of the catalogue on the stock trainer and on lean.

Both must hold, leave the same bits behind, and lean must have run lean except where the catalogue says otherwise. The
page `docs/trainer-compatibility.md` is what this run found.
"""

import functools
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from behaviours import CATALOGUE
from behaviours.behaviour import Behaviour
from behaviours.judging import Outcome, judge

from bareloop.trainer.hf import lean

ROOT = Path(__file__).parent.parent.parent


@functools.cache
def outcomes(name: str) -> tuple[Outcome, Outcome]:
    """What came of the behaviour `name` on the stock class and on lean."""
    [behaviour] = [each for each in CATALOGUE if each.name == name]
    return judge(behaviour, behaviour.base), judge(behaviour, lean(behaviour.base))


@pytest.mark.parametrize("behaviour", CATALOGUE, ids=lambda behaviour: behaviour.name)
def test_lean_keeps_what_the_stock_trainer_does(behaviour: Behaviour) -> None:
    stock, ours = outcomes(behaviour.name)
    for who, outcome in (("the stock trainer", stock), ("lean", ours)):
        if outcome.failure is not None:
            pytest.fail(f"{who} does not do it: {behaviour.says}\n{outcome.failure}", pytrace=False)
    assert ours.runs == stock.runs
    assert ours.files == stock.files
    assert set(ours.warned) <= set(stock.warned)


@pytest.mark.parametrize("behaviour", CATALOGUE, ids=lambda behaviour: behaviour.name)
def test_lean_runs_lean_unless_declared(behaviour: Behaviour) -> None:
    _, ours = outcomes(behaviour.name)
    if behaviour.falls_back is None:
        assert ours.fallbacks == ()
    else:
        assert any(behaviour.falls_back in reason for reason in ours.fallbacks), ours.fallbacks


def _nothing(*args: Any, **settings: Any) -> None:
    return None


def _without_norm(self: Any, logs: dict[str, float], start_time: float | None = None) -> None:
    logs.pop("grad_norm", None)
    transformers.Trainer.log(self, logs, start_time)


def _half_the_items(self: Any, batches: Any, device: Any) -> Any:
    return transformers.Trainer._get_num_items_in_batch(self, batches, device) / 2


def _without_last_batch(self: Any, batches: Any, size: int, device: Any) -> Any:
    taken, count = transformers.Trainer.get_batch_samples(self, batches, size, device)
    return taken[: max(1, size - 1)], count


BROKEN = {
    "gradients_are_clipped": ("_clip_grad_norm", lambda self, model: torch.tensor(9.0)),
    "clipping_by_0_does_not_clip": ("_get_grad_norm", lambda self, model, grad_norm=None: 1.0),
    "the_rate_falls_in_a_line": ("_get_learning_rate", lambda self: 0.1),
    "every_row_comes_once_an_epoch_in_another_order": ("_get_train_sampler", lambda self, rows: range(len(rows))),
    "an_entry_has_loss_norm_rate_and_place": ("log", _without_norm),
    "shifted_labels_are_counted_shifted": ("_get_num_items_in_batch", _half_the_items),
    "equal_splits_of_a_batch_train_alike": ("get_batch_samples", _without_last_batch),
    "operations_are_counted": ("floating_point_ops", lambda self, inputs: 0),
    "all_tokens_can_be_counted": ("_track_num_input_tokens", _nothing),
    "a_checkpoint_has_all_that_resuming_needs": ("_save_rng_state", _nothing),
    "resuming_restores_random_states": ("_load_rng_state", _nothing),
    "resuming_restores_the_optimizer": ("_load_optimizer_and_scheduler", _nothing),
    "the_best_model_is_loaded_at_the_end": ("_load_best_model", _nothing),
    "only_improvements_can_be_saved": ("_determine_best_metric", lambda self, metrics, trial: True),
    "callbacks_come_as_classes_or_objects": ("add_callback", _nothing),
    "a_column_that_the_model_does_not_take_changes_nothing": (
        "_remove_unused_columns",
        lambda self, rows, description: rows,
    ),
}
"""Behaviour -> a method of the trainer and what breaks that behaviour in its place."""


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_trainer_is_caught(name: str) -> None:
    method, replacement = BROKEN[name]
    [behaviour] = [each for each in CATALOGUE if each.name == name]
    assert judge(behaviour, type("Broken", (transformers.Trainer,), {method: replacement})).failure is not None


def test_every_behaviour_has_its_own_name_and_sentence() -> None:
    names, sentences = ([getattr(each, field) for each in CATALOGUE] for field in ("name", "says"))
    assert len(set(names)) == len(set(sentences)) == len(CATALOGUE) >= 80
    assert all(sentence.endswith(".") for sentence in sentences)


def test_the_page_is_what_this_run_found() -> None:
    spec = importlib.util.spec_from_file_location("build_compatibility", ROOT / "docs" / "build_compatibility.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = module.page({behaviour.name: outcomes(behaviour.name) for behaviour in CATALOGUE})
    written = (ROOT / "docs" / "trainer-compatibility.md").read_text()
    assert written == found, "run python docs/build_compatibility.py"
