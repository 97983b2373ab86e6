"""Batches of every shape that goes into a model, and some that can't be read."""

import dataclasses
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from bareloop.profiler.probes.batch import (  # noqa: E402
    BatchFacts,
    batch_identity,
    observe_forward,
    observe_loaded,
)

LENGTHS = (3, 5, 2)


def ids(width: int, pad: int = 0, left: bool = False) -> Any:
    """Three rows of 3, 5 and 2 tokens, [3, width]."""
    rows = torch.full((3, width), pad)
    for row, length in enumerate(LENGTHS):
        tokens = torch.arange(1, length + 1) + 10 * row
        rows[row, width - length : width] if left else rows[row, :length]
        rows[row, slice(width - length, width) if left else slice(0, length)] = tokens
    return rows


class Plain(torch.nn.Module):
    """A model with named arguments, an embedding and a config."""

    def __init__(self, padding_idx: int | None = None, config: Any = None) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(100, 4, padding_idx=padding_idx)
        self.config = config

    def forward(self, tokens: Any, labels: Any = None, src_key_padding_mask: Any = None) -> Any:
        return self.embedding(tokens)


def forward(module: Any, *args: Any, loader_batch_size: int | None = None, **kwargs: Any) -> BatchFacts:
    return observe_forward(module, args, kwargs, loader_batch_size)


def test_an_attention_mask_tells_padding() -> None:
    tokens = ids(8)
    labels = torch.where(tokens == 0, -100, tokens)
    facts = forward(Plain(), input_ids=tokens, attention_mask=(tokens != 0).long(), labels=labels)
    assert (facts.samples, facts.tokens, facts.real_tokens, facts.labels) == (3, 24, 10, 10)
    assert (facts.longest, facts.width, facts.padded_beyond_longest) == (5, 8, 9)
    assert facts.pad == "attention_mask"
    assert len(set(facts.rows)) == 3


def test_a_sample_keeps_its_identity_whatever_it_is_padded_to() -> None:
    narrow, wide, left = ids(5), ids(9), ids(7, left=True)
    seen = [
        forward(Plain(), input_ids=tokens.to(dtype), attention_mask=tokens != 0).rows
        for tokens, dtype in ((narrow, torch.int64), (wide, torch.int32), (left, torch.int64))
    ]
    assert seen[0] == seen[1] == seen[2]
    assert forward(Plain(padding_idx=0), wide).rows == seen[0]
    assert forward(Plain(), wide).rows == seen[0], "by the trailing run"
    assert forward(Plain(), narrow + 1).rows != seen[0]


def test_torch_and_hugging_face_mask_conventions_are_opposites() -> None:
    tokens = ids(8)
    padding = tokens == 0
    additive = torch.zeros(3, 8).masked_fill(padding, float("-inf"))
    for mask in (padding, additive):
        facts = forward(Plain(), tokens, None, mask)
        assert (facts.real_tokens, facts.pad) == (10, "src_key_padding_mask")
    assert forward(Plain(), input_ids=tokens, attention_mask=~padding).real_tokens == 10


def test_the_embeddings_padding_idx() -> None:
    facts = forward(Plain(padding_idx=0), ids(8))
    assert (facts.real_tokens, facts.pad) == (10, "padding_idx 0")
    full = forward(Plain(padding_idx=99), ids(5) + 1)
    assert (full.real_tokens, full.padded_beyond_longest) == (15, 0)


def test_the_configs_pad_token_counts_only_where_it_occurs() -> None:
    config = SimpleNamespace(pad_token_id=77, eos_token_id=78)
    facts = forward(Plain(config=config), ids(8, pad=77))
    assert (facts.real_tokens, facts.pad) == (10, "config.pad_token_id 77")
    assert forward(Plain(config=config), torch.arange(1, 13).view(2, 6)).real_tokens is None
    # Padding with the end-of-text token leaves one that is real.
    as_end = SimpleNamespace(pad_token_id=77, eos_token_id=77)
    assert forward(Plain(config=as_end), ids(8, pad=77)).real_tokens == 13
    block = torch.tensor([[5, 77, 6, 7], [8, 9, 5, 77]])
    assert forward(Plain(config=as_end), block).real_tokens == 8


def test_trailing_runs_are_padding_only_when_they_look_like_it() -> None:
    facts = forward(Plain(), ids(8, pad=7))
    assert (facts.real_tokens, facts.pad, facts.longest, facts.padded_beyond_longest) == (10, "trailing run of 7", 5, 9)
    for tokens in (
        torch.tensor([[1, 2, 3, 4], [5, 6, 7, 4], [5, 6, 7, 8]]),  # same length
        torch.tensor([[1, 4, 3, 4], [5, 4, 4, 4], [5, 6, 4, 4]]),  # also occurs inside
        torch.tensor([[1, 2, 0, 0], [5, 6, 7, 8], [5, 6, 7, 9]]),  # one row only
        torch.tensor([[1, 2, 0, 0]]),
    ):
        unknown = forward(Plain(), tokens)
        assert (unknown.real_tokens, unknown.padded_beyond_longest, unknown.longest, unknown.pad) == (None,) * 4
        assert unknown.tokens == tokens.numel()


def test_labels_do_not_prove_padding_and_ignored_ones_are_not_counted() -> None:
    tokens = torch.arange(1, 9).view(2, 4)
    labels = tokens.clone()
    labels[0, :3] = -100
    facts = forward(Plain(), tokens, labels)
    assert (facts.tokens, facts.real_tokens, facts.labels) == (8, None, 5)


def test_time_first_batches_need_the_loaders_batch_size() -> None:
    tokens = ids(8)
    facts = forward(Plain(), tokens.T, None, tokens == 0, loader_batch_size=3)
    assert (facts.samples, facts.tokens, facts.real_tokens, facts.width) == (3, 24, 10, 8)
    assert facts.rows == forward(Plain(), input_ids=tokens, attention_mask=tokens != 0).rows
    assert forward(Plain(), tokens.T).samples == 8
    assert forward(Plain(), torch.ones(7, 3, 2), loader_batch_size=3).samples == 3


def test_images_features_and_flat_integers_have_no_tokens() -> None:
    for tensor in (
        torch.rand(4, 3, 8, 8),
        torch.rand(4, 6),
        torch.arange(4),
        torch.zeros(4, 8, 8, 3, dtype=torch.uint8),
    ):
        facts = forward(Plain(), tensor)
        assert (facts.samples, facts.tokens, facts.real_tokens, facts.width) == (4, None, None, None)
        assert len(facts.rows) == 4
    speech = forward(Plain(), input_features=torch.rand(2, 8, 9), labels=torch.ones(2, 5, dtype=torch.long))
    assert (speech.samples, speech.tokens, speech.labels) == (2, None, 10)


def test_float_rows_are_alike_in_all_dtypes_and_large_ones_are_told_apart_by_one_pixel() -> None:
    image = torch.rand(2, 3, 64, 64).bfloat16()
    same = forward(Plain(), image).rows
    assert forward(Plain(), image.double()).rows == forward(Plain(), image.float()).rows == same
    other = image.float()
    other[1, 2, 63, 62] += 1.0
    changed = forward(Plain(), other).rows
    assert changed[0] == same[0]
    assert changed[1] != same[1]
    assert forward(Plain(), torch.tensor([[-0.0]])).rows == forward(Plain(), torch.tensor([[0.0]])).rows
    assert forward(Plain(), torch.tensor([[1.0]])).rows != forward(Plain(), torch.tensor([[1]])).rows


def test_embeddings_in_place_of_ids_and_multiple_choice() -> None:
    embedded = forward(Plain(), inputs_embeds=torch.rand(3, 8, 4), attention_mask=ids(8) != 0)
    assert (embedded.samples, embedded.tokens, embedded.real_tokens, embedded.width) == (3, 24, 10, 8)
    choices = torch.stack([ids(8), ids(8)], dim=1)
    facts = forward(Plain(), input_ids=choices, attention_mask=choices != 0)
    assert (facts.samples, facts.tokens, facts.real_tokens, facts.longest) == (3, 48, 20, 5)
    assert facts.padded_beyond_longest == 18


def test_encoder_decoder_counts_the_encoders_input() -> None:
    facts = forward(
        Plain(),
        decoder_input_ids=torch.ones(3, 20, dtype=torch.long),
        decoder_attention_mask=torch.ones(3, 8),
        attention_mask=ids(8) != 0,
        input_ids=ids(8),
    )
    assert (facts.tokens, facts.real_tokens) == (24, 10)


@dataclasses.dataclass
class Pair:
    position_ids: Any
    tokens: Any


def test_nested_arguments_and_wrapped_modules() -> None:
    tokens = ids(8)
    position = torch.arange(8).expand(3, 8)
    batch = {"input_ids": tokens, "attention_mask": tokens != 0, "labels": tokens}
    for args in ((batch, 0), ([batch],), ({"inputs": batch},)):
        assert observe_forward(Plain(), args, {}, None).real_tokens == 10
    assert observe_forward(Plain(padding_idx=0), (Pair(position, tokens),), {}, None).real_tokens == 10
    wrapped = torch.nn.DataParallel(Plain(padding_idx=0))
    facts = forward(wrapped, tokens, tokens)
    assert (facts.real_tokens, facts.labels, facts.pad) == (10, 24, "padding_idx 0")


def test_what_the_loader_yields() -> None:
    facts = observe_loaded([torch.rand(4, 6), torch.arange(4)])
    assert (facts.samples, facts.tokens, facts.labels) == (4, None, None)
    tokens = ids(8)
    assert observe_loaded({"input_ids": tokens, "attention_mask": tokens != 0}).real_tokens == 10
    assert observe_loaded(tokens, module=Plain(padding_idx=0)).real_tokens == 10
    assert observe_loaded(["text", 3]) == BatchFacts()


def test_unreadable_tensors_still_have_a_size() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(3, 8, dtype=torch.long)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantized tensors are on their way out of torch
        quantized = torch.quantize_per_tensor(torch.rand(3, 8), 0.1, 0, torch.quint8)
    sparse = torch.eye(3, 8).to_sparse()
    meta = torch.ones(3, 8, dtype=torch.long, device="meta")
    for tensor in (fake, quantized, sparse, meta):
        facts = forward(Plain(), tensor, tensor)
        assert (facts.samples, facts.rows, facts.real_tokens) == (3, (), None)
        assert str(facts.pad).startswith("values can't be read")
    assert forward(Plain(), meta).tokens == 24


def test_ragged_and_empty_and_scalar_arguments() -> None:
    ragged = torch.nested.nested_tensor([torch.arange(3), torch.arange(5)], layout=torch.jagged)
    facts = forward(Plain(), ragged)
    assert (facts.samples, facts.tokens, facts.real_tokens, facts.padded_beyond_longest) == (2, 8, 8, 0)
    assert forward(Plain(), torch.empty(0, 8, dtype=torch.long)).samples == 0
    assert forward(Plain(), torch.tensor(3)) == BatchFacts()
    assert forward(Plain(), 3, "text") == BatchFacts()


def test_tensors_under_vmap_do_not_break_the_call() -> None:
    seen, model = [], Plain()

    def call(row: Any) -> Any:
        seen.append(forward(model, row, row))
        return row

    torch.func.vmap(call)(torch.arange(12).view(2, 2, 3))
    assert seen[0].samples == 2
    assert seen[0].rows == ()


def test_observing_leaves_the_random_state_and_the_graph_alone() -> None:
    before = torch.get_rng_state()
    features = torch.rand(3, 8, requires_grad=True)
    torch.set_rng_state(before)
    forward(Plain.__new__(Plain), features)
    assert torch.equal(torch.get_rng_state(), before)
    assert features.grad_fn is None


def test_the_identity_of_a_batch_is_its_rows_in_order() -> None:
    assert batch_identity(("a", "b")) == batch_identity(["a", "b"]) != batch_identity(("b", "a"))
    assert batch_identity(()) is None
