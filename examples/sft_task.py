"""What `sft_stock.py` and `sft_lean.py` share: flags, model, tokenizer and data, so that they differ in the trainer alone."""

import argparse

import corpus
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["adapters", "arguments", "llama", "rows", "tokenizer"]

ROWS = 400


def arguments(description: str | None) -> argparse.Namespace:
    """The flags of both scripts."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64, help="size of an embedding, a multiple of 32")
    parser.add_argument("--batch", type=int, default=4, help="rows in a micro-batch, per device")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches in an optimizer step")
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps")
    parser.add_argument("--lora", action="store_true", help="train LoRA adapters and leave the model's weights alone")
    return parser.parse_args()


def llama(options: argparse.Namespace) -> LlamaForCausalLM:
    """A Llama with new weights, the same ones in every run."""
    torch.manual_seed(42)
    config = LlamaConfig(
        vocab_size=corpus.VOCABULARY,
        hidden_size=options.width,
        intermediate_size=2 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=options.width // 32,
        max_position_embeddings=256,
        pad_token_id=corpus.PAD,
        bos_token_id=corpus.EOS,
        eos_token_id=corpus.EOS,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def adapters(options: argparse.Namespace) -> LoraConfig | None:
    """LoRA on the attention's queries and values, or None to train all weights."""
    if not options.lora:
        return None
    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def tokenizer() -> PreTrainedTokenizerFast:
    """The corpus's tokenizer as transformers wants it."""
    padding, end = corpus.SPECIAL
    return PreTrainedTokenizerFast(tokenizer_object=corpus.tokenizer(), pad_token=padding, eos_token=end)


def rows() -> Dataset:
    """Prompts, which are docstrings, and completions, the names that they document.

    A prompt ends with a new line, so that no token reaches over its end.
    """
    return Dataset.from_list([{"prompt": f"{text.strip()}\n", "completion": name} for text, name in corpus.pairs(ROWS)])
