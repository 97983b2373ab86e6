"""What happens around the steps: evaluation, saving, resuming, data, the model, other trainers."""

from transformers import EarlyStoppingCallback, Seq2SeqTrainingArguments

from matrix import data, models, scripts
from matrix.callbacks import (
    at,
    thawed,
)
from matrix.settings import BEST, DIGITS, EVALUATED, SAVED, SFT, SFT_ARGUMENTS, Setting, seq2seq_trainer
from matrix.subclasses import (
    accuracy,
    loader_used_up,
    own_loader,
    running_accuracy,
    top_token,
)

__all__ = ["AROUND"]

AROUND: tuple[Setting, ...] = (
    # evaluation
    Setting(
        name="evaluated in steps with metrics",
        arguments={"eval_strategy": "steps", "eval_steps": 2, "max_steps": 5},
        extra=lambda: {"compute_metrics": accuracy},
        **EVALUATED,
    ),
    Setting(
        name="evaluated every epoch",
        arguments={"eval_strategy": "epoch", "max_steps": -1, "num_train_epochs": 2},
        **EVALUATED,
    ),
    Setting(
        name="evaluated at the start, then after a delay",
        arguments={"eval_on_start": True, "eval_strategy": "steps", "eval_steps": 1, "eval_delay": 3, "max_steps": 4},
        **EVALUATED,
    ),
    Setting(
        name="evaluated batch by batch",
        arguments={
            "eval_strategy": "steps",
            "eval_steps": 3,
            "batch_eval_metrics": True,
            "include_for_metrics": ["loss", "inputs"],
        },
        extra=lambda: {"compute_metrics": running_accuracy(), "preprocess_logits_for_metrics": top_token},
        **EVALUATED,
    ),
    Setting(
        name="evaluated on two sets",
        arguments={"eval_strategy": "steps", "eval_steps": 3},
        held_out=lambda: {"a": data.held_out(3), "b": data.held_out(5)},
    ),
    Setting(
        name="evaluated before and after",
        script=scripts.evaluated_after,
        extra=lambda: {"compute_metrics": accuracy},
        arguments={"max_steps": 3, "eval_accumulation_steps": 1},
        **EVALUATED,
    ),
    # saving
    Setting(
        name="saved in steps, two kept",
        arguments={"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "max_steps": 4},
    ),
    Setting(name="saved every epoch", arguments={"save_strategy": "epoch", "max_steps": -1, "num_train_epochs": 2}),
    Setting(name="weights alone saved", arguments={"save_strategy": "steps", "save_steps": 3, "save_only_model": True}),
    Setting(
        name="best model at the end, one kept",
        arguments=BEST | {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "learning_rate": 0.3},
        **EVALUATED,
    ),
    Setting(
        name="saved when best",
        arguments={
            "eval_strategy": "steps",
            "eval_steps": 1,
            "save_strategy": "best",
            "metric_for_best_model": "accuracy",
        },
        extra=lambda: {"compute_metrics": accuracy},
        **EVALUATED,
    ),
    Setting(
        name="early stopping",
        arguments=BEST | {"save_strategy": "steps", "save_steps": 1, "learning_rate": 1.0, "max_steps": 12},
        callbacks=lambda: [EarlyStoppingCallback(2)],
        **EVALUATED,
    ),
    # resuming
    Setting(name="resumed in mid-epoch", rows=lambda: data.words(16), arguments=SAVED, script=scripts.resumed),
    Setting(
        name="resumed at the end of an epoch", rows=lambda: data.words(12), arguments=SAVED, script=scripts.resumed
    ),
    Setting(
        name="resumed, ragged",
        rows=lambda: data.words(18),
        arguments=SAVED | {"gradient_accumulation_steps": 4, "max_steps": 8},
        script=scripts.resumed,
    ),
    Setting(
        name="resumed without skipping",
        rows=lambda: data.words(16),
        arguments=SAVED | {"ignore_data_skip": True},
        script=scripts.resumed,
    ),
    Setting(
        name="resumed from an earlier checkpoint",
        arguments=SAVED | {"max_steps": 4, "logging_steps": 3},
        script=scripts.continued,
    ),
    Setting(
        name="resumed with callback states",
        arguments=SAVED | BEST | {"restore_callback_states_from_checkpoint": True, "learning_rate": 0.5},
        callbacks=lambda: [EarlyStoppingCallback(9)],
        script=scripts.resumed,
        **EVALUATED,
    ),
    Setting(name="resumed at its end", arguments=SAVED | {"max_steps": 3}, script=scripts.finished_then_resumed),
    Setting(name="resumed with more steps", arguments=SAVED | {"max_steps": 5}, script=scripts.resumed_with_more_steps),
    Setting(
        name="resumed from a stream", rows=lambda: data.Endless(data.words(7)), arguments=SAVED, script=scripts.resumed
    ),
    Setting(name="trained twice", arguments={"max_steps": 3}, script=scripts.twice),
    # data
    Setting(
        name="grouped by length", rows=lambda: data.words(14), arguments={"train_sampling_strategy": "group_by_length"}
    ),
    Setting(
        name="grouped by a column of lengths",
        rows=lambda: data.table(14),
        arguments={"train_sampling_strategy": "group_by_length", "gradient_accumulation_steps": 2},
    ),
    Setting(
        name="batches balanced",
        rows=lambda: data.words(14),
        arguments={"train_sampling_strategy": "batch_rebalance", "gradient_accumulation_steps": 2},
    ),
    Setting(name="in the order of the rows", arguments={"train_sampling_strategy": "sequential"}),
    Setting(name="data seed of its own", arguments={"data_seed": 5, "max_steps": 8}),
    Setting(
        name="stream without length",
        rows=lambda: data.Endless(data.words(7)),
        arguments={"gradient_accumulation_steps": 2},
    ),
    Setting(
        name="stream shorter than max_steps",
        rows=lambda: data.Stream(data.words(7)),
        arguments={"max_steps": 9, "gradient_accumulation_steps": 2},
    ),
    Setting(
        name="stream of known length",
        rows=lambda: data.StreamOfKnownLength(data.words(9)),
        arguments={"gradient_accumulation_steps": 2, "max_steps": -1, "num_train_epochs": 2},
    ),
    Setting(name="empty stream", rows=lambda: data.Stream([]), raises="no row"),
    Setting(name="loader that ends for good", subclass=loader_used_up, arguments={"gradient_accumulation_steps": 2}),
    Setting(name="two workers", arguments={"dataloader_num_workers": 2, "max_steps": 7}),
    Setting(
        name="a worker that stays",
        arguments={"dataloader_num_workers": 1, "dataloader_persistent_workers": True, "max_steps": 7},
    ),
    Setting(name="loader of its own", subclass=own_loader, arguments={"gradient_accumulation_steps": 3}),
    # the model and what is done to it
    Setting(
        name="activation checkpointing",
        model=models.llama,
        arguments={"activation_checkpointing": True, "gradient_accumulation_steps": 2},
    ),
    Setting(name="noisy embeddings", arguments={"neftune_noise_alpha": 5.0}),
    Setting(
        name="noisy embeddings with evaluation",
        arguments={"neftune_noise_alpha": 5.0, "eval_strategy": "steps", "eval_steps": 2},
        **EVALUATED,
    ),
    Setting(
        name="compiled",
        arguments={
            "torch_compile": True,
            "torch_compile_backend": "eager",
            "gradient_accumulation_steps": 2,
            "max_steps": 3,
        },
        watch_forward=False,
        **DIGITS,
    ),
    Setting(
        name="adapters",
        model=models.lora,
        arguments={"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 3},
    ),
    Setting(name="frozen embeddings", model=models.frozen_embeddings),
    Setting(
        name="frozen embeddings, thawed later",
        model=models.frozen_embeddings,
        callbacks=lambda: [at("on_step_end", thawed, 3)()],
    ),
    Setting(
        name="parameters without gradient",
        arguments={"gradient_accumulation_steps": 2},
        **DIGITS | {"model": models.branching},
    ),
    Setting(
        name="model made by model_init",
        model=lambda: None,
        extra=lambda: {"model_init": models.gpt2},
        arguments={"max_steps": 3},
        script=scripts.twice,
    ),
    Setting(
        name="batch size found",
        arguments={"auto_find_batch_size": True, "per_device_train_batch_size": 4},
        **DIGITS | {"model": models.out_of_memory_once},
    ),
    # other trainers
    Setting(
        name="generating",
        trainer=seq2seq_trainer,
        arguments_class=Seq2SeqTrainingArguments,
        model=models.t5,
        rows=data.translations,
        held_out=data.translations,
        arguments={
            "predict_with_generate": True,
            "generation_max_length": 5,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "max_steps": 4,
            "gradient_accumulation_steps": 2,
        },
    ),
    Setting(
        name="supervised fine-tuning",
        extra=lambda: {"processing_class": models.tokenizer()},
        arguments=SFT_ARGUMENTS
        | {
            "gradient_accumulation_steps": 2,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "max_steps": 4,
            "save_strategy": "steps",
            "save_steps": 2,
        },
        held_out=data.sentences,
        **SFT,
    ),
    Setting(
        name="supervised fine-tuning of packed rows",
        extra=lambda: {"processing_class": models.tokenizer()},
        arguments=SFT_ARGUMENTS | {"packing": True, "packing_strategy": "wrapped", "max_steps": 3},
        **SFT,
    ),
    Setting(
        name="supervised fine-tuning of adapters",
        extra=lambda: {"processing_class": models.tokenizer(), "peft_config": models.adapters()},
        arguments=SFT_ARGUMENTS | {"max_steps": 3},
        **SFT,
    ),
)
