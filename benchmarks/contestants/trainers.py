"""transformers.Trainer and its lean subclass, with the same arguments."""

import tempfile

import transformers
from torch import nn

from contestants.task import Task, gpt2, optimizer, rows, schedule

__all__ = ["lean", "stock"]


def stock(task: Task) -> nn.Module:
    """transformers.Trainer."""
    trainer = _trained(transformers.Trainer, task)
    return trainer.model


def lean(task: Task) -> nn.Module:
    """bareloop.Trainer.

    Raises:
        RuntimeError: it ran the stock loop, which would be compared with itself.
    """
    from bareloop.trainer.hf import Trainer

    trainer = _trained(Trainer, task)
    if not trainer.lean_report.loop_is_lean:
        raise RuntimeError(f"the lean trainer did not run lean here: {trainer.lean_report}")
    return trainer.model


def _trained(kind: type[transformers.Trainer], task: Task) -> transformers.Trainer:
    setting = task.setting
    model = gpt2(setting)
    adamw = optimizer(task, model)
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=setting.batch,
            gradient_accumulation_steps=setting.accumulate,
            max_steps=task.steps,
            max_grad_norm=setting.max_norm,
            train_sampling_strategy="sequential",
            use_cpu=True,
            # What a bare loop gets from DistributedDataParallel(model). The Trainer's own default walks the graph for
            # unused parameters at each backward, which is not the loop's cost.
            ddp_find_unused_parameters=False,
            dataloader_pin_memory=False,
            disable_tqdm=True,
            save_strategy="no",
            report_to="none",
        )
        trainer = kind(model=model, args=args, train_dataset=rows(task), optimizers=(adamw, schedule(task, adamw)))
        trainer.train()
    return trainer
