"""Lightning with automatic optimization; what draws, logs or saves is off."""

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from contestants.task import Task, gpt2, loader, optimizer, schedule

__all__ = ["lightning_fit"]


class Module(lightning.LightningModule):
    """The GPT-2 as Lightning wants it."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.model = gpt2(task.setting)
        self.task = task

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self):
        adamw = optimizer(self.task, self.model)
        return {
            "optimizer": adamw,
            "lr_scheduler": {"scheduler": schedule(self.task, adamw), "interval": "step"},
        }


def lightning_fit(task: Task) -> nn.Module:
    """The work of `bare.mean_loop`."""
    setting = task.setting
    alone = setting.processes == 1
    module = Module(task)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=setting.processes,
        strategy="auto" if alone else DDPStrategy(process_group_backend="gloo"),
        max_steps=task.steps,
        accumulate_grad_batches=setting.accumulate,
        gradient_clip_val=setting.max_norm or None,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader(task))
    return module.model
