"""Accelerate's wrappers around the bare loop, as its guide to gradient accumulation has it."""

from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader
from transformers import default_data_collator

from contestants.task import Task, gpt2, optimizer, rows, schedule

__all__ = ["accelerate_loop"]


def accelerate_loop(task: Task) -> nn.Module:
    """The work of `bare.mean_loop`."""
    setting = task.setting
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=setting.accumulate)
    trained = gpt2(setting)
    adamw = optimizer(task, trained)
    # Accelerate would step a prepared schedule once per process.
    scheduler = schedule(task, adamw)
    batches = DataLoader(rows(task), batch_size=setting.batch, collate_fn=default_data_collator)
    model, adamw, batches = accelerator.prepare(trained, adamw, batches)
    steps, losses = 0, []
    model.train()
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            losses.append(loss.detach())
            if accelerator.sync_gradients and setting.max_norm > 0:
                accelerator.clip_grad_norm_(model.parameters(), setting.max_norm)
            adamw.step()
            if accelerator.sync_gradients:
                scheduler.step()
            adamw.zero_grad()
        steps += accelerator.sync_gradients
        if steps == task.steps:
            break
    return trained
