"""A small GPT-2 on the standard library's sources, one pass, with transformers.Trainer as people have it."""

import tempfile

from gpt2_task import arguments, gpt2, rows
from transformers import Trainer, TrainingArguments


def main() -> None:
    options = arguments(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=options.batch,
            gradient_accumulation_steps=options.accumulate,
            num_train_epochs=1,
            max_steps=options.steps,
            learning_rate=5e-5,
            save_strategy="no",
            report_to="none",
        )
        Trainer(model=gpt2(options), args=args, train_dataset=rows(options)).train()


if __name__ == "__main__":
    main()
