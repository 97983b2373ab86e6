"""Packed rows to batches in which documents do not see each other, and the proof that a model keeps to it.

How a model learns where a document begins depends on its attention; three ways, for transformers 5.24:

- `position_ids` (default; any causal model with sdpa, eager or flex attention). transformers finds the documents where
  positions do not go on by one and masks between them, but only without an attention mask and **without a cache**:
  models have `use_cache=True` in their config and then see across documents without a word. So the batch says
  `use_cache=False`. (The Trainer sets the config to False itself.)
- `cu_seq_lens` (flash attention). All rows as one, `[1, tokens]`, without padding, with the offsets that the kernels
  take; `position_ids` alone would hold only for batches of one row there.
- `mask` (encoders and models of your own). A block-diagonal mask `[batch, 1, width, width]`, which transformers passes
  on as it is: bool for sdpa; for eager, which adds it, pass `mask_dtype=torch.float32`. It costs width squared in
  memory and knows nothing of sliding windows.

Rows are padded with one more document at their end, whose labels are all -100: no attention mask is needed.
`check_boundaries` runs a model on two documents and fails where one sees the other; call it once before you train.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bareloop.data.packing import IGNORED, Piece, as_document, first_fit, packed_row

__all__ = ["PackedCollator", "PackingCollator", "block_mask", "check_boundaries", "document_ids"]

_BOUNDARIES = ("position_ids", "cu_seq_lens", "mask")


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedCollator:
    """Rows of `bareloop.data.packing` to a batch; a row without `position_ids` is a document by itself.

    `collator(rows)` returns `input_ids`, `position_ids` and the rows' other columns, int64 `[rows, width]` (floats stay
    floats), and what `boundaries` needs. It raises ValueError for rows that differ in columns, are wider than `width`
    or still hold padding.

    Raises:
        ValueError: options that do not go together.
    """

    boundaries: Literal["position_ids", "cu_seq_lens", "mask"] = "position_ids"
    """How the model is told where documents begin; see the module."""

    causal: bool = True
    """Labels are next tokens, and the first of each document is not predicted. False: labels stay as they are, and the
    mask lets each token see all of its document; needs `mask` or `cu_seq_lens`."""

    width: int | None = None
    """Tokens that every row is padded to; None pads to the longest row of the batch. One shape for all batches suits
    torch.compile and is needed under accelerate's dispatcher."""

    pad_token_id: int = 0
    """The token in padding. Any will do: nothing sees it. GPT-2 warns when it is the one in the model's config."""

    first_position: int = 0
    """Position of a document's first token: `padding_idx + 1` for RoBERTa and its relatives."""

    pass_use_cache: bool = True
    """Only for `position_ids`: put `use_cache=False` into the batch. Switch it off for a model whose forward does not
    take it, after `check_boundaries`, and under accelerate's dispatcher, which takes tensors only."""

    mask_dtype: torch.dtype = torch.bool
    """Only for `mask`: bool, True where attention is allowed, or the model's float type, 0 there and its lowest
    elsewhere."""

    def __post_init__(self) -> None:
        if self.boundaries not in _BOUNDARIES:
            raise ValueError(f"boundaries={self.boundaries!r}: must be one of {', '.join(map(repr, _BOUNDARIES))}")
        if not self.causal and self.boundaries == "position_ids":
            raise ValueError(
                'causal=False with boundaries="position_ids": transformers masks between documents in causal models '
                'only; use boundaries="mask", or "cu_seq_lens" for flash attention'
            )
        if self.mask_dtype != torch.bool and self.boundaries != "mask":
            raise ValueError(f'mask_dtype={self.mask_dtype} has no effect with boundaries="{self.boundaries}"')
        if self.width is not None and self.width < 1:
            raise ValueError(f"width={self.width}: must be at least 1 token, or None for the longest row")

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        columns = [_row(row, causal=self.causal) for row in rows]
        if any(row.keys() != columns[0].keys() for row in columns):
            raise ValueError(f"rows have different columns: {sorted({tuple(sorted(row)) for row in columns})}")
        if self.boundaries == "cu_seq_lens":
            columns = [{name: [value for row in columns for value in row[name]] for name in columns[0]}]
        batch: dict[str, Any] = self._padded(columns)
        documents = document_ids(batch["position_ids"])
        if self.causal:
            batch["labels"][_starts(documents)] = IGNORED
        if self.first_position:
            batch["position_ids"] += self.first_position
        if self.boundaries == "cu_seq_lens":
            batch |= _offsets(documents)
        elif self.boundaries == "mask":
            batch["attention_mask"] = block_mask(documents, causal=self.causal, dtype=self.mask_dtype)
        elif self.pass_use_cache:
            batch["use_cache"] = False
        return batch

    def _padded(self, rows: Sequence[Mapping[str, list[Any]]]) -> dict[str, Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)
        width = longest if self.width is None else self.width
        if longest > width:
            raise ValueError(
                f"width={width}: a row has {longest} tokens; make it at least the length that rows are packed to"
            )
        fill = {"input_ids": self.pad_token_id, "labels": IGNORED}
        batch: dict[str, Tensor] = {}
        for name in rows[0]:
            short = [width - len(row[name]) for row in rows]
            # The padding is a document: its positions start at 0 like any other's.
            tails = [list(range(n)) if name == "position_ids" else [fill.get(name, 0)] * n for n in short]
            batch[name] = torch.tensor([[*row[name], *tail] for row, tail in zip(rows, tails, strict=True)])
        return batch


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingCollator:
    """Documents of a batch to that same batch, packed: same documents per update, in fewer and fuller rows.

    The loss of a batch is the mean over its tokens, so losses, gradients and the number of updates are those of the
    padded batch up to rounding; only the padding is gone. Sampler, batch size and learning rate stay.

    `collator(documents)` raises ValueError for a document longer than `length`.
    """

    rows: PackedCollator = field(default_factory=PackedCollator)
    """From rows to tensors."""

    length: int | None = None
    """Tokens of a row; None takes the longest document of the batch, the least work for attention with a mask."""

    def __call__(self, documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        causal = self.rows.causal
        columns = [as_document(document, causal=causal) for document in documents]
        lengths = [len(document["input_ids"]) for document in columns]
        longest = max(lengths)
        if self.length is not None and longest > self.length:
            raise ValueError(f"length={self.length}: a document has {longest} tokens; raise it, or pass None")
        groups = first_fit(lengths, self.length or longest)
        return self.rows(
            [
                packed_row([Piece(columns[index], 0, lengths[index]) for index in sorted(group)], causal=causal)
                for group in groups
            ]
        )


def document_ids(position_ids: Tensor) -> Tensor:
    """`[batch, width]`: 0 for the tokens of a row's first document, 1 for those of its second, and so on.

    Args:
        position_ids: `[batch, width]`, going up by one inside a document.
    """
    restarts = position_ids[:, 1:] != position_ids[:, :-1] + 1
    return nn.functional.pad(restarts.long().cumsum(1), (1, 0))


def block_mask(documents: Tensor, *, causal: bool, dtype: torch.dtype = torch.bool) -> Tensor:
    """`[batch, 1, width, width]`: which token (row) sees which (column), for `documents[batch, width]`.

    Args:
        documents: number of the document that each token is of.
        causal: a token sees those before it and itself, not those after it.
        dtype: bool is True where attention is allowed; a float type is 0 there and its lowest value elsewhere.
    """
    allowed = documents[:, :, None] == documents[:, None, :]
    if causal:
        allowed = allowed.tril()
    allowed = allowed[:, None]
    if dtype == torch.bool:
        return allowed
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(~allowed, torch.finfo(dtype).min)


def check_boundaries(model: nn.Module, collator: PackedCollator) -> None:
    """Returns when `model`, fed by `collator`, keeps packed documents apart and gives each the positions it has alone.

    Three forward passes in eval mode, without gradients, over random tokens: the logits of a row's second document must
    not change with the tokens of the first, and must be those of the second as plain `input_ids`, up to rounding.

    Args:
        model: takes what `collator` makes, returns `logits[batch, width, ...]` as an attribute.
        collator: the one that training will use.

    Raises:
        ValueError: a document sees another, or stands at other positions than alone; says what to do.
    """
    first, other, second = _random_documents(model, (6, 6, 7))
    with _evaluated(model), torch.no_grad():
        beside, beside_other = (_logits(model, **_joined(collator, one, second))[:, 6:13] for one in (first, other))
        alone = _logits(model, input_ids=torch.tensor([second]))
    scale, eps = float(alone.abs().max()), torch.finfo(alone.dtype).eps
    leak = float((beside - beside_other).abs().max())
    # The shapes are equal, and what is masked counts with a weight of exactly 0.
    if not leak <= 8 * eps * scale:
        raise ValueError(
            f'boundaries="{collator.boundaries}": documents of {type(model).__name__} see each other, a logit moves by '
            f"{leak:.2g} of {scale:.2g} with the tokens of the document before it; {_way_out(model, collator)}"
        )
    moved = float((beside - alone).abs().max())
    if not moved <= max(1e-4, 16 * eps) * scale:
        raise ValueError(
            f'boundaries="{collator.boundaries}": {type(model).__name__} computes other logits for a packed document '
            f"than for the same one alone (by {moved:.2g} of {scale:.2g}), though it does not see the one before it: "
            f"its positions differ (first_position={collator.first_position}; padding_idx + 1 for RoBERTa), or it has a "
            'sliding window, which boundaries="mask" overrides'
        )


def _joined(collator: PackedCollator, *documents: list[int]) -> dict[str, Any]:
    columns = [as_document({"input_ids": tokens}, causal=collator.causal) for tokens in documents]
    row = packed_row([Piece(column, 0, len(column["input_ids"])) for column in columns], causal=collator.causal)
    return collator([row])


def _logits(model: nn.Module, **batch: Any) -> Tensor:
    device = next(model.parameters()).device
    inputs = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
    inputs.pop("labels", None)
    return model(**inputs).logits


def _way_out(model: nn.Module, collator: PackedCollator) -> str:
    attention = getattr(getattr(model, "config", None), "_attn_implementation", "unknown")
    if collator.boundaries == "position_ids" and not collator.pass_use_cache:
        return "set model.config.use_cache = False, or leave pass_use_cache on"
    if collator.boundaries == "mask":
        return f"its attention is {attention}: sdpa takes mask_dtype=torch.bool, eager the model's float type"
    return f'its attention is {attention}: flash needs boundaries="cu_seq_lens", others may work with "mask"'


@contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, and afterwards each module in the mode that it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _random_documents(model: nn.Module, lengths: Sequence[int]) -> list[list[int]]:
    """Tokens that the model knows, without the one for padding, which has positions of its own in RoBERTa."""
    embedding: Any = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    tokens = torch.tensor([token for token in range(embedding.num_embeddings) if token != padding])
    chance = torch.Generator().manual_seed(0)
    return [tokens[torch.randint(len(tokens), (length,), generator=chance)].tolist() for length in lengths]


def _row(row: Mapping[str, Any], *, causal: bool) -> dict[str, list[Any]]:
    """Columns of a packed row as lists; those of a document with the positions of one."""
    columns = as_document(row, causal=causal)
    if len(columns["input_ids"]) != len(row["input_ids"]):
        raise ValueError("a row has padding (zeros in its attention_mask): pack it, which takes the padding away")
    positions = row.get("position_ids")
    if positions is None:
        positions = range(len(columns["input_ids"]))
    return {**columns, "position_ids": [int(position) for position in positions]}


def _starts(documents: Tensor) -> Tensor:
    """`[batch, width]`: True at the first token of each document."""
    first = torch.ones_like(documents[:, :1], dtype=torch.bool)
    return torch.cat([first, documents[:, 1:] != documents[:, :-1]], 1)


def _offsets(documents: Tensor) -> dict[str, Any]:
    """What flash attention's kernels for sequences of unequal length take, for `documents[1, tokens]`."""
    starts = _starts(documents)[0].nonzero().flatten()
    ends = torch.cat([starts, starts.new_tensor([documents.shape[1]])]).int()
    longest = int(ends.diff().max())
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
