"""Arguments: what they become, and which combinations are refused when the trainer is built."""

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from behaviours.behaviour import in_area
from behaviours.tasks import Line, PretrainedLine, Stream, line_rows, logged, losses, near, trainer

__all__ = ["BEHAVIOURS"]


def training_leaves_the_arguments_as_given(cls: type[Any]) -> None:
    """Training changes no field of the arguments."""
    built = trainer(cls, logging_steps=2)
    before = built.args.to_dict()
    built.train()
    assert built.args.to_dict() == before


def intervals_can_be_fractions_of_all_steps(cls: type[Any]) -> None:
    """logging_steps, eval_steps and save_steps below 1 are shares of the number of steps."""
    built = trainer(
        cls,
        max_steps=8,
        logging_steps=0.25,
        eval_steps=0.5,
        save_steps=0.5,
        eval_strategy="steps",
        eval_dataset=line_rows(8),
    )
    built.train()
    assert (built.state.logging_steps, built.state.eval_steps, built.state.save_steps) == (2, 4, 4)
    steps = [entry["step"] for entry in built.state.log_history if "loss" in entry]
    assert steps == [2, 4, 6, 8]
    assert [entry["step"] for entry in built.state.log_history if "eval_loss" in entry] == [4, 8]
    assert sorted(os.listdir("out")) == ["checkpoint-4", "checkpoint-8"]


def evaluation_takes_the_logging_interval_when_it_has_none(cls: type[Any]) -> None:
    """eval_strategy="steps" without eval_steps evaluates every logging_steps."""
    built = trainer(cls, max_steps=6, logging_steps=3, eval_strategy="steps", eval_dataset=line_rows(8))
    built.train()
    assert [entry["step"] for entry in built.state.log_history if "eval_loss" in entry] == [3, 6]


def dictionaries_can_be_given_as_json(cls: type[Any]) -> None:
    """Arguments that hold dictionaries take JSON text, as the command line gives it."""
    built = trainer(cls, lr_scheduler_type="polynomial", lr_scheduler_kwargs='{"power": 3.0}', logging_steps=1)
    built.train()
    assert logged(built, "learning_rate")[1] == pytest.approx(0.1 * 0.75**3, rel=1e-4)


def warm_up_can_be_a_fraction(cls: type[Any]) -> None:
    """warmup_steps below 1 is the share of steps in which the learning rate rises."""
    built = trainer(cls, max_steps=8, warmup_steps=0.5, logging_steps=1)
    built.train()
    rates = logged(built, "learning_rate")
    assert rates[:5] == pytest.approx([0, 0.025, 0.05, 0.075, 0.1])
    assert rates[5] < rates[4]


def metric_for_the_best_model_defaults_to_the_loss(cls: type[Any]) -> None:
    """load_best_model_at_end without a metric takes the evaluation loss, smaller is better."""
    built = trainer(
        cls, load_best_model_at_end=True, eval_strategy="epoch", save_strategy="epoch", eval_dataset=line_rows(8)
    )
    assert (built.args.metric_for_best_model, built.args.greater_is_better) == ("loss", False)
    built.train()
    assert built.state.best_metric == logged(built, "eval_loss")[0]


def no_arguments_at_all_train_with_defaults(cls: type[Any]) -> None:
    """A trainer built without arguments writes into tmp_trainer and trains three epochs in batches of 8."""
    with patch.dict(os.environ, ACCELERATE_USE_CPU="true"):
        built = cls(PretrainedLine(), train_dataset=line_rows(16))
        built.train()
    assert built.args.output_dir == "tmp_trainer"
    assert built.state.global_step == 6


def looking_for_overflow_does_not_disturb(cls: type[Any]) -> None:
    """debug="underflow_overflow" watches every module's values and changes none of them."""
    watched, plain = trainer(cls, debug="underflow_overflow"), trainer(cls)
    watched.train()
    plain.train()
    assert near(watched, plain, 0)


def emptying_the_cache_does_not_disturb(cls: type[Any]) -> None:
    """torch_empty_cache_steps changes no result."""
    emptied, plain = trainer(cls, torch_empty_cache_steps=1, logging_steps=1), trainer(cls, logging_steps=1)
    emptied.train()
    plain.train()
    assert losses(emptied) == losses(plain)


def output_folder_is_made_when_the_trainer_is_built(cls: type[Any]) -> None:
    """The output folder exists once there is a trainer, whether it saves or not."""
    trainer(cls, output_dir="some/where")
    assert os.path.isdir("some/where")


def the_model_can_come_first_without_a_name(cls: type[Any]) -> None:
    """Model, arguments, collator, training and evaluation data can be given by position, in this order."""
    template = trainer(cls)
    built = cls(Line(), template.args, template.data_collator, line_rows(16), line_rows(8))
    assert built.train().global_step == 2
    assert "eval_loss" in built.evaluate()


class NoLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict:
        return {"scores": x * self.weight}


def _collates(features: list[Any]) -> dict:
    raise AssertionError("never called")


def _refused(name: str, says: str, kind: type[Exception], act: Callable[[type[Any]], Any], match: str = "") -> Any:
    """A check that `act(trainer_class)` raises `kind` with a message that has `match` in it."""

    def check(cls: type[Any]) -> None:
        with pytest.raises(kind, match=match):
            act(cls)

    check.__name__ = f"refused_{name}"
    check.__doc__ = says
    return check


def _with(**settings: Any) -> Callable[[type[Any]], Any]:
    return lambda cls: trainer(cls, **settings)


def _optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(Line().parameters(), lr=0.1)


REFUSED = (
    _refused(
        "evaluation_without_data",
        "Evaluation during training without an evaluation set is refused when the trainer is built.",
        ValueError,
        _with(eval_strategy="steps", eval_steps=2),
    ),
    _refused(
        "best_model_with_different_strategies",
        "Loading the best model needs evaluation and saving to have the same strategy.",
        ValueError,
        _with(load_best_model_at_end=True, eval_strategy="steps", eval_steps=2, save_strategy="epoch"),
    ),
    _refused(
        "best_model_saved_between_evaluations",
        "Loading the best model needs save_steps to be a multiple of eval_steps.",
        ValueError,
        _with(load_best_model_at_end=True, eval_strategy="steps", eval_steps=4, save_steps=6),
    ),
    _refused(
        "saving_the_best_of_no_metric",
        "Saving the best checkpoints needs a metric.",
        ValueError,
        _with(save_strategy="best", eval_strategy="epoch", eval_dataset=[]),
    ),
    _refused("two_half_precisions", "fp16 and bf16 together are refused.", ValueError, _with(fp16=True, bf16=True)),
    _refused(
        "plateau_without_evaluation",
        "A scheduler that waits for a plateau of the evaluation needs evaluations.",
        ValueError,
        _with(lr_scheduler_type="reduce_lr_on_plateau"),
    ),
    _refused("logging_every_0_steps", "A logging interval of 0 is refused.", ValueError, _with(logging_steps=0)),
    _refused(
        "logging_every_2_5_steps", "An interval above 1 has to be a whole number.", ValueError, _with(logging_steps=2.5)
    ),
    _refused(
        "unknown_strategy", "A strategy that does not exist is refused.", ValueError, _with(eval_strategy="sometimes")
    ),
    _refused("negative_warm_up", "A negative warm-up is refused.", ValueError, _with(warmup_steps=-1)),
    _refused(
        "cache_emptied_every_0_steps",
        "torch_empty_cache_steps=0 is refused.",
        ValueError,
        _with(torch_empty_cache_steps=0),
    ),
    _refused(
        "prefetch_without_workers",
        "A prefetch factor without loader workers is refused.",
        ValueError,
        _with(dataloader_prefetch_factor=2),
    ),
    _refused(
        "no_model", "A trainer without a model and without model_init is refused.", RuntimeError, lambda cls: cls()
    ),
    _refused(
        "model_and_model_init",
        "A model and a function that makes one are not taken together.",
        ValueError,
        lambda cls: trainer(cls, Line(), model_init=Line),
    ),
    _refused(
        "model_init_and_optimizer",
        "An optimizer is not taken beside model_init, whose parameters do not exist yet.",
        RuntimeError,
        lambda cls: trainer(cls, model_init=Line, optimizers=(_optimizer(), None)),
    ),
    _refused(
        "two_sources_of_the_optimizer",
        "An optimizer and an optimizer class are not taken together.",
        RuntimeError,
        lambda cls: trainer(cls, optimizers=(_optimizer(), None), optimizer_cls_and_kwargs=(torch.optim.SGD, {})),
    ),
    _refused(
        "batch_metrics_without_a_flag",
        "batch_eval_metrics needs a compute_metrics that takes compute_result.",
        ValueError,
        _with(batch_eval_metrics=True, compute_metrics=lambda prediction: {}),
        match="compute_result",
    ),
    _refused(
        "epochs_over_a_stream",
        "Training by epochs on data without a length is refused.",
        ValueError,
        _with(train_dataset=Stream(line_rows())),
        match="max_steps",
    ),
    _refused(
        "collator_that_is_no_function",
        "An object with collate_batch that cannot be called is refused as a collator.",
        TypeError,
        _with(data_collator=type("Old", (), {"collate_batch": _collates})()),
    ),
    _refused(
        "training_without_data",
        "train() without a training set raises.",
        ValueError,
        lambda cls: trainer(cls, train_dataset=None).train(),
    ),
    _refused(
        "evaluating_without_data",
        "evaluate() without an evaluation set raises.",
        ValueError,
        lambda cls: trainer(cls).evaluate(),
    ),
    _refused(
        "model_without_a_loss",
        "A model that returns no loss raises in training, naming what it returned.",
        ValueError,
        lambda cls: trainer(cls, NoLoss()).train(),
        match="scores",
    ),
)

BEHAVIOURS = in_area(
    "arguments",
    training_leaves_the_arguments_as_given,
    intervals_can_be_fractions_of_all_steps,
    evaluation_takes_the_logging_interval_when_it_has_none,
    dictionaries_can_be_given_as_json,
    warm_up_can_be_a_fraction,
    metric_for_the_best_model_defaults_to_the_loss,
    no_arguments_at_all_train_with_defaults,
    looking_for_overflow_does_not_disturb,
    emptying_the_cache_does_not_disturb,
    output_folder_is_made_when_the_trainer_is_built,
    the_model_can_come_first_without_a_name,
    *REFUSED,
)
