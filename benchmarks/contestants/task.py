"""What all contestants train: a GPT-2 on made-up tokens, fused AdamW without weight decay, a linear schedule.

The tokens are random, since what they say costs nothing. There is no dropout: contestants take turns in one process
and share its random numbers, and their weights are compared.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, default_data_collator, get_linear_schedule_with_warmup

__all__ = ["Rows", "Setting", "Task", "gpt2", "loader", "on_all_ranks", "optimizer", "rank", "rows", "schedule"]

VOCABULARY = 2000
DIFFERENT_ROWS = 64
LEARNING_RATE = 5e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Sizes of a training."""

    layers: int = 2
    width: int = 64
    """Size of an embedding, a multiple of 32."""
    block: int = 32
    """Tokens in a row."""
    batch: int = 2
    """Rows in a micro-batch, per process."""
    accumulate: int = 1
    """Micro-batches in a step."""
    processes: int = 1
    max_norm: float = 1.0
    """Norm that gradients are clipped to; 0 for no clip."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One training of one contestant."""

    setting: Setting
    steps: int
    at_step: Callable[[], None]
    """Called at the end of each `optimizer.step()`: where a step of every contestant begins and ends."""


class Rows(Dataset[dict[str, torch.Tensor]]):
    """`count` rows of `block` tokens, which repeat after `DIFFERENT_ROWS`."""

    def __init__(self, count: int, block: int) -> None:
        made_up = torch.randint(VOCABULARY, (DIFFERENT_ROWS, block), generator=torch.Generator().manual_seed(1))
        self._rows = [{"input_ids": row, "labels": row} for row in made_up]
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self._rows[index % DIFFERENT_ROWS]


def rank() -> int:
    """This process's number among all."""
    return int(os.environ.get("RANK", "0"))


def gpt2(setting: Setting) -> GPT2LMHeadModel:
    """A GPT-2 with new weights, the same ones in every contestant."""
    torch.manual_seed(42)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=setting.block,
        n_embd=setting.width,
        n_layer=setting.layers,
        n_head=setting.width // 32,
        bos_token_id=0,
        eos_token_id=0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    # Its name tells transformers nothing of its loss, so the Trainer would count labels that the loss leaves out (the
    # first one of each row) and divide by more than the bare loop does.
    model.loss_type = "ForCausalLM"
    return model


def on_all_ranks(setting: Setting, model: nn.Module) -> nn.Module:
    """The model, under DistributedDataParallel where there are several processes."""
    return model if setting.processes == 1 else DistributedDataParallel(model)


def rows(task: Task) -> Rows:
    """As many rows as all processes together train on in all steps, and one window to spare."""
    setting = task.setting
    return Rows((task.steps + 1) * setting.accumulate * setting.batch * setting.processes, setting.block)


def loader(task: Task) -> DataLoader[dict[str, torch.Tensor]]:
    """This process's batches: every `processes`-th one, as Accelerate deals them out."""
    setting, data = task.setting, rows(task)
    own = None
    if setting.processes > 1:
        stride, first = setting.batch * setting.processes, setting.batch * rank()
        own = [index for index in range(len(data)) if first <= index % stride < first + setting.batch]
    return DataLoader(data, batch_size=setting.batch, sampler=own, collate_fn=default_data_collator)


def optimizer(task: Task, model: nn.Module) -> AdamW:
    """What the Trainer takes by default; its steps are the task's steps."""
    made = AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    made.register_step_post_hook(lambda *_: task.at_step())
    return made


def schedule(task: Task, optimizer: AdamW) -> LambdaLR:
    """The Trainer's default: linear to zero."""
    return get_linear_schedule_with_warmup(optimizer, num_warmup_steps=0, num_training_steps=task.steps)
