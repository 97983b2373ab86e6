"""Packed against unpacked: each document's losses and gradients are those of the document alone, on transformers' models."""

import copy
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    AttentionInterface,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    Trainer,
    TrainingArguments,
)

from bareloop.data.collators import PackedCollator, PackingCollator, block_mask, check_boundaries, document_ids
from bareloop.data.packing import IGNORED, PackedRows, Packing, pack

VOCABULARY, LENGTH = 101, 40
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIGS = {
    "gpt2": lambda: GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=2),
    "llama": lambda: LlamaConfig(**SIZES, num_key_value_heads=1, intermediate_size=64),
    "mistral": lambda: MistralConfig(**SIZES, num_key_value_heads=2, intermediate_size=64, sliding_window=6),
    "bert": lambda: BertConfig(**SIZES, intermediate_size=64),
    "roberta": lambda: RobertaConfig(**SIZES, intermediate_size=64, pad_token_id=1),
}
CLASSES = {
    "gpt2": GPT2LMHeadModel,
    "llama": LlamaForCausalLM,
    "mistral": MistralForCausalLM,
    "bert": BertForMaskedLM,
    "roberta": RobertaForMaskedLM,
}


def model(name: str, attention: str = "sdpa", **changes: Any) -> Any:
    """A small model with weights large enough for a wrong mask to show."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    for key, value in {"initializer_range": 0.2, "_attn_implementation": attention, **changes}.items():
        setattr(config, key, value)
    return CLASSES[name](config).eval()


def documents(count: int = 30, longest: int = LENGTH, seed: int = 0) -> list[dict[str, list[int]]]:
    """Random texts of 1 to `longest` tokens."""
    chance = random.Random(seed)
    sizes = [chance.randint(1, longest) for _ in range(count - 1)] + [longest]
    return [{"input_ids": [chance.randrange(2, VOCABULARY) for _ in range(size)]} for size in sizes]


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """`[width - 1]`: loss of each next token of one row, 0 where there is no label."""
    return cross_entropy(logits[:-1], labels[1:], ignore_index=IGNORED, reduction="none")


def losses_alone(trained: Any, texts: Sequence[dict[str, list[int]]]) -> dict[tuple[int, ...], float]:
    """Tokens of a document -> its summed loss when the model sees nothing else."""
    found = {}
    for text in texts:
        tokens = torch.tensor([text["input_ids"]])
        found[tuple(text["input_ids"])] = float(token_losses(trained(input_ids=tokens).logits[0], tokens[0]).sum())
    return found


def losses_packed(trained: Any, batches: Sequence[dict[str, Any]]) -> dict[tuple[int, ...], float]:
    """The same out of packed batches."""
    found = {}
    for batch in batches:
        logits = trained(**batch).logits
        for row, positions, labels, scores in zip(
            batch["input_ids"], batch["position_ids"], batch["labels"], logits, strict=True
        ):
            each = token_losses(scores, labels)
            starts = [*(positions == 0).nonzero().flatten().tolist(), len(row)]
            for start, stop in pairwise(starts):
                found[tuple(row[start:stop].tolist())] = float(each[max(start - 1, 0) : stop - 1].sum())
    return found


def batches(rows: Sequence[dict[str, Any]], collator: PackedCollator, size: int = 4) -> Iterator[dict[str, Any]]:
    for start in range(0, len(rows), size):
        yield collator(rows[start : start + size])


def collators(attention: str) -> list[PackedCollator]:
    """Every way to mark boundaries that the attention takes."""
    dtype = torch.bool if attention == "sdpa" else torch.float32
    return [
        PackedCollator(),
        PackedCollator(width=LENGTH + 9, pad_token_id=5),
        PackedCollator(boundaries="mask", mask_dtype=dtype),
    ]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("strategy", ["first_fit", "concatenate"])
def test_each_document_has_the_losses_of_that_document_alone(name: str, attention: str, strategy: Any) -> None:
    trained, texts = model(name, attention), documents()
    rows = list(PackedRows(texts, Packing(length=LENGTH, strategy=strategy)))
    pieces = [{"input_ids": tokens} for row in rows for tokens in apart(row)]
    with torch.no_grad():
        expected = losses_alone(trained, pieces)
        for collator in collators(attention):
            found = losses_packed(trained, list(batches(rows, collator)))
            assert expected.keys() <= found.keys()
            # What is not in the texts is padding, which has no loss.
            assert all(found[padding] == 0 for padding in found.keys() - expected.keys())
            worst = max(abs(found[tokens] - loss) / max(len(tokens) - 1, 1) for tokens, loss in expected.items())
            assert worst < 1e-5


def apart(row: dict[str, list[int]]) -> list[list[int]]:
    starts = [index for index, position in enumerate(row["position_ids"]) if position == 0] + [len(row["input_ids"])]
    return [row["input_ids"][start:stop] for start, stop in pairwise(starts)]


def test_a_sliding_window_counts_from_the_start_of_each_document() -> None:
    trained, texts = model("mistral"), documents()
    rows = list(pack(texts, Packing(length=LENGTH)))
    with torch.no_grad():
        expected = losses_alone(trained, texts)
        found = losses_packed(trained, list(batches(rows, PackedCollator())))
    assert max(abs(found[tokens] - loss) / len(tokens) for tokens, loss in expected.items()) < 1e-5


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_batch_packed_by_itself_has_the_loss_and_the_gradient_of_the_padded_one(name: str) -> None:
    texts = documents(count=12)
    padded, packed = model(name), model(name)
    width = max(len(text["input_ids"]) for text in texts)
    ids = torch.tensor([text["input_ids"] + [0] * (width - len(text["input_ids"])) for text in texts])
    real = torch.tensor([[1] * len(text["input_ids"]) + [0] * (width - len(text["input_ids"])) for text in texts])
    expected = padded(input_ids=ids, attention_mask=real, labels=ids.masked_fill(real == 0, IGNORED)).loss
    batch = PackingCollator()(texts)
    assert batch["input_ids"].shape[1] == LENGTH and len(batch["input_ids"]) < len(texts)
    found = packed(**batch).loss
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    expected.backward()
    found.backward()
    for one, other in zip(packed.parameters(), padded.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_the_trainer_learns_the_same_from_packed_batches(tmp_path: Path) -> None:
    texts = documents(count=24)

    def padding(rows: Sequence[dict[str, list[int]]]) -> dict[str, Tensor]:
        ids = [torch.tensor(row["input_ids"]) for row in rows]
        return {
            "input_ids": nn.utils.rnn.pad_sequence(ids, batch_first=True),
            "labels": nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=IGNORED),
            "attention_mask": nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        }

    def trained(collator: Any) -> tuple[list[float], list[Tensor]]:
        args = TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=6, gradient_accumulation_steps=2, logging_steps=1,
            num_train_epochs=2, report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True, optim="sgd",
            learning_rate=0.1,
        )  # fmt: skip
        trainer = Trainer(model=model("llama"), args=args, train_dataset=texts, data_collator=collator)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return losses, [parameter.detach() for parameter in trainer.model.parameters()]

    (losses, weights), (expected_losses, expected_weights) = trained(PackingCollator()), trained(padding)
    assert len(losses) == 4
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    for one, other in zip(weights, expected_weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_offsets_reach_an_attention_for_sequences_of_unequal_length() -> None:
    def varlen(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        """A slow stand-in for flash attention: one document after the other."""
        if "cu_seq_lens_q" not in options:
            return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2), None
        assert attention_mask is None and torch.equal(options["cu_seq_lens_q"], options["cu_seq_lens_k"])
        offsets = options["cu_seq_lens_q"]
        assert offsets.dtype == torch.int32 and query.shape[0] == 1
        assert options["max_length_q"] == options["max_length_k"] == int(offsets.diff().max())
        parts = [
            nn.functional.scaled_dot_product_attention(
                *(each[:, :, start:stop] for each in (query, key, value)), is_causal=True
            )
            for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
        ]
        return torch.cat(parts, 2).transpose(1, 2), None

    AttentionInterface.register("varlen_by_hand", varlen)
    trained, texts = model("gpt2"), documents()
    collator = PackedCollator(boundaries="cu_seq_lens")
    with torch.no_grad():
        expected = losses_alone(trained, texts)
        trained.config._attn_implementation = "varlen_by_hand"
        batch = collator(list(pack(texts, Packing(length=LENGTH))))
        assert batch["input_ids"].shape == (1, sum(len(text["input_ids"]) for text in texts))
        found = losses_packed(trained, [batch])
    assert found.keys() == expected.keys()
    assert max(abs(found[tokens] - loss) / len(tokens) for tokens, loss in expected.items()) < 1e-5
    check_boundaries(trained, collator)


def test_collated_rows_to_the_letter() -> None:
    rows = [
        {"input_ids": [1, 2, 3, 4, 5], "labels": [IGNORED, 2, 3, IGNORED, 5], "position_ids": [0, 1, 2, 0, 1]},
        {"input_ids": [6, 7]},
    ]
    batch = PackedCollator(pad_token_id=9)(rows)
    assert batch.pop("use_cache") is False
    assert {name: value.tolist() for name, value in batch.items()} == {
        "input_ids": [[1, 2, 3, 4, 5], [6, 7, 9, 9, 9]],
        "labels": [[IGNORED, 2, 3, IGNORED, 5], [IGNORED, 7, IGNORED, IGNORED, IGNORED]],
        "position_ids": [[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]],
    }
    assert "use_cache" not in PackedCollator(pass_use_cache=False)(rows)
    flat = PackedCollator(boundaries="cu_seq_lens", first_position=2)(rows)
    assert flat["position_ids"].tolist() == [[2, 3, 4, 2, 3, 2, 3]]
    assert flat["labels"].tolist() == [[IGNORED, 2, 3, IGNORED, 5, IGNORED, 7]]
    assert flat["cu_seq_lens_q"].tolist() == flat["cu_seq_lens_k"].tolist() == [0, 3, 5, 7]
    assert (flat["max_length_q"], flat["max_length_k"]) == (3, 3)


def test_documents_and_their_mask() -> None:
    documents = document_ids(torch.tensor([[0, 1, 0, 0, 1], [5, 6, 7, 8, 9]]))
    assert documents.tolist() == [[0, 0, 1, 2, 2], [0, 0, 0, 0, 0]]
    causal = block_mask(documents[:1], causal=True)[0, 0].int().tolist()
    assert causal == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]
    both = block_mask(documents[:1], causal=False, dtype=torch.float32)[0, 0]
    assert (both == 0).int().tolist()[0] == [1, 1, 0, 0, 0]
    assert both.min() == torch.finfo(torch.float32).min


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_check_passes_what_keeps_documents_apart(name: str, attention: str) -> None:
    checked = model(name, attention)
    for collator in collators(attention):
        check_boundaries(checked, collator)
        check_boundaries(copy.deepcopy(checked).to(torch.bfloat16), collator) if attention == "sdpa" else None


def test_the_check_refuses_a_cache_under_which_transformers_sees_across_documents() -> None:
    collator = PackedCollator(pass_use_cache=False)
    for name in ("gpt2", "llama"):
        with pytest.raises(ValueError, match=r"see each other.*set model\.config\.use_cache = False"):
            check_boundaries(model(name), collator)
        check_boundaries(model(name, use_cache=False), collator)


def test_the_check_refuses_a_mask_of_the_wrong_type() -> None:
    with pytest.raises(ValueError, match=r"see each other.*its attention is eager: .* eager the model's float type"):
        check_boundaries(model("gpt2", "eager"), PackedCollator(boundaries="mask"))


def test_the_check_refuses_a_mask_that_overrides_a_sliding_window() -> None:
    check_boundaries(model("mistral"), PackedCollator())
    with pytest.raises(ValueError, match=r"other logits .* alone.* sliding window"):
        check_boundaries(model("mistral"), PackedCollator(boundaries="mask"))


def test_encoders_need_a_mask_and_their_own_first_position() -> None:
    whole = PackedCollator(boundaries="mask", causal=False)
    check_boundaries(model("bert"), whole)
    with pytest.raises(ValueError, match=r"other logits .* alone.*first_position=0; padding_idx"):
        check_boundaries(model("roberta"), whole)
    check_boundaries(model("roberta"), PackedCollator(boundaries="mask", causal=False, first_position=2))
    with pytest.raises(ValueError, match="see each other"):
        check_boundaries(model("bert"), PackedCollator(pass_use_cache=False))


def test_the_check_leaves_model_and_random_numbers_as_they_were() -> None:
    checked = model("gpt2").train()
    checked.transformer.drop.eval()
    before, modes = torch.get_rng_state(), [module.training for module in checked.modules()]
    check_boundaries(checked, PackedCollator())
    assert torch.equal(torch.get_rng_state(), before)
    assert [module.training for module in checked.modules()] == modes
    assert all(parameter.grad is None for parameter in checked.parameters())


def test_labels_of_an_encoder_stay_in_their_place() -> None:
    rows = list(pack([{"input_ids": [1, 2], "labels": [7, IGNORED]}] * 2, Packing(length=4, causal=False)))
    batch = PackedCollator(boundaries="mask", causal=False)(rows)
    assert batch["labels"].tolist() == [[7, IGNORED, 7, IGNORED]]
    assert batch["attention_mask"].shape == (1, 1, 4, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"boundaries": "flash"}, "boundaries='flash': must be one of 'position_ids', 'cu_seq_lens', 'mask'"),
        ({"causal": False}, 'causal=False with boundaries="position_ids".*use boundaries="mask"'),
        ({"mask_dtype": torch.float32}, "mask_dtype=torch.float32 has no effect"),
        ({"width": 0}, "width=0"),
    ],
)
def test_options_that_would_not_be_honoured_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackedCollator(**options)


def test_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="width=3: a row has 4 tokens"):
        PackedCollator(width=3)([{"input_ids": [1, 2, 3, 4]}])
    with pytest.raises(ValueError, match="a row has padding"):
        PackedCollator()([{"input_ids": [1, 0], "attention_mask": [1, 0]}])
    with pytest.raises(ValueError, match="rows have different columns"):
        PackedCollator()([{"input_ids": [1]}, {"input_ids": [1], "weights": [1.0]}])
    with pytest.raises(ValueError, match="length=3: a document has 4 tokens"):
        PackingCollator(length=3)([{"input_ids": [1, 2, 3, 4]}])
