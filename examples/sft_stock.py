"""A small Llama learns to name what a docstring documents, with TRL's SFTTrainer as people have it."""

import tempfile

import trl
from sft_task import adapters, arguments, llama, rows, tokenizer


def main() -> None:
    options = arguments(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        args = trl.SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=options.batch,
            gradient_accumulation_steps=options.accumulate,
            max_steps=options.steps,
            learning_rate=1e-3,
            max_length=128,
            bf16=False,  # the default, true, needs an accelerator
            save_strategy="no",
            report_to="none",
        )
        trainer = trl.SFTTrainer(
            model=llama(options),
            args=args,
            train_dataset=rows(),
            processing_class=tokenizer(),
            peft_config=adapters(options),
        )
        trainer.train()
        print(f"loss {trainer.state.log_history[-1]['train_loss']:.9f}")


if __name__ == "__main__":
    main()
