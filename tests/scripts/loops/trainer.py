"""transformers.Trainer with accumulation, bf16 autocast and padded batches."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=64, n_positions=16)
rows = [{"input_ids": [1 + i % 60] * (4 + i % 8)} for i in range(2048)]


def collate(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    ids = torch.zeros(len(batch), 16, dtype=torch.long)
    mask = torch.zeros(len(batch), 16, dtype=torch.long)
    for row, item in enumerate(batch):
        ids[row, : len(item["input_ids"])] = torch.tensor(item["input_ids"])
        mask[row, : len(item["input_ids"])] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=3,
        weight_decay=0.1,
        bf16=True,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
        save_strategy="no",
    )
    Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=rows, data_collator=collate).train()
