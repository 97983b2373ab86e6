"""Saving: when checkpoints are written, what is in them, which are kept, and which model is loaded at the end."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoTokenizer, Wav2Vec2FeatureExtractor
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from behaviours.behaviour import in_area
from behaviours.tasks import (
    Events,
    Line,
    PretrainedLine,
    line_rows,
    logged,
    tokenizer,
    trainer,
    weights,
)

__all__ = ["BEHAVIOURS"]

TO_RESUME = {"optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json"}
WHOLE = {"model.safetensors", "training_args.bin"} | TO_RESUME


def _ran(built: Any) -> Any:
    built.train()
    return built


def _checkpoints() -> list[int]:
    return sorted(int(name.removeprefix("checkpoint-")) for name in os.listdir("out") if name.startswith("checkpoint-"))


def _inside(step: int) -> set[str]:
    return set(os.listdir(f"out/checkpoint-{step}"))


def checkpoints_come_when_asked_for(cls: type[Any]) -> None:
    """Checkpoints come every save_steps and at the last step, or after each epoch, or never."""
    _ran(trainer(cls, num_train_epochs=2, save_steps=3))
    assert _checkpoints() == [3, 6, 8]
    _ran(trainer(cls, num_train_epochs=2, save_strategy="epoch", output_dir="out/epochs"))
    assert sorted(os.listdir("out/epochs")) == ["checkpoint-4", "checkpoint-8"]
    _ran(trainer(cls, num_train_epochs=2, save_strategy="no", output_dir="out/never"))
    assert os.listdir("out/never") == []


def an_epoch_is_saved_once(cls: type[Any]) -> None:
    """With save_strategy="epoch" a training that max_steps ends inside an epoch saves once, at its end."""
    events = Events()
    _ran(trainer(cls, max_steps=2, save_strategy="epoch", callbacks=[events]))
    assert events.names.count("save") == 1
    assert _checkpoints() == [2]


def a_checkpoint_has_all_that_resuming_needs(cls: type[Any]) -> None:
    """A checkpoint has weights, config, arguments, optimizer, scheduler, random states and the trainer's state."""
    _ran(trainer(cls, save_steps=2))
    assert _inside(2) == WHOLE | {"config.json"}
    assert _inside(4) == WHOLE | {"config.json"}


def a_checkpoint_of_a_plain_module_has_no_config(cls: type[Any]) -> None:
    """A module that is no pretrained model is saved as its state in safetensors."""
    built = _ran(trainer(cls, Line(), save_steps=4))
    assert _inside(4) == WHOLE
    saved = load_file("out/checkpoint-4/model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in weights(built).items())


def a_checkpoint_can_be_the_model_alone(cls: type[Any]) -> None:
    """save_only_model leaves out what only resuming needs."""
    _ran(trainer(cls, save_steps=4, save_only_model=True))
    assert _inside(4) == (WHOLE | {"config.json"}) - TO_RESUME | {"trainer_state.json"}


def saved_weights_are_those_of_their_step(cls: type[Any]) -> None:
    """Each checkpoint has the weights that the model had at its step."""
    at_step: dict[int, float] = {}

    class Noting(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
            at_step[state.global_step] = model.slope.item()

    _ran(trainer(cls, save_steps=1, callbacks=[Noting()]))
    for step, slope in at_step.items():
        assert PretrainedLine.from_pretrained(f"out/checkpoint-{step}").slope.item() == slope


def a_saved_state_is_that_of_its_step(cls: type[Any]) -> None:
    """trainer_state.json has step, epoch and history as they stood."""
    built = _ran(trainer(cls, save_steps=2, logging_steps=1))
    state = json.loads(Path("out/checkpoint-2/trainer_state.json").read_text())
    assert (state["global_step"], state["epoch"], state["max_steps"]) == (2, 0.5, 4)
    assert state["log_history"] == built.state.log_history[:2]


def old_checkpoints_are_deleted(cls: type[Any]) -> None:
    """save_total_limit keeps the newest checkpoints."""
    _ran(trainer(cls, num_train_epochs=2, save_steps=2, save_total_limit=2))
    assert _checkpoints() == [6, 8]


def _scored(cls: type[Any], scores: list[float], **settings: Any) -> Any:
    """A trained trainer whose evaluations report `scores` as accuracy, one after the other."""

    class Scored(cls):
        def evaluate(self, *args: Any, **settings: Any) -> dict[str, float]:
            metrics = super().evaluate(*args, **settings)
            metrics["eval_accuracy"] = scores[min(self.evaluations, len(scores) - 1)]
            self.evaluations += 1
            return metrics

    defaults = {"eval_dataset": line_rows(8), "metric_for_best_model": "accuracy", "greater_is_better": True}
    built = trainer(Scored, **(defaults | settings))
    built.evaluations = 0
    return _ran(built)


BY_STEP = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1}
BY_EPOCH = {"eval_strategy": "epoch", "save_strategy": "epoch", "num_train_epochs": 3}


def _best(built: Any) -> tuple[Any, Any, Any]:
    folder = built.state.best_model_checkpoint
    return built.state.best_metric, built.state.best_global_step, folder and os.path.basename(folder)


def the_best_checkpoint_is_remembered(cls: type[Any]) -> None:
    """Best metric, its step and its checkpoint are in the state, whether the best model is loaded or not."""
    assert _best(_scored(cls, [0.59, 0.57, 0.55], **BY_EPOCH)) == (0.59, 4, "checkpoint-4")
    assert _best(_scored(cls, [0.5, 0.6, 0.55], **BY_EPOCH)) == (0.6, 8, "checkpoint-8")


def there_is_no_best_without_evaluations(cls: type[Any]) -> None:
    """Without evaluations nothing is the best, and the limit keeps the last."""
    built = _scored(cls, [0.5], save_steps=1, save_total_limit=1)
    assert (built.state.best_metric, built.state.best_model_checkpoint) == (None, None)
    assert _checkpoints() == [4]


def the_best_checkpoint_survives_the_limit(cls: type[Any]) -> None:
    """The limit never deletes the best checkpoint; a limit of 1 leaves it alone at the end."""
    built = _scored(cls, [0.9, 0.8, 0.7, 0.6], save_total_limit=2, load_best_model_at_end=True, **BY_STEP)
    assert _best(built) == (0.9, 1, "checkpoint-1")
    assert _checkpoints() == [1, 4]
    _scored(cls, [0.9, 0.8, 0.7, 0.6], save_total_limit=1, output_dir="out/one", **BY_STEP)
    assert os.listdir("out/one") == ["checkpoint-1"]


def a_best_step_that_was_not_saved_has_no_checkpoint(cls: type[Any]) -> None:
    """Where evaluations and saves fall on different steps the best metric has no checkpoint."""
    built = _scored(cls, [0.9, 0.8], num_train_epochs=2, eval_strategy="steps", eval_steps=3, save_steps=4)
    assert _best(built) == (0.9, 3, None)
    assert _checkpoints() == [4, 8]


def evaluations_by_epoch_find_saves_by_step(cls: type[Any]) -> None:
    """A best epoch whose last step was saved has that checkpoint."""
    built = _scored(cls, [0.9, 0.8], num_train_epochs=2, eval_strategy="epoch", save_steps=1)
    assert _best(built) == (0.9, 4, "checkpoint-4")


def only_improvements_can_be_saved(cls: type[Any]) -> None:
    """save_strategy="best" saves when the metric improves and not otherwise."""
    settings = {"save_strategy": "best", "eval_strategy": "epoch", "num_train_epochs": 4}
    _scored(cls, [0.60, 0.65, 0.64, 0.7], **settings)
    assert _checkpoints() == [4, 8, 16]
    _scored(cls, [0.3, 0.2, 0.25, 0.2], greater_is_better=False, output_dir="out/less", **settings)
    assert sorted(os.listdir("out/less")) == ["checkpoint-4", "checkpoint-8"]


def the_best_model_is_loaded_at_the_end(cls: type[Any]) -> None:
    """load_best_model_at_end ends with the weights of the best checkpoint, by steps and by epochs."""
    for settings in (BY_STEP, BY_EPOCH):
        built = _scored(cls, [0.5, 0.7, 0.6, 0.4], load_best_model_at_end=True, **settings)
        saved = load_file(os.path.join(built.state.best_model_checkpoint, "model.safetensors"))
        assert _best(built)[0] == 0.7
        assert all(torch.equal(saved[name], value) for name, value in weights(built).items())


def the_best_by_loss_evaluates_to_its_metric(cls: type[Any]) -> None:
    """The model loaded at the end evaluates to the best loss, for plain modules too."""
    for model in (PretrainedLine(), Line()):
        settings = {"load_best_model_at_end": True, "learning_rate": 1.2, "eval_dataset": line_rows(8), **BY_STEP}
        built = _ran(trainer(cls, model, output_dir=f"out/{type(model).__name__}", **settings))
        best = min(logged(built, "eval_loss"))
        assert built.state.best_metric == best
        assert built.evaluate()["eval_loss"] == best


def the_best_of_best_saves_is_loaded(cls: type[Any]) -> None:
    """save_strategy="best" with load_best_model_at_end ends with the best one, not the last one."""
    built = _scored(cls, [0.5, 0.7, 0.6, 0.4], save_strategy="best", load_best_model_at_end=True, eval_strategy="steps",
                    eval_steps=1)  # fmt: skip
    assert _checkpoints() == [1, 2]
    saved = load_file("out/checkpoint-2/model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in weights(built).items())


def an_unknown_metric_raises(cls: type[Any]) -> None:
    """A metric for the best model that no evaluation reports raises a KeyError that names those there are."""
    with pytest.raises(KeyError, match="eval_loss"):
        _ran(trainer(cls, eval_dataset=line_rows(8), metric_for_best_model="beauty", **BY_STEP))


def save_model_writes_what_from_pretrained_reads(cls: type[Any]) -> None:
    """save_model writes weights, config and arguments into the output folder or another one."""
    built = _ran(trainer(cls))
    built.save_model()
    built.save_model("elsewhere")
    for folder in ("out", "elsewhere"):
        assert PretrainedLine.from_pretrained(folder).slope.item() == built.model.slope.item()
        arguments = torch.load(f"{folder}/training_args.bin", weights_only=False)
        assert arguments.learning_rate == built.args.learning_rate


def the_tokenizer_is_saved_with_the_model(cls: type[Any]) -> None:
    """processing_class is saved with the model, or else the collator's tokenizer."""

    class Collator:
        def __init__(self, words: Any) -> None:
            self.tokenizer = words

        def __call__(self, rows: list[Any]) -> Any:
            return transformers.default_data_collator(rows)

    text = "w3 w5 w7"
    trainer(cls, processing_class=tokenizer()).save_model("given")
    trainer(cls, data_collator=Collator(tokenizer())).save_model("collated")
    for folder in ("given", "collated"):
        assert AutoTokenizer.from_pretrained(folder)(text)["input_ids"] == [3, 5, 7]


def a_feature_extractor_is_saved_with_the_model(cls: type[Any]) -> None:
    """A feature extractor given as processing_class is saved with the model."""
    extractor = Wav2Vec2FeatureExtractor(sampling_rate=8000)
    collator = trainer(cls).data_collator
    trainer(cls, processing_class=extractor, data_collator=collator).save_model()
    assert Wav2Vec2FeatureExtractor.from_pretrained("out").to_dict() == extractor.to_dict()


def saving_can_be_overridden(cls: type[Any]) -> None:
    """_save_checkpoint and save_model of a subclass are used."""
    calls: list[str] = []

    class Own(cls):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            calls.append("checkpoint")
            super()._save_checkpoint(model, trial)

        def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
            calls.append("model")
            super().save_model(output_dir, _internal_call)

    _ran(trainer(Own, save_steps=2))
    assert calls == ["checkpoint", "model"] * 2


def a_request_to_save_now_is_met(cls: type[Any]) -> None:
    """With enable_jit_checkpoint a request (SIGTERM) saves a checkpoint at once and stops."""
    built = trainer(cls, num_train_epochs=5, enable_jit_checkpoint=True)
    [callback] = [it for it in built.callback_handler.callbacks if isinstance(it, JITCheckpointCallback)]

    class Asking(transformers.TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == 2:
                callback.jit_manager._enable_checkpoint()

    built.add_callback(Asking())
    assert built.train().global_step == 3
    assert _checkpoints() == [3]
    assert _inside(3) == WHOLE | {"config.json"}


def random_states_are_saved(cls: type[Any]) -> None:
    """rng_state.pth has the states of Python's, NumPy's and torch's generators."""
    _ran(trainer(cls, save_steps=4))
    with torch.serialization.safe_globals([np._core.multiarray._reconstruct, np.ndarray, np.dtype]):
        states = torch.load("out/checkpoint-4/rng_state.pth", weights_only=False)
    assert {"python", "numpy", "cpu"} <= set(states)


BEHAVIOURS = in_area(
    "saving",
    checkpoints_come_when_asked_for,
    an_epoch_is_saved_once,
    a_checkpoint_has_all_that_resuming_needs,
    a_checkpoint_of_a_plain_module_has_no_config,
    a_checkpoint_can_be_the_model_alone,
    saved_weights_are_those_of_their_step,
    a_saved_state_is_that_of_its_step,
    old_checkpoints_are_deleted,
    the_best_checkpoint_is_remembered,
    there_is_no_best_without_evaluations,
    the_best_checkpoint_survives_the_limit,
    a_best_step_that_was_not_saved_has_no_checkpoint,
    evaluations_by_epoch_find_saves_by_step,
    only_improvements_can_be_saved,
    the_best_model_is_loaded_at_the_end,
    the_best_by_loss_evaluates_to_its_metric,
    the_best_of_best_saves_is_loaded,
    an_unknown_metric_raises,
    save_model_writes_what_from_pretrained_reads,
    the_tokenizer_is_saved_with_the_model,
    a_feature_extractor_is_saved_with_the_model,
    saving_can_be_overridden,
    a_request_to_save_now_is_met,
    random_states_are_saved,
)
