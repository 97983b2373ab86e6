"""What `t5_trainer.py` and `t5_loop.py` share: flags, model and data, so that they differ in the loop alone.

The task is to name a function from its docstring. The 1,024 training pairs are a multiple of any batch size and
process count that are powers of two, so a pass has no ragged end.
"""

import argparse

import corpus
import torch
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

__all__ = ["EPOCHS", "LEARNING_RATE", "arguments", "collator", "rows", "t5"]

EPOCHS = 3
LEARNING_RATE = 5e-4
TRAINING, VALIDATION = 1024, 64
LENGTH = 64
"""Tokens that every source and target is padded to."""


def arguments(description: str | None) -> argparse.Namespace:
    """The flags of both scripts."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--width", type=int, default=64, help="size of an embedding, a multiple of 16")
    parser.add_argument("--batch", type=int, default=4, help="pairs in a batch, per process")
    parser.add_argument("--steps", type=int, default=-1, help="stop after so many optimizer steps")
    return parser.parse_args()


def t5(options: argparse.Namespace) -> T5ForConditionalGeneration:
    """A T5 of 2 + 2 layers with new weights, the same ones in every run."""
    torch.manual_seed(42)
    config = T5Config(
        vocab_size=corpus.VOCABULARY,
        d_model=options.width,
        d_kv=16,
        d_ff=2 * options.width,
        num_layers=2,
        num_heads=options.width // 16,
        pad_token_id=corpus.PAD,
        eos_token_id=corpus.EOS,
        decoder_start_token_id=corpus.PAD,
    )
    return T5ForConditionalGeneration(config)


def rows() -> tuple[list[dict[str, list[int]]], list[dict[str, list[int]]]]:
    """Training rows and validation rows: `input_ids` of the docstring, `labels` of the name, at most `LENGTH` each."""
    encode = corpus.tokenizer().encode
    encoded = [
        {"input_ids": [*encode(source).ids[: LENGTH - 1], corpus.EOS], "labels": [*encode(target).ids, corpus.EOS]}
        for source, target in corpus.pairs(TRAINING + VALIDATION)
    ]
    return encoded[:TRAINING], encoded[TRAINING:]


def collator(model: T5ForConditionalGeneration) -> DataCollatorForSeq2Seq:
    """Rows to a batch of `input_ids`, `attention_mask`, `labels` and `decoder_input_ids`, all `[batch, LENGTH]`."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=corpus.tokenizer(), pad_token="<pad>", eos_token="</s>")
    return DataCollatorForSeq2Seq(tokenizer, model=model, padding="max_length", max_length=LENGTH)
