"""Settings of two processes."""

from typing import Any

from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from matrix import data, models, scripts
from matrix.callbacks import (
    at,
    sets,
)
from matrix.journal import Journal
from matrix.settings import BEST, DIGITS, HOT, PUBLIC, SAVED, SFT, SFT_ARGUMENTS, TOUCHING, Setting
from matrix.subclasses import (
    accuracy,
    loss_sum,
    own_loader,
    scaling,
    watching,
)

__all__ = ["MISCOUNTING", "RANKS"]

FSDP: dict[str, Any] = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2,
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "state_dict_type": "SHARDED_STATE_DICT",
    },
}
"""A full state cannot be saved on a CPU: accelerate takes what a collective has not delivered yet for the tensor."""


def counts_more_on_a_rank(cls: type, journal: Journal) -> type:
    class Miscounting(cls):
        """Wrong where it stands above a lean class, and there on the second rank alone."""

        def floating_point_ops(self, inputs: Any) -> int:
            return super().floating_point_ops(inputs) + (hasattr(cls, "lean_report") and self.args.process_index)

    return Miscounting


def sharding(cls: type, journal: Journal) -> type:
    class Sharding(cls):
        """FSDP2 on a CPU, where accelerate drops the plugin in silence and trains with DDP."""

        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            state = self.accelerator.state
            state.distributed_type = DistributedType.FSDP
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            if self.args.bf16:
                state.fsdp_plugin.set_mixed_precision("bf16")
            self.is_fsdp_enabled = True

    return Sharding


SHARDED: dict[str, Any] = {
    "model": models.llama,
    "subclass": sharding,
    "wrapped": "FSDPLlamaForCausalLM",
    "falls_back": {"clip", "checkpoint"},
}

MISCOUNTING = Setting(
    name="a rank that counts otherwise", subclass=counts_more_on_a_rank, falls_back={"floating_point_ops"}
)
"""Not one of the matrix: what the referee must find."""

RANKS: tuple[Setting, ...] = (
    Setting(name="plain"),
    Setting(
        name="accumulation of 4, ragged epochs",
        rows=lambda: data.words(22),
        arguments={"gradient_accumulation_steps": 4, "max_steps": -1, "num_train_epochs": 2},
    ),
    Setting(name="odd number of rows", rows=lambda: data.words(9), arguments={"gradient_accumulation_steps": 2}),
    Setting(
        name="unused parameters not looked for",
        arguments={"ddp_find_unused_parameters": False, "gradient_accumulation_steps": 2},
    ),
    Setting(name="parameters without gradient", **DIGITS | {"model": models.branching}),
    Setting(name="static graph", arguments={"ddp_static_graph": True, "ddp_find_unused_parameters": False}),
    Setting(
        name="tokens not averaged across devices",
        arguments={"average_tokens_across_devices": False, "gradient_accumulation_steps": 2},
    ),
    Setting(name="model without loss keywords", arguments={"gradient_accumulation_steps": 2}, **DIGITS),
    Setting(name="label smoothing", arguments={"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2}),
    Setting(
        name="compute_loss_func",
        arguments={"gradient_accumulation_steps": 2},
        extra=lambda: {"compute_loss_func": loss_sum},
    ),
    Setting(
        name="reduced at every micro-step",
        arguments={
            "gradient_accumulation_steps": 3,
            "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
        },
    ),
    Setting(name="bf16, no clipping", arguments={"bf16": True, "max_grad_norm": 0.0}),
    Setting(
        name="batches split",
        arguments={"accelerator_config": {"split_batches": True}, "per_device_train_batch_size": 4},
    ),
    Setting(
        name="batches dispatched",
        rows=lambda: data.uniform(8),
        arguments={"accelerator_config": {"dispatch_batches": True}, "gradient_accumulation_steps": 2},
    ),
    Setting(
        name="batches uneven",
        rows=lambda: data.words(10),
        arguments={"accelerator_config": {"even_batches": False}, "max_steps": 2},
    ),
    Setting(
        name="stream without length",
        rows=lambda: data.Endless(data.uniform(7)),
        arguments={"gradient_accumulation_steps": 2, "max_steps": 4},
    ),
    Setting(
        name="nan on the ranks",
        arguments={"logging_steps": 2},
        nan_steps=1,
        **DIGITS | {"model": models.exploding(float("nan"), 3)},
    ),
    Setting(name="tokens counted", arguments={"include_num_input_tokens_seen": "non_padding", "logging_steps": 3}),
    Setting(
        name="grouped by length, two workers",
        rows=lambda: data.words(14),
        arguments={"train_sampling_strategy": "group_by_length", "dataloader_num_workers": 2},
    ),
    Setting(
        name="batches balanced", rows=lambda: data.words(16), arguments={"train_sampling_strategy": "batch_rebalance"}
    ),
    Setting(
        name="evaluated, saved, best model at the end",
        arguments=BEST | {"save_strategy": "steps", "save_steps": 1, "max_steps": 4, "learning_rate": 0.3},
        extra=lambda: {"compute_metrics": accuracy},
        rows=data.uniform,
        held_out=lambda: data.uniform(6),
    ),
    Setting(name="resumed in mid-epoch", rows=lambda: data.words(32), arguments=SAVED, script=scripts.resumed),
    Setting(name="stopped by a callback", callbacks=lambda: [at("on_step_end", sets("should_training_stop"), 3)()]),
    Setting(
        name="overrides: every public method",
        subclass=watching(*PUBLIC),
        falls_back=HOT & {*PUBLIC},
        **TOUCHING | {"held_out": lambda: data.uniform(6)},
    ),
    Setting(
        name="activation checkpointing",
        model=models.llama,
        arguments={"activation_checkpointing": True, "gradient_accumulation_steps": 2},
    ),
    Setting(name="adapters", model=models.lora, arguments={"gradient_accumulation_steps": 2}),
    Setting(name="sharded", arguments=FSDP | {"gradient_accumulation_steps": 2}, **SHARDED),
    Setting(name="sharded, in bf16 without clipping", arguments=FSDP | {"bf16": True, "max_grad_norm": 0.0}, **SHARDED),
    Setting(
        name="sharded, evaluated, saved and resumed",
        arguments=FSDP | SAVED | {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4},
        held_out=lambda: data.uniform(6),
        script=scripts.resumed,
        **SHARDED,
    ),
    Setting(
        name="fp16 with a scaler, first steps skipped",
        arguments={"fp16": True, "gradient_accumulation_steps": 2},
        subclass=scaling,
    ),
    Setting(
        name="stopped in mid-window",
        callbacks=lambda: [at("on_substep_end", sets("should_training_stop"), 2)()],
        arguments={"gradient_accumulation_steps": 3},
    ),
    Setting(name="loader of its own", subclass=own_loader, arguments={"gradient_accumulation_steps": 3}),
    Setting(
        name="stream of known length, not dispatched",
        rows=lambda: data.StreamOfKnownLength(data.uniform(9)),
        arguments={"accelerator_config": {"dispatch_batches": False}, "max_steps": -1, "num_train_epochs": 2},
    ),
    Setting(
        name="supervised fine-tuning",
        extra=lambda: {"processing_class": models.tokenizer()},
        arguments=SFT_ARGUMENTS | {"gradient_accumulation_steps": 2, "max_steps": 2},
        **SFT,
    ),
)
