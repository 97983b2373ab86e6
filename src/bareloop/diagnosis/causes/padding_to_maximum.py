"""Batches are padded further than their longest sample.

What it is
----------
Columns of the token tensors that are padding in every row of a micro-batch: the rows were padded to a fixed maximum
(`padding="max_length"`) and not to the longest row of the batch.

Why it costs
------------
The model computes these columns like any others, attention even with the square of the width. A SNLI epoch went from 3
hours to 20 minutes when padded to the longest of the batch (C34).

How it is counted
-----------------
Tokens in such columns over all tokens, averaged over the first steps; reported from 10 % on. Padding up to the longest
row is not meant.

How it is ablated
-----------------
From each batch that the loader yields, the trailing columns that are constant in every integer tensor of the same width
(ids, mask, labels) are cut off, one of them kept; with an attention mask, leading columns without a real token too.
With masked attention and ignored labels the results are the same up to rounding. A model that does not mask its
padding computes something else, and one that needs a fixed width fails: then the pattern is the script's intent.
Dropout draws other numbers for another shape.

What to change
--------------
- transformers: tokenize without padding and use `DataCollatorWithPadding(tokenizer)` (`padding=True`);
  `train_sampling_strategy="group_by_length"` in 5 (`group_by_length=True` in 4) makes rows of a batch alike.
- lightning, accelerate, plain loop: pad in the `collate_fn`, to the longest row (`pad_sequence`).

Example
-------
Sick: rows of 10 to 40 tokens padded to 256. Healthy: `pad_sequence` in the collate function.
`tests/scripts/padding_to_maximum_sick.py`, `padding_to_maximum_twin.py`.

Source
------
C34 https://github.com/QData/TextAttack/issues/737
"""

import copy
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

from bareloop.diagnosis.evidence import Cause, Evidence
from bareloop.diagnosis.settings import framework, major
from bareloop.diagnosis.substitution import NothingToReplace, replaced
from bareloop.trace import Trace

__all__ = ["CAUSE", "trimmed"]

_LEAST_SHARE = 0.1
_PATCHES = "bareloop.profiler.probes.patches"


def detect(trace: Trace) -> Evidence | None:
    """Evidence when at least a tenth of the tokens stands in columns without a real token."""
    steps = [step for step in trace.first.steps if step.padded_beyond_longest is not None and step.tokens]
    tokens = sum(step.tokens or 0 for step in steps)
    if not tokens:
        return None
    share = sum(step.padded_beyond_longest or 0 for step in steps) / tokens
    if share < _LEAST_SHARE:
        return None
    width = max((step.width for step in steps if step.width is not None), default=None)
    longest = max((step.longest for step in steps if step.longest is not None), default=None)
    return Evidence(
        text=(
            f"{share:.0%} of the tokens are padding beyond the longest sample of their batch "
            f"(width {width}, longest sample of these steps {longest})"
        ),
        counts={
            "padded_beyond_longest_share": share,
            "padding_share": trace.work.padding_share,
            "width": width,
            "longest": longest,
        },
    )


@contextmanager
def ablate(data: Mapping[str, Any]) -> Iterator[None]:
    """The training loader's batches come without the columns that are padding in every row.

    Raises:
        NothingToReplace: bareloop's loader probe is not in this process.
    """
    patches = sys.modules.get(_PATCHES)
    if patches is None:
        raise NothingToReplace("the loader is not watched in this process, so its batches can't be trimmed")
    with replaced([(patches, "batch_override", trimmed)]):
        yield


def trimmed(batch: Any) -> Any:
    """The batch without columns that are padding in every row; the batch itself when there are none.

    Takes tensors in dictionaries (also the transformers kind), lists and tuples, nested. The width is that of
    "input_ids", else of the first integer tensor with two dimensions; every tensor of that width in dimension 1 is cut.
    """
    tensors = list(_tensors(batch, ""))
    rows = [(key, tensor) for key, tensor in tensors if tensor.ndim == 2 and _is_integer(tensor)]
    if not rows:
        return batch
    width = next((tensor for key, tensor in rows if key == "input_ids"), rows[0][1]).shape[1]
    if any(width in tensor.shape[2:] for _, tensor in tensors):
        return batch  # a mask of width x width: cutting one dimension of it alone would break the model
    start, stop = _real_columns([(key, tensor) for key, tensor in rows if tensor.shape[1] == width], width)
    return batch if (start, stop) == (0, width) else _cut(batch, width, start, stop)


def _is_integer(tensor: Any) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _tensors(batch: Any, key: str) -> Iterator[tuple[str, Any]]:
    if hasattr(batch, "is_floating_point") and hasattr(batch, "ndim"):
        yield key, batch
    elif isinstance(batch, Mapping):
        for name, value in batch.items():
            yield from _tensors(value, str(name))
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _tensors(value, key)


def _real_columns(rows: list[tuple[str, Any]], width: int) -> tuple[int, int]:
    """First column, and one past the last, that some tensor needs; rows are (key, tensor[rows, width])."""
    last_change, start = 0, 0
    for key, tensor in rows:
        changing = (tensor != tensor[:1, -1:]).any(dim=0).nonzero()
        last_change = max(last_change, int(changing[-1]) if len(changing) else 0)
        if key == "attention_mask":
            real = (tensor != 0).any(dim=0).nonzero()
            start = int(real[0]) if len(real) else 0
    # One constant column stays: it may be an end-of-text token that serves as padding too.
    return start, min(width, last_change + 2)


def _cut(batch: Any, width: int, start: int, stop: int) -> Any:
    if hasattr(batch, "is_floating_point") and hasattr(batch, "ndim"):
        fits = batch.ndim >= 2 and batch.shape[1] == width
        return batch[:, start:stop].contiguous() if fits else batch
    if isinstance(batch, MutableMapping):
        result = copy.copy(batch)
        for name, value in batch.items():
            result[name] = _cut(value, width, start, stop)
        return result
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_cut(value, width, start, stop) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_cut(value, width, start, stop) for value in batch)
    return batch


def setting(trace: Trace) -> str | None:
    """The collator of transformers; elsewhere padding is the script's own code."""
    return "DataCollatorWithPadding(tokenizer), padding=True" if framework(trace) == "transformers" else None


def fix(trace: Trace, evidence: Evidence) -> str:
    """Where to pad."""
    if framework(trace) == "transformers":
        old = (major(trace, "transformers") or 5) < 5
        grouping = "group_by_length=True" if old else 'train_sampling_strategy="group_by_length"'
        return f"Tokenize without padding and pad each batch with DataCollatorWithPadding(tokenizer); add {grouping}."
    return "Pad in the collate_fn to the longest row of the batch (torch.nn.utils.rnn.pad_sequence)."


CAUSE = Cause(
    code="padding_to_maximum",
    title="Batches are padded further than their longest sample",
    detect=detect,
    ablate=ablate,
    status="not_examined",
    setting=setting,
    fix=fix,
)
