"""A tiny T5 with transformers.Trainer, meant to make three passes over the data.

    torchrun --nproc-per-node 2 examples/t5_trainer.py

The plan counts the batches of a loader that no one has divided among the processes yet, as people do. A step of the
Trainer takes one such batch on *every* process, so on two processes it makes six passes.
"""

import tempfile

import torch
from t5_task import EPOCHS, LEARNING_RATE, arguments, collator, rows, t5
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments


def main() -> None:
    options = arguments(__doc__)
    model = t5(options)
    training, validation = rows()
    batches = len(DataLoader(training, batch_size=options.batch))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=options.batch,
            per_device_eval_batch_size=options.batch,
            max_steps=options.steps if options.steps > 0 else EPOCHS * batches,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            eval_strategy="steps",
            eval_steps=batches,
            save_strategy="no",
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
        )
        trainer = Trainer(
            model=model,
            args=args,
            train_dataset=training,
            eval_dataset=validation,
            data_collator=collator(model),
        )
        trainer.train()


if __name__ == "__main__":
    main()
