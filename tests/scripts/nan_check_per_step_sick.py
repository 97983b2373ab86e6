"""Sick: a Trainer with its default NaN filter: two host reads per micro-step."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


def main():
    torch.manual_seed(0)
    tokens = torch.randint(0, 500, (6000, 32))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    model = GPT2LMHeadModel(GPT2Config(vocab_size=500, n_positions=32, n_embd=64, n_layer=2, n_head=2))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=4,
            num_train_epochs=3,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_nan_inf_filter=True,
        )
        Trainer(model=model, args=args, train_dataset=rows).train()


if __name__ == "__main__":
    main()
