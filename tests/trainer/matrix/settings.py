"""`Setting`: one way to train, as a record; and what several settings share."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import transformers
from torch import nn
from transformers import TrainingArguments

from matrix import data, models, scripts
from matrix.journal import Journal
from matrix.recorder import Run
from matrix.subclasses import Subclass, nothing

__all__ = [
    "BEST",
    "CLASSES",
    "DIGITS",
    "EVALUATED",
    "HOT",
    "PRIVATE",
    "PUBLIC",
    "SAVED",
    "SFT",
    "SFT_ARGUMENTS",
    "TOUCHING",
    "Setting",
    "seq2seq_trainer",
]


def stock_trainer() -> type:
    return transformers.Trainer


def seq2seq_trainer() -> type:
    return transformers.Seq2SeqTrainer


def sft_trainer() -> type:
    from trl import SFTTrainer

    return SFTTrainer


def sft_arguments(**arguments: Any) -> TrainingArguments:
    from trl import SFTConfig

    return SFTConfig(**arguments)


def leave(trainer: transformers.Trainer, journal: Journal) -> None:
    """Leaves the trainer as it was built."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One way to train, that stock and lean must go through alike.

    Each run builds all of it anew, so that neither can leave anything to the other.
    """

    name: str

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """TrainingArguments beside the recorder's."""

    model: Callable[[], nn.Module | None] = models.gpt2

    rows: Callable[[], Any] = data.words

    held_out: Callable[[], Any] = lambda: None

    collate: Callable[[list], Any] | None = data.padded

    extra: Callable[[], dict[str, Any]] = dict
    """More keywords of the Trainer."""

    callbacks: Callable[[], list] = list

    subclass: Subclass = nothing
    """What the user wrote on top; also put around the lean class, as in `class Mine(bareloop.Trainer)`."""

    prepare: Callable[[transformers.Trainer, Journal], None] = leave
    """What the user does to the trainer between building and training."""

    script: Callable[[Run], None] = scripts.once

    trainer: Callable[[], type] = stock_trainer

    arguments_class: Callable[..., TrainingArguments] = TrainingArguments

    raises: str | None = None
    """Part of the message of the error that training ends with."""

    runs_stock: str | None = None
    """Why a lean trainer runs the stock loop here, as a part of the reason that it gives; None where it is lean."""

    falls_back: Collection[str] = ()
    """The other parts that are not lean here: those that the user overrides. Events aside, when they are watched."""

    wrapped: str | None = None
    """Class of the model that the trainer trains, on several processes: `DistributedDataParallel` unless declared."""

    watch_forward: bool = True
    """Hooks on the model write each forward; off where a hook would change what is run."""

    nan_steps: int = 0
    """Micro-steps whose loss is not finite, which the report must name."""


DIGITS: dict[str, Any] = {"model": models.Digits, "rows": data.digits, "collate": None}
CLASSES: dict[str, Any] = {
    "model": models.bert,
    "rows": lambda: [{**row, "labels": len(row["labels"]) % 3} for row in data.uniform()],
    "collate": None,
}
EVALUATED: dict[str, Any] = {"held_out": data.held_out}
BEST: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
SAVED: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "gradient_accumulation_steps": 2}
SFT: dict[str, Any] = {
    "trainer": sft_trainer,
    "arguments_class": sft_arguments,
    "model": models.llama,
    "rows": data.sentences,
    "collate": None,
    "falls_back": ("training_step", "compute_loss"),
}
SFT_ARGUMENTS: dict[str, Any] = {"max_length": 16, "bf16": False, "activation_checkpointing": False}

PUBLIC = (
    "training_step",
    "compute_loss",
    "get_batch_samples",
    "floating_point_ops",
    "log",
    "compute_loss_context_manager",
    "autocast_smart_context_manager",
    "get_train_dataloader",
    "create_optimizer",
    "create_scheduler",
    "store_flos",
    "evaluate",
    "evaluation_loop",
    "prediction_step",
    "save_model",
)
PRIVATE = (
    "_prepare_inputs",
    "_prepare_input",
    "_get_num_items_in_batch",
    "_clip_grad_norm",
    "_get_grad_norm",
    "_track_num_input_tokens",
    "_get_learning_rate",
    "_maybe_log_save_evaluate",
    "_save_checkpoint",
    "_get_train_sampler",
    "_prepare_context_parallel_inputs",
    "_inner_training_loop",
    "_run_epoch",
)
HOT = frozenset(
    {
        "training_step",
        "compute_loss",
        "compute_loss_context_manager",
        "autocast_smart_context_manager",
        "get_batch_samples",
        "floating_point_ops",
        "_prepare_inputs",
        "_prepare_input",
        "_get_num_items_in_batch",
        "_clip_grad_norm",
        "_get_grad_norm",
        "_track_num_input_tokens",
        "_get_learning_rate",
        "_maybe_log_save_evaluate",
        "_prepare_context_parallel_inputs",
    }
)
"""Methods that the lean loop does without, unless the user overrides them: then that part is the stock one's again."""
TOUCHING: dict[str, Any] = {
    "arguments": {
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 4,
    },
    "held_out": data.held_out,
}
"""A run that comes by every method that users override."""
