"""A small GPT-2 with transformers.Trainer: accumulation, logging, evaluation, the best checkpoint at the end."""

import tempfile

import transformers
from gpt2_task import arguments, gpt2, rows


def main() -> None:
    options = arguments(__doc__)
    blocks = rows(options)
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=options.batch,
            gradient_accumulation_steps=options.accumulate,
            num_train_epochs=1,
            max_steps=options.steps,
            logging_steps=0.1,
            eval_strategy="steps",
            eval_steps=0.5,
            save_strategy="best",
            metric_for_best_model="loss",
            load_best_model_at_end=True,
            save_total_limit=1,
            report_to="none",
        )
        trainer = transformers.Trainer(
            model=gpt2(options), args=args, train_dataset=blocks[:-64], eval_dataset=blocks[-64:]
        )
        trainer.train()
        print(f"loss {trainer.state.log_history[-1]['train_loss']:.9f}, best {trainer.state.best_metric:.9f}")


if __name__ == "__main__":
    main()
