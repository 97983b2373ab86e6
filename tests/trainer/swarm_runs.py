"""What a trainer in a swarm is held against: one process that has the rows of all peers, round by round."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from small_runs import gpt2, run
from torch import Tensor
from transformers import TrainerCallback

__all__ = ["EXACT", "Notes", "one_process", "without_dropout"]

EXACT: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.1}
"""AdamW makes a gradient of any size a step of one size, and so differences in the last bits of small ones large."""


class Notes(TrainerCallback):
    """Writes down which rows the model trained on in each step."""

    def __init__(self) -> None:
        self.steps: list[list[Tensor]] = [[]]

    def watch(self, trainer: Any) -> None:
        """From now on."""
        trainer.model.register_forward_pre_hook(self.take, with_kwargs=True)
        trainer.add_callback(self)

    def take(self, model: Any, arguments: Any, named: dict[str, Any]) -> None:
        self.steps[-1].append(named["input_ids"].clone())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append([])


def without_dropout() -> Any:
    """A GPT-2 of one layer; dropout would draw other numbers in every process."""
    model = gpt2()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def one_process(folder: Path, rounds: Sequence[Tensor], **settings: Any) -> Any:
    """transformers' own trainer after a step on each of `rounds`, rows[n, LENGTH]."""
    return run(
        folder,
        cls=transformers.Trainer,
        model=without_dropout(),
        data=[{"input_ids": rows} for rows in rounds],
        collate=lambda samples: {"input_ids": samples[0]["input_ids"], "labels": samples[0]["input_ids"]},
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        max_steps=len(rounds),
        save_strategy="no",
        train_sampling_strategy="sequential",
        **settings,
    )
