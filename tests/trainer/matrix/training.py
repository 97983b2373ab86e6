"""What a step is made of: windows, clipping, optimizers, schedulers, losses, precision, logging."""

import torch

from matrix import data, models
from matrix.settings import (
    BEST,
    CLASSES,
    DIGITS,
    EVALUATED,
    Setting,
)
from matrix.subclasses import (
    Modal,
    batch_seen_by_flops,
    loss_sum,
    optimizer_of_its_own,
    scaling,
)

__all__ = ["TRAINING"]

TRAINING: tuple[Setting, ...] = (
    # windows and epochs
    Setting(name="plain"),
    Setting(
        name="accumulation of 4, ragged epochs",
        rows=lambda: data.words(22),
        arguments={"gradient_accumulation_steps": 4, "max_steps": -1, "num_train_epochs": 2},
    ),
    Setting(
        name="accumulation of 8, longer than the epoch", arguments={"gradient_accumulation_steps": 8, "max_steps": 3}
    ),
    Setting(
        name="accumulation of 3, max_steps in mid-epoch",
        rows=lambda: data.words(22),
        arguments={"gradient_accumulation_steps": 3},
    ),
    Setting(name="one and a half epochs", arguments={"max_steps": -1, "num_train_epochs": 1.5}),
    Setting(name="last batch dropped", rows=lambda: data.words(9), arguments={"dataloader_drop_last": True}),
    Setting(name="last batch smaller", rows=lambda: data.words(9)),
    # clipping
    Setting(name="no clipping", arguments={"max_grad_norm": 0.0}),
    Setting(name="no clipping, logged every third step", arguments={"max_grad_norm": 0.0, "logging_steps": 3}),
    Setting(name="hard clipping", arguments={"max_grad_norm": 0.01, "gradient_accumulation_steps": 2}),
    # optimizers
    Setting(name="adamw", arguments={"optim": "adamw_torch", "weight_decay": 0.1, "adam_beta2": 0.95}),
    Setting(name="adamw, fused", arguments={"optim": "adamw_torch_fused", "weight_decay": 0.1}),
    Setting(name="adafactor", arguments={"optim": "adafactor"}),
    Setting(name="sgd", arguments={"optim": "sgd"}),
    Setting(name="adagrad", arguments={"optim": "adagrad"}),
    Setting(name="rmsprop", arguments={"optim": "rmsprop"}),
    Setting(name="optimizer by class", extra=lambda: {"optimizer_cls_and_kwargs": (torch.optim.NAdam, {"lr": 0.01})}),
    Setting(
        name="optimizer with modes",
        arguments=BEST | {"save_strategy": "steps", "save_steps": 1, "eval_steps": 1},
        extra=lambda: {"optimizer_cls_and_kwargs": (Modal, {"lr": 0.1})},
        **EVALUATED,
    ),
    Setting(name="optimizer and scheduler of its own", subclass=optimizer_of_its_own),
    # schedulers
    Setting(name="cosine with warm-up", arguments={"lr_scheduler_type": "cosine", "warmup_steps": 2}),
    Setting(name="constant with warm-up", arguments={"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.4}),
    Setting(
        name="reduce on plateau",
        arguments={
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "lr_scheduler_kwargs": {"patience": 0, "threshold": 1.0},
            "eval_strategy": "steps",
            "eval_steps": 2,
        },
        **EVALUATED,
    ),
    Setting(
        name="greedy", arguments={"lr_scheduler_type": "greedy", "eval_strategy": "steps", "eval_steps": 2}, **EVALUATED
    ),
    # losses
    Setting(name="label smoothing", arguments={"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2}),
    Setting(
        name="label smoothing, batch seen by floating_point_ops",
        arguments={"label_smoothing_factor": 0.1, "include_num_input_tokens_seen": "all"},
        subclass=batch_seen_by_flops,
        falls_back={"floating_point_ops"},
    ),
    Setting(name="label smoothing of a classifier", arguments={"label_smoothing_factor": 0.1}, **CLASSES),
    Setting(name="classifier", arguments={"gradient_accumulation_steps": 2}, **CLASSES),
    Setting(
        name="compute_loss_func",
        arguments={"gradient_accumulation_steps": 3},
        extra=lambda: {"compute_loss_func": loss_sum},
    ),
    Setting(
        name="tokens not averaged across devices",
        arguments={"average_tokens_across_devices": False, "gradient_accumulation_steps": 2},
    ),
    Setting(name="model without loss keywords", arguments={"gradient_accumulation_steps": 4}, **DIGITS),
    Setting(name="model that answers in tuples", **DIGITS | {"model": models.answering_in_tuples}),
    Setting(
        name="batch without labels",
        model=models.without_labels,
        collate=data.padded_without_labels,
        arguments={"gradient_accumulation_steps": 2, "remove_unused_columns": False},
    ),
    Setting(
        name="batch of a tokenizer's type",
        collate=data.padded_as_encoding,
        arguments={"gradient_accumulation_steps": 2},
    ),
    Setting(
        name="batch with more than tensors",
        model=models.taking_extras,
        collate=data.padded_with_extras,
        arguments={"remove_unused_columns": False},
    ),
    # precision
    Setting(name="bf16", arguments={"bf16": True, "gradient_accumulation_steps": 2}),
    Setting(
        name="bf16 with evaluation", arguments={"bf16": True, "eval_strategy": "steps", "eval_steps": 3}, **EVALUATED
    ),
    Setting(name="fp16 as accelerate has it on a CPU", arguments={"fp16": True}),
    Setting(
        name="fp16 with a scaler, first steps skipped",
        arguments={
            "fp16": True,
            "gradient_accumulation_steps": 2,
            "max_steps": 8,
            "save_strategy": "steps",
            "save_steps": 4,
        },
        subclass=scaling,
    ),
    # losses that are not finite
    Setting(
        name="nan in one micro-step",
        arguments={"logging_steps": 2},
        nan_steps=1,
        **DIGITS | {"model": models.exploding(float("nan"), 3)},
    ),
    Setting(
        name="nan from the first step",
        arguments={"logging_steps": 3, "gradient_accumulation_steps": 2},
        nan_steps=12,
        **DIGITS | {"model": models.exploding(float("nan"), *range(12))},
    ),
    Setting(
        name="nan and inf, accumulated",
        arguments={"logging_steps": 2, "gradient_accumulation_steps": 3},
        nan_steps=4,
        **DIGITS | {"model": models.exploding(float("-inf"), 1, 4, 5, 17)},
    ),
    Setting(
        name="nan, logged at the end of the epoch",
        arguments={"logging_strategy": "epoch", "max_steps": -1, "num_train_epochs": 2},
        nan_steps=2,
        **DIGITS | {"model": models.exploding(float("inf"), 2, 5)},
    ),
    Setting(
        name="nan, filter off",
        arguments={"logging_steps": 2, "logging_nan_inf_filter": False},
        **DIGITS | {"model": models.exploding(float("nan"), 3)},
    ),
    # logging
    Setting(name="logged every third step", arguments={"logging_steps": 3, "max_steps": 7}),
    Setting(name="logged at the first step", arguments={"logging_steps": 4, "logging_first_step": True}),
    Setting(name="logged every epoch", arguments={"logging_strategy": "epoch", "max_steps": -1, "num_train_epochs": 2}),
    Setting(name="never logged", arguments={"logging_strategy": "no"}),
    Setting(name="logged by a fraction of the steps", arguments={"logging_steps": 0.4}),
    Setting(
        name="progress bar", arguments={"disable_tqdm": False, "eval_strategy": "steps", "eval_steps": 3}, **EVALUATED
    ),
    Setting(
        name="tokens counted", arguments={"include_num_input_tokens_seen": "all", "gradient_accumulation_steps": 2}
    ),
    Setting(name="real tokens counted", arguments={"include_num_input_tokens_seen": "non_padding"}),
    Setting(name="memory metrics", arguments={"skip_memory_metrics": False, "max_steps": 2}),
    Setting(name="cache emptied", arguments={"torch_empty_cache_steps": 2}, runs_stock="torch_empty_cache_steps"),
)
