"""TRL's trainers for preferences and rewards: each overrides parts of the Trainer of its own."""

from typing import Any

import datasets
import transformers
from transformers import TrainingArguments

from matrix import data, models
from matrix.settings import Setting

__all__ = ["TUNING"]

ARGUMENTS: dict[str, Any] = {
    "bf16": False,
    "activation_checkpointing": False,
    "max_steps": 3,
    "gradient_accumulation_steps": 2,
}


def trainer_of(name: str) -> type:
    import trl

    return getattr(trl, f"{name}Trainer")


def arguments_of(name: str, **arguments: Any) -> TrainingArguments:
    import trl

    return getattr(trl, f"{name}Config")(**arguments)


def text(index: int, width: int = 10) -> str:
    return data.source()[30 * index : 30 * index + width]


def preferences() -> datasets.Dataset:
    columns = {"prompt": 0, "chosen": 9, "rejected": 20}
    return datasets.Dataset.from_dict(
        {name: [text(start + row) for row in range(8)] for name, start in columns.items()}
    )


def answers() -> datasets.Dataset:
    return preferences().remove_columns("prompt")


def prompts() -> datasets.Dataset:
    return preferences().select_columns("prompt")


def variety(completions: list[str], **columns: Any) -> list[float]:
    """A reward: how many different letters a completion has."""
    return [float(len(set(completion))) for completion in completions]


def judge() -> transformers.PreTrainedModel:
    """A model that gives one number for a text."""
    return transformers.LlamaForSequenceClassification(models.llama_config(num_labels=1))


def words() -> dict[str, Any]:
    return {"processing_class": models.tokenizer()}


TUNING: tuple[Setting, ...] = (
    Setting(
        name="direct preference optimization",
        trainer=lambda: trainer_of("DPO"),
        arguments_class=lambda **arguments: arguments_of("DPO", **arguments),
        arguments=ARGUMENTS | {"max_length": 32},
        model=models.llama,
        rows=preferences,
        collate=None,
        extra=lambda: {**words(), "ref_model": models.llama()},
        falls_back={"training_step", "compute_loss"},
    ),
    Setting(
        name="reward modelling",
        trainer=lambda: trainer_of("Reward"),
        arguments_class=lambda **arguments: arguments_of("Reward", **arguments),
        arguments=ARGUMENTS | {"max_length": 32},
        model=judge,
        rows=answers,
        collate=None,
        extra=words,
        falls_back={"training_step", "compute_loss"},
    ),
    Setting(
        name="group relative policy optimization",
        trainer=lambda: trainer_of("GRPO"),
        arguments_class=lambda **arguments: arguments_of("GRPO", **arguments),
        arguments=ARGUMENTS | {"num_generations": 2, "max_completion_length": 6},
        model=models.llama,
        rows=prompts,
        collate=None,
        extra=lambda: {**words(), "reward_funcs": variety},
        falls_back={"training_step", "compute_loss", "_prepare_inputs"},
        watch_forward=False,
    ),
)
