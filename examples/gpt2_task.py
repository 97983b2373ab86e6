"""What `gpt2_trainer.py` and `gpt2_loop.py` share: flags, model and data, so that they differ in the loop alone."""

import argparse

import corpus
import torch
from transformers import GPT2Config, GPT2LMHeadModel

__all__ = ["arguments", "gpt2", "rows"]


def arguments(description: str | None) -> argparse.Namespace:
    """The flags of both scripts."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64, help="size of an embedding, a multiple of 32")
    parser.add_argument("--block", type=int, default=32, help="tokens in a row")
    parser.add_argument("--batch", type=int, default=2, help="rows in a micro-batch, per device")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches in an optimizer step")
    parser.add_argument("--steps", type=int, default=-1, help="stop after so many optimizer steps of the one pass")
    return parser.parse_args()


def gpt2(options: argparse.Namespace) -> GPT2LMHeadModel:
    """A GPT-2 with new weights, the same ones in every run."""
    torch.manual_seed(42)
    config = GPT2Config(
        vocab_size=corpus.VOCABULARY,
        n_positions=options.block,
        n_embd=options.width,
        n_layer=options.layers,
        n_head=options.width // 32,
        bos_token_id=corpus.EOS,
        eos_token_id=corpus.EOS,
    )
    return GPT2LMHeadModel(config)


def rows(options: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    """Rows for a causal model: `input_ids[block]`, and `labels[block]` that are the same (the model shifts them)."""
    blocks = torch.tensor(corpus.rows(options.block))
    return [{"input_ids": block, "labels": block} for block in blocks]
