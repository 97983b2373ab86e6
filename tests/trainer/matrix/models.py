"""Tiny models of the matrix: one layer, width 16, 64 tokens; the kinds that the Trainer treats differently."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from matrix.data import SPECIAL, VOCABULARY, encode, source

__all__ = [
    "WIDTH",
    "Boxes",
    "Digits",
    "TwoTypes",
    "adapters",
    "answering_in_tuples",
    "bert",
    "branching",
    "exploding",
    "frozen_embeddings",
    "gpt2",
    "growing",
    "llama",
    "llama_config",
    "lora",
    "losing_itself",
    "out_of_memory_once",
    "statistics_frozen",
    "t5",
    "taking_extras",
    "tokenizer",
    "two_types_frozen",
    "without_labels",
]

WIDTH = 16


def gpt2() -> nn.Module:
    """Dropout is on: one random number more or less shows in every later loss."""
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=WIDTH,
        n_layer=1,
        n_head=2,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
    )
    return GPT2LMHeadModel(config)


def llama_config(**more: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
        **more,
    )


def llama() -> nn.Module:
    return LlamaForCausalLM(llama_config())


def t5() -> nn.Module:
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=8,
        d_ff=2 * WIDTH,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    return T5ForConditionalGeneration(config)


def bert() -> nn.Module:
    """A classifier of whole rows."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=2 * WIDTH,
        max_position_embeddings=32,
        num_labels=3,
    )
    return BertForSequenceClassification(config)


def frozen_embeddings() -> nn.Module:
    model = gpt2()
    model.get_input_embeddings().requires_grad_(False)
    return model


def lora() -> nn.Module:
    from peft import get_peft_model

    return get_peft_model(llama(), adapters())


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, numbered as `encode` numbers them where the text has them all."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    letters = sorted(set(source()), key=lambda letter: (encode(letter), letter))[: VOCABULARY - SPECIAL]
    words = Tokenizer(
        models.WordLevel({"<pad>": 0, "</s>": 1, **{c: i + SPECIAL for i, c in enumerate(letters)}}, "</s>")
    )
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="</s>")


class Digits(nn.Module):
    """A network of its own kind: no loss keywords, batch statistics as buffers, dropout."""

    def __init__(
        self,
        answer: Callable[[torch.Tensor, torch.Tensor], Any] = lambda loss, logits: {"loss": loss, "logits": logits},
    ) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.2), nn.Linear(WIDTH, 10)
        )
        self.answer = answer

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> Any:
        """Answer for pixels[B, 64] and labels[B]."""
        logits = self.layers(pixels)
        return self.answer(nn.functional.cross_entropy(logits, labels), logits)


def answering_in_tuples() -> nn.Module:
    return Digits(lambda loss, logits: (loss, logits))


def losing_itself() -> nn.Module:
    """Returns no loss."""
    return Digits(lambda loss, logits: {"logits": logits})


class Branching(nn.Module):
    """Two heads of which a batch uses one: the other's parameters get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(64, 10), nn.Linear(64, 10)])

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.heads[int(labels[0]) % 2](pixels)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def branching() -> nn.Module:
    return Branching()


class Exploding(nn.Module):
    """The loss of `micro_steps` (counted from 0, in training) is `value`; gradients stay finite."""

    def __init__(self, value: float, micro_steps: frozenset[int]) -> None:
        super().__init__()
        self.network = Digits()
        self.value, self.micro_steps, self.seen = value, micro_steps, 0

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.network(pixels, labels)
        if self.training:
            if self.seen in self.micro_steps:
                found["loss"] = found["loss"] + self.value
            self.seen += 1
        return found


def exploding(value: float, *micro_steps: int) -> Callable[[], nn.Module]:
    return lambda: Exploding(value, frozenset(micro_steps))


class WithoutLabels(nn.Module):
    """A language model whose batch has no `labels`, so that the Trainer counts no items."""

    main_input_name = "input_ids"

    def __init__(self) -> None:
        super().__init__()
        self.inner = gpt2()

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, targets: torch.Tensor, **kwargs: Any
    ) -> Any:
        return self.inner(input_ids=input_ids, attention_mask=attention_mask, labels=targets, **kwargs)


def without_labels() -> nn.Module:
    return WithoutLabels()


class OutOfMemoryOnce(Digits):
    """Refuses batches of more than two rows the way an allocator does."""

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> Any:
        if len(pixels) > 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate more than two rows.")
        return super().forward(pixels, labels)


def out_of_memory_once() -> nn.Module:
    return OutOfMemoryOnce()


class TakingExtras(nn.Module):
    """A language model whose batch holds a mapping of text, a number and a tensor too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = gpt2()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor, extras: dict) -> Any:
        counted, weight = extras["pair"]
        answer = self.inner(input_ids=input_ids, attention_mask=attention_mask, labels=labels)
        answer["loss"] = answer.loss * weight + 1e-3 * counted.sum() * answer.logits.square().mean()
        return answer


def taking_extras() -> nn.Module:
    return TakingExtras()


def adapters() -> Any:
    """Configuration of LoRA adapters."""
    from peft import LoraConfig

    return LoraConfig(r=2, lora_alpha=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


class Boxes(Digits):
    """Takes loss keywords, and labels that are a list of mappings, as detectors do."""

    def forward(self, pixels: torch.Tensor, labels: list[dict[str, torch.Tensor]], **keywords: Any) -> Any:
        return super().forward(pixels, torch.stack([each["label"] for each in labels]))


class StatisticsFrozen(Digits):
    """Keeps its batch statistics in training, the usual way."""

    def train(self, mode: bool = True) -> "StatisticsFrozen":
        super().train(mode)
        self.layers[1].eval()
        return self


def statistics_frozen() -> nn.Module:
    return StatisticsFrozen()


class Growing(Digits):
    """Makes one more layer when it sees its first batch; the optimizer was built without it."""

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> Any:
        if len(self.layers) == 5:
            torch.manual_seed(5)
            self.layers.append(nn.Linear(10, 10))
        return super().forward(pixels, labels)


def growing() -> nn.Module:
    return Growing()


def two_types_frozen() -> nn.Module:
    model = TwoTypes()
    model.first.requires_grad_(False)
    return model


class TwoTypes(Digits):
    """First layer in float64, the rest in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64, dtype=torch.float64)

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> Any:
        return super().forward(self.first(pixels.double()).float(), labels)
