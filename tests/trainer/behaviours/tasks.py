"""What the checks train: a line of two scalars, a GPT-2 of width 16, and trainers with short names for their settings.

A run of the line takes a few milliseconds per step, almost all of it the Trainer's.
"""

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

__all__ = [
    "VOCABULARY",
    "Events",
    "Line",
    "LineConfig",
    "PretrainedLine",
    "Stream",
    "line_rows",
    "llama_model",
    "logged",
    "losses",
    "near",
    "said",
    "text_model",
    "text_rows",
    "tokenizer",
    "trainer",
    "weights",
]

VOCABULARY = 48
TRAINER_KEYWORDS = frozenset(inspect.signature(transformers.Trainer.__init__).parameters) - {"self", "args", "model"}


def _line_outputs(slope: nn.Parameter, intercept: nn.Parameter, x: torch.Tensor, labels: torch.Tensor | None) -> dict:
    predictions = x * slope + intercept
    if labels is None:
        return {"predictions": predictions}
    return {"loss": nn.functional.mse_loss(predictions, labels), "predictions": predictions}


class Line(nn.Module):
    """labels[B] = slope * x[B] + intercept, mean squared error; a plain module without a config."""

    def __init__(self, slope: float = 0.0, intercept: float = 0.0) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(slope))
        self.intercept = nn.Parameter(torch.tensor(intercept))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict:
        return _line_outputs(self.slope, self.intercept, x, labels)


class LineConfig(PreTrainedConfig):
    model_type = "line"

    def __init__(self, slope: float = 0.0, intercept: float = 0.0, **settings: Any) -> None:
        super().__init__(**settings)
        self.slope = slope
        self.intercept = intercept


class PretrainedLine(PreTrainedModel):
    """`Line` that can be saved and loaded like the library's models."""

    config_class = LineConfig
    base_model_prefix = "line"
    main_input_name = "x"

    def __init__(self, config: LineConfig | None = None, **settings: Any) -> None:
        super().__init__(config or LineConfig(**settings))
        self.slope = nn.Parameter(torch.tensor(float(self.config.slope)))
        self.intercept = nn.Parameter(torch.tensor(float(self.config.intercept)))
        self.post_init()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict:
        return _line_outputs(self.slope, self.intercept, x, labels)


def line_rows(count: int = 32, *, seed: int = 7, **more: Any) -> list[dict[str, Any]]:
    """`count` noisy points of the line 3 x - 1 as rows {"x", "labels"} of float32 scalars, with the columns of `more`."""
    random = np.random.default_rng(seed)
    x = random.normal(size=count).astype(np.float32)
    y = (3 * x - 1 + random.normal(scale=0.05, size=count)).astype(np.float32)
    return [{"x": x[at], "labels": y[at], **more} for at in range(count)]


class Stream(torch.utils.data.IterableDataset):
    """Rows one after the other, without a length; `once` makes it run dry for good after the first pass."""

    def __init__(self, rows: list[dict[str, Any]], *, once: bool = False) -> None:
        self.rows = rows
        self.left = iter(rows) if once else None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from self.rows if self.left is None else self.left


def text_model(**config: Any) -> GPT2LMHeadModel:
    """GPT-2 of one layer and width 16, seeded."""
    torch.manual_seed(11)
    shape = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**(shape | {"bos_token_id": 1, "eos_token_id": 1} | config)))


def llama_model() -> LlamaForCausalLM:
    """Llama of one layer and width 16, seeded; unlike GPT-2's, its loss is known to the library as one that shifts."""
    torch.manual_seed(11)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **shape))


def text_rows(count: int = 16, length: int = 12, *, ragged: bool = False, seed: int = 5) -> list[dict[str, Any]]:
    """Rows of token ids of 2..VOCABULARY-1 whose labels are the ids; `ragged` masks a random part of the labels."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        tokens = random.integers(2, VOCABULARY, size=length)
        labels = tokens.copy()
        if ragged:
            labels[: random.integers(0, length - 1)] = -100
        rows.append({"input_ids": tokens.tolist(), "labels": labels.tolist()})
    return rows


def tokenizer(**special: Any) -> PreTrainedTokenizerFast:
    """Words w0 .. w{VOCABULARY-1} by their number; <pad> is 0 and </s> is 1."""
    words = {"<pad>": 0, "</s>": 1} | {f"w{number}": number for number in range(2, VOCABULARY)}
    model = Tokenizer(models.WordLevel(words, unk_token="</s>"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens = {"pad_token": "<pad>", "eos_token": "</s>"} | special
    return PreTrainedTokenizerFast(tokenizer_object=model, **tokens)


def trainer(trainer_class: type[Any], model: nn.Module | None = None, **settings: Any) -> Any:
    """A trainer of `model` (a new `PretrainedLine`) on 32 rows in batches of 8 for one epoch, as `settings` have it.

    `settings` are keywords of the trainer and of its arguments together.
    """
    given = {name: settings.pop(name) for name in TRAINER_KEYWORDS & settings.keys()}
    if model is None and "model_init" not in given:
        model = PretrainedLine()
    given.setdefault("train_dataset", line_rows())
    defaults = {
        "output_dir": "out",
        "learning_rate": 0.1,
        "num_train_epochs": 1,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "steps" if "save_steps" in settings else "no",
    }
    arguments = settings.pop("arguments", transformers.TrainingArguments)
    return trainer_class(model=model, args=arguments(**(defaults | settings)), **given)


def weights(trained: Any) -> dict[str, torch.Tensor]:
    """Copies of the parameters of a trainer's model, or of a model, by name."""
    model = trained if isinstance(trained, nn.Module) else trained.model
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def near(one: Any, other: Any, tolerance: float = 1e-6) -> bool:
    """Whether all parameters of two trainers or models agree within `tolerance`."""
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(
        torch.allclose(first[name], second[name], rtol=tolerance, atol=tolerance) for name in first
    )


def logged(trained: Any, key: str) -> list[Any]:
    """The values of `key` in the log history, in order."""
    return [entry[key] for entry in trained.state.log_history if key in entry]


def losses(trained: Any) -> list[float]:
    """The training losses that were logged."""
    return logged(trained, "loss")


class Events(transformers.TrainerCallback):
    """Writes down each event that it is told of with the step it happened at."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    @property
    def names(self) -> list[str]:
        """The events without their steps and without the leading on_."""
        return [name for name, _ in self.seen]


def _noting(event: str) -> Any:
    def note(self: Events, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.seen.append((event.removeprefix("on_"), state.global_step))

    return note


for _event in [name for name in vars(transformers.TrainerCallback) if name.startswith("on_")]:
    setattr(Events, _event, _noting(_event))


@contextmanager
def said(level: int = logging.WARNING) -> Iterator[list[str]]:
    """What the library and bareloop log at `level` or above inside the block."""
    heard: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    listener = Listener(level)
    levels = {logger: logger.level for logger in map(logging.getLogger, ("transformers", "bareloop"))}
    for logger in levels:
        logger.addHandler(listener)
        logger.setLevel(level)
    try:
        yield heard
    finally:
        for logger, before in levels.items():
            logger.setLevel(before)
            logger.removeHandler(listener)
