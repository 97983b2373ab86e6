"""What one micro-batch holds, read off the tensors that went into the model.

Reads values (a host copy on an accelerator) and hashes them: for the first steps only, never in a timing window.
The shape legend: B samples, T columns, S sequences per sample (1 but for multiple choice).
"""

import ctypes
import dataclasses
import hashlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["BatchFacts", "batch_identity", "observe_forward", "observe_loaded"]

_LABELS = {"labels", "label", "target", "targets", "lm_labels", "label_ids", "labels_ids"}
_SIDE_INPUTS = {"position_ids", "token_type_ids", "cache_position", "segment_ids", "langs", "head_mask", "batch_idx"}
_WRAPPERS = ("module", "_orig_mod", "_forward_module")
_DEEPEST = 2
_IGNORED = -100
_LARGEST_ROW_BYTES = 16384
_SAMPLED = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchFacts:
    """One micro-batch of one process. None means "can't be told", never zero."""

    samples: int | None = None
    tokens: int | None = None
    """Tokens with padding; None for float inputs (images, features) and for 1-D integers."""
    real_tokens: int | None = None
    """Tokens without padding; None when padding can't be told from data."""
    labels: int | None = None
    """Labels that are not -100; None when no labels went in."""
    longest: int | None = None
    """Longest sample without padding, in tokens."""
    width: int | None = None
    """Columns of the ids, padding included, in tokens."""
    padded_beyond_longest: int | None = None
    """Tokens in columns that are padding in every row."""
    rows: tuple[str, ...] = ()
    """Identity of each sample in order, padding taken off; empty when the values can't be read."""
    pad: str | None = None
    """How padding was told from data, e.g. "attention_mask", "padding_idx 0", "trailing run of 0"; else why not."""


def observe_forward(
    module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], loader_batch_size: int | None
) -> BatchFacts:
    """The facts of the batch that `module(*args, **kwargs)` was called with.

    The tensor that speaks for the batch is `input_ids`, else the first integer tensor of two or more dimensions, else
    the first tensor. For encoder-decoder models that is the encoder's input: decoder tokens are not counted. Padding
    is known from, in this order: the attention mask or a `*padding_mask`; the first embedding's `padding_idx`;
    `config.pad_token_id` where it occurs; rows that end in runs, of different lengths, of one value found nowhere else.

    Args:
        loader_batch_size: samples per batch of the loader; tells [T, B] from [B, T]. None when not known.
    """
    named = list(_named(_bound(module, args, kwargs)))
    return _observe(named, module, loader_batch_size)


def observe_loaded(batch: Any, loader_batch_size: int | None = None, module: Any = None) -> BatchFacts:
    """The facts of a batch as the loader yielded it, by the rules of `observe_forward`.

    Args:
        module: the model, when known: its `padding_idx` and `config` tell padding.
    """
    return _observe(list(_named({"batch": batch})), module, loader_batch_size)


def batch_identity(rows: tuple[str, ...] | list[str]) -> str | None:
    """Identity of samples in their order, 16 hex digits; None for no rows, which would equal any other unread batch."""
    return hashlib.blake2b("".join(rows).encode(), digest_size=8).hexdigest() if rows else None


def _bound(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name: positional ones get the names of the innermost forward where it has them."""
    inner = _unwrapped(module)
    names: list[str] = []
    if args and hasattr(inner, "forward"):
        try:
            parameters = inspect.signature(inner.forward).parameters.values()
            names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        except (TypeError, ValueError):  # a scripted module has no signature: its arguments stay unnamed
            names = []
    bound = {names[i] if i < len(names) else f"argument {i}": value for i, value in enumerate(args)}
    return {**bound, **kwargs}


def _named(values: Mapping[Any, Any], depth: int = 0) -> Iterator[tuple[str, Any]]:
    """(name, tensor) of every tensor, depth first; a tensor in a list or tuple has the name of the list."""
    import torch

    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            yield str(name), value
        elif depth < _DEEPEST:
            yield from _named_inside(str(name), value, depth + 1)


def _named_inside(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from _named(value, depth)
    elif isinstance(value, (list, tuple)):
        fields = getattr(value, "_fields", None) or [name] * len(value)
        for field, item in zip(fields, value, strict=True):
            yield from _named({field: item}, depth)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _named({f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}, depth)


def _observe(named: list[tuple[str, Any]], module: Any, loader_batch_size: int | None) -> BatchFacts:
    import torch

    primary = _primary(named)
    if primary is None or not primary[1].dim():
        return BatchFacts()
    name, tensor = primary
    with torch.no_grad():
        if hasattr(tensor, "to_local"):  # a DTensor: this process's share
            tensor = tensor.to_local()
        if tensor.is_nested:
            return _ragged(tensor)
        batch_dim = _batch_dim(tensor, loader_batch_size)
        facts = BatchFacts(samples=int(tensor.shape[batch_dim]))
        if _is_sequence(name, tensor):
            width = int(tensor.shape[_width_dim(name, tensor, batch_dim)])
            facts = dataclasses.replace(facts, width=width, tokens=_tokens(name, tensor))
        local = _readable(tensor)
        if local is None:
            return dataclasses.replace(facts, pad="values can't be read")
        try:
            facts = dataclasses.replace(facts, labels=_labels(named))
            return _observe_values(facts, name, local.transpose(0, batch_dim) if batch_dim else local, named, module)
        except RuntimeError as error:  # vmapped and traced tensors refuse to give their values
            return dataclasses.replace(facts, pad=f"values can't be read: {str(error).splitlines()[0]}")


def _ragged(tensor: Any) -> BatchFacts:
    """A nested tensor has no padding to tell."""
    tokens = int(tensor.numel()) if tensor.dim() == 2 and not tensor.is_floating_point() else None
    return BatchFacts(
        samples=int(tensor.size(0)),
        tokens=tokens,
        real_tokens=tokens,
        padded_beyond_longest=None if tokens is None else 0,
        pad="nested tensor",
    )


def _observe_values(facts: BatchFacts, name: str, batch: Any, named: list[tuple[str, Any]], module: Any) -> BatchFacts:
    """Adds what needs values: `batch` is [B, ...]."""
    batch = batch.cpu()
    real, pad = None, None
    if facts.tokens is not None:
        real, pad = _real(name, batch, named, module)
    rows = _identities(batch, real)
    if real is None:
        return dataclasses.replace(facts, rows=rows, pad=pad)
    per_sequence = real.flatten(0, -2).sum(dim=-1)
    empty_columns = int((~real.flatten(0, -2).any(dim=0)).sum())
    return dataclasses.replace(
        facts,
        real_tokens=int(real.sum()),
        longest=int(per_sequence.max()) if per_sequence.numel() else 0,
        padded_beyond_longest=empty_columns * int(per_sequence.numel()),
        rows=rows,
        pad=pad,
    )


def _primary(named: list[tuple[str, Any]]) -> tuple[str, Any] | None:
    for wanted in ("input_ids", "inputs_embeds"):
        found = next(((name, tensor) for name, tensor in named if name == wanted), None)
        if found is not None:
            return found
    candidates = [(name, tensor) for name, tensor in named if not _is_side_input(name)]
    integers = (pair for pair in candidates if pair[1].dim() >= 2 and _is_ids(pair[1]))
    return next(integers, None) or (candidates[0] if candidates else None)


def _is_side_input(name: str) -> bool:
    side = name in _LABELS or name in _SIDE_INPUTS or name.endswith("_mask") or name == "mask"
    return side or name.startswith(("decoder_", "tgt_", "memory_"))


def _is_ids(tensor: Any) -> bool:
    """Integers that may be token ids: bytes are only when flat rows, else they are an image."""
    import torch

    if tensor.dtype == torch.uint8:
        return tensor.dim() == 2
    return tensor.dtype in (torch.int8, torch.int16, torch.int32, torch.int64)


def _is_sequence(name: str, tensor: Any) -> bool:
    return (name == "inputs_embeds" and tensor.dim() == 3) or (tensor.dim() >= 2 and _is_ids(tensor))


def _width_dim(name: str, tensor: Any, batch_dim: int) -> int:
    if name == "inputs_embeds":
        return 1 - batch_dim
    return 0 if batch_dim == 1 else tensor.dim() - 1


def _tokens(name: str, tensor: Any) -> int:
    return int(tensor.shape[0] * tensor.shape[1]) if name == "inputs_embeds" else int(tensor.numel())


def _batch_dim(tensor: Any, loader_batch_size: int | None) -> int:
    """1 for [T, B], as nn.Transformer takes it by default: only the loader's batch size tells."""
    if loader_batch_size is None or tensor.dim() < 2:
        return 0
    return int(tensor.shape[0] != loader_batch_size and tensor.shape[1] == loader_batch_size)


def _readable(tensor: Any) -> Any:
    """The dense tensor whose values can be copied to the host; None for meta, fake, sparse, quantized and nested."""
    import torch

    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    fake = type(tensor).__name__ in ("FakeTensor", "FunctionalTensor", "AsyncCollectiveTensor")
    dense = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_nested
    return tensor if dense and not fake and tensor.device.type != "meta" else None


def _labels(named: list[tuple[str, Any]]) -> int | None:
    for name, tensor in named:
        if name in _LABELS:
            if tensor.is_floating_point() or tensor.is_complex():
                return int(tensor.numel())
            readable = _readable(tensor)
            return None if readable is None else int((readable != _IGNORED).sum())
    return None


def _real(name: str, batch: Any, named: list[tuple[str, Any]], module: Any) -> tuple[Any, str | None]:
    """(bool [B, S, T] or [B, T] that is True at real tokens, how it is known), (None, None) when it isn't."""
    masked = _real_from_mask(batch.shape[:2] if name == "inputs_embeds" else batch.shape, named)
    if masked is not None or name == "inputs_embeds":
        return masked or (None, None)
    padding_idx = _padding_idx(module, batch)
    if padding_idx is not None:
        return ~_ends(batch, padding_idx), f"padding_idx {padding_idx}"
    config = getattr(_unwrapped(module), "config", None)
    pad, eos = getattr(config, "pad_token_id", None), getattr(config, "eos_token_id", None)
    if isinstance(pad, int) and bool((batch == pad).any()):
        is_eos = pad in eos if isinstance(eos, (list, tuple)) else pad == eos
        return ~_ends(batch, pad, spare_first=is_eos), f"config.pad_token_id {pad}"
    value = _repeated_end(batch)
    return (None, None) if value is None else (~_ends(batch, value), f"trailing run of {value}")


def _real_from_mask(shape: Any, named: list[tuple[str, Any]]) -> tuple[Any, str] | None:
    """attention_mask is 1 where real (Hugging Face), *padding_mask is True or -inf where padding (torch)."""
    masks = [(n, t) for n, t in named if n == "attention_mask"] + [
        (n, t) for n, t in named if n.endswith("padding_mask") and not n.startswith(("decoder_", "tgt_", "memory_"))
    ]
    for name, tensor in masks:
        mask = _readable(tensor)
        if mask is None or tuple(mask.shape) != tuple(shape):
            continue
        mask = mask.cpu()
        additive = mask.is_floating_point() and bool((mask < 0).any())
        marks_real = name == "attention_mask" and not additive
        return (mask != 0 if marks_real else mask == 0), name
    return None


def _unwrapped(module: Any) -> Any:
    for _ in range(4):
        children = getattr(module, "_modules", {})
        module = next((children[name] for name in _WRAPPERS if children.get(name) is not None), module)
    return module


def _padding_idx(module: Any, batch: Any) -> int | None:
    """padding_idx of the module's first embedding, when the ids fit into it."""
    import torch

    if not isinstance(module, torch.nn.Module):
        return None
    first = next((m for m in module.modules() if isinstance(m, (torch.nn.Embedding, torch.nn.EmbeddingBag))), None)
    if first is None or first.padding_idx is None or int(batch.max()) >= first.num_embeddings:
        return None
    return int(first.padding_idx)


def _ends(batch: Any, value: int, spare_first: bool = False) -> Any:
    """True in the runs of `value` that open or close a row; inner occurrences are tokens like any other.

    Args:
        spare_first: the first of a closing run is a token: padding with the end-of-text token leaves the real one.
    """
    same = (batch == value).long()
    closing = same.flip(-1).cumprod(dim=-1).flip(-1)
    if spare_first:
        closing[..., 1:] = closing[..., 1:] * closing[..., :-1].clone()
        closing[..., 0] = 0
    return (closing + same.cumprod(dim=-1) * (1 - int(spare_first))) > 0


def _repeated_end(batch: Any) -> int | None:
    """The value that ends most rows, in runs of different lengths, and occurs nowhere else; None without one."""
    import torch

    sequences = batch.flatten(0, -2)
    if sequences.shape[0] < 2 or sequences.shape[1] < 2:
        return None
    value = int(torch.mode(sequences[:, -1].long()).values)
    runs = _ends(sequences, value).sum(dim=-1)
    ending = int((sequences[:, -1] == value).sum())
    occurs_inside = int((sequences == value).sum()) != int(runs.sum())
    runs = runs.tolist()
    common = ending >= 2 and 2 * ending > len(runs)
    if occurs_inside or not common or len(set(runs)) < 2 or sum(run >= 2 for run in runs) < 2:
        return None
    return value


def _identities(batch: Any, real: Any) -> tuple[str, ...]:
    """One hash per sample of [B, ...], over the real elements, alike for all integer and all float dtypes."""
    import torch

    if batch.is_complex():
        batch = torch.view_as_real(batch)
    floating = batch.is_floating_point()
    batch = batch.to(torch.float32 if floating else torch.int64).contiguous()
    family = b"f" if floating else b"i"
    if real is None:
        return tuple(_digest(family, row) for row in batch)
    return tuple(_digest(family, row[mask]) for row, mask in zip(batch, real, strict=True))


def _digest(family: bytes, row: Any) -> str:
    """12 bytes of blake2b, in hex. Large rows (images) go in as a sample in order and a sum of the bits of all."""
    import torch

    row = row.contiguous().reshape(-1)
    state = hashlib.blake2b(family, digest_size=12)
    if row.numel() * row.element_size() > _LARGEST_ROW_BYTES:
        pairs = row[: row.numel() // 2 * 2].view(torch.int64)  # an odd last element is left out
        state.update(f"{row.numel()} {int(pairs.sum())}".encode())
        row = row[:: row.numel() // _SAMPLED].contiguous()
    if row.numel():
        row = row + 0.0 if row.is_floating_point() else row  # -0.0 and 0.0 are one value
        # Without numpy, which a torch install need not have.
        state.update(ctypes.string_at(row.data_ptr(), row.numel() * row.element_size()))
    return state.hexdigest()
