"""Runs of a few steps on real text, for the tests of checkpoints: a GPT-2 of one layer with dropout, and what is left.

Dropout makes every number that is drawn once too often or too seldom show; `mask` does in the process that reads.
"""

import hashlib
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments, set_seed

from bareloop.trainer.hf import Trainer
from bareloop.trainer.options import LeanOptions

__all__ = [
    "At",
    "Lines",
    "Outcome",
    "Stream",
    "differences",
    "gpt2",
    "hashes",
    "mask",
    "outcome",
    "rows",
    "run",
    "stack",
    "trainer",
]

LENGTH, VOCABULARY = 16, 128
CLOCK = ("_runtime", "_per_second")


def rows(count: int) -> list[Tensor]:
    """`count` rows tokens[LENGTH]: the bytes of a module of the standard library."""
    text = Path(sysconfig.get_path("stdlib"), "ast.py").read_bytes()[: count * LENGTH]
    return list(torch.tensor([byte % VOCABULARY for byte in text]).split(LENGTH))


class Lines(Dataset):
    """A data set that writes down what is read of it, in whatever process."""

    def __init__(self, count: int, log: Path | None = None) -> None:
        self.rows = rows(count)
        self.log = log

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        _note(self.log, index)
        return {"input_ids": self.rows[index]}


class Stream(IterableDataset):
    """The same as an iterable that workers share; with a state, or (`forgets`) without."""

    def __init__(self, count: int, log: Path | None = None, *, forgets: bool = False) -> None:
        self.rows = rows(count)
        self.log = log
        self.position = 0
        if not forgets:
            self.state_dict = self._state_dict
            self.load_state_dict = self._load_state_dict

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = torch.utils.data.get_worker_info()
        first, every = (0, 1) if worker is None else (worker.id, worker.num_workers)
        while self.position * every + first < len(self.rows):
            index = self.position * every + first
            self.position += 1
            _note(self.log, index)
            yield {"input_ids": self.rows[index]}
        self.position = 0

    def _state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def _note(log: Path | None, index: int) -> None:
    if log is not None:
        with log.open("a", encoding="utf-8") as file:
            file.write(f"{index}\n")


def stack(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """tokens[batch, LENGTH], and the same as labels."""
    tokens = torch.stack([sample["input_ids"] for sample in samples])
    return {"input_ids": tokens, "labels": tokens}


def mask(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The same with one in five of the tokens replaced, by torch's global generator; labels as they were."""
    tokens = stack(samples)["labels"]
    return {"input_ids": tokens.masked_fill(torch.rand(tokens.shape) < 0.2, 0), "labels": tokens}


def gpt2(layers: int = 1, width: int = 16) -> GPT2LMHeadModel:
    set_seed(3)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=width,
        n_layer=layers,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return GPT2LMHeadModel(config)


def trainer(
    folder: Path,
    *,
    cls: type = Trainer,
    data: Any = None,
    model: Any = None,
    options: Any = None,
    collate: Any = stack,
    **settings: Any,
) -> Any:
    """A trainer of 10 steps, 6 of them in the first epoch: 24 rows, batches of 2, two to a step."""
    defaults = {
        "output_dir": str(folder),
        "max_steps": 10,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": 3,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "remove_unused_columns": False,
    }
    extra = {} if options is None else {"lean_options": LeanOptions(**options)}
    return cls(
        model=gpt2() if model is None else model,
        args=TrainingArguments(**(defaults | settings)),
        train_dataset=Lines(24) if data is None else data,
        eval_dataset=Lines(6) if "eval_strategy" in settings else None,
        data_collator=collate,
        **extra,
    )


def run(
    folder: Path, callback: TrainerCallback | None = None, resume: str | bool | None = None, **settings: Any
) -> Any:
    """The trainer of a run that is over."""
    made = trainer(folder, **settings)
    if callback is not None:
        made.add_callback(callback)
    made.train(resume_from_checkpoint=resume)
    return made


class At(TrainerCallback):
    """Calls `function` at the end of step `step`, after what the trainer does then is decided."""

    def __init__(self, step: int, function: Callable[[], None]) -> None:
        self.step, self.function = step, function

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.function()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run left in memory."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Any]
    log: list[dict[str, float]]
    """Without the summary of the run, which is of the steps of one `train()`, and without what the clock says."""


def outcome(of: Any) -> Outcome:
    return Outcome(
        weights={name: tensor.clone() for name, tensor in of.model.state_dict().items()},
        optimizer=of.optimizer.state_dict()["state"],
        log=[
            {name: value for name, value in line.items() if not name.endswith(CLOCK)}
            for line in of.state.log_history
            if "train_runtime" not in line
        ],
    )


def differences(one: Outcome, other: Outcome) -> list[str]:
    """Names of what is not equal to the bit."""
    found = [name for name in one.weights if not torch.equal(one.weights[name], other.weights[name])]
    for index, state in one.optimizer.items():
        for name, value in state.items():
            if not torch.equal(value, other.optimizer[index][name]):
                found.append(f"{name} of {index}")
    lines = zip(one.log, other.log, strict=False)
    found.extend(f"log: {line} and {its}" for line, its in lines if line != its)
    if len(one.log) != len(other.log):
        found.append(f"log: {len(one.log)} and {len(other.log)} lines")
    return found


def hashes(folder: Path) -> dict[str, str]:
    """Every file below `folder`, by name."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
