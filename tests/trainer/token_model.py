"""A small model that takes no loss keywords, batches with uneven masks, and what `steps` is held to with them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "IGNORED",
    "Batch",
    "Record",
    "Rounds",
    "adamw",
    "batches",
    "by_hand",
    "counted_on_the_host",
    "distance",
    "full",
    "gradients_at_steps",
    "gradients_of_the_whole",
    "mean_loss",
    "model",
    "sgd",
    "state",
    "summed_loss",
]

VOCABULARY, LENGTH = 11, 6
IGNORED = -100

Batch = tuple[Tensor, Tensor]
"""tokens[batch, LENGTH], labels[batch, LENGTH]; IGNORED where nothing is to be predicted."""


def model(seed: int = 0, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Embedding(VOCABULARY, 8), nn.Linear(8, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, VOCABULARY)
    )


def batches(sizes: Sequence[int], seed: int = 1) -> list[Batch]:
    """The same rows for the same sum of `sizes`, however they are split. Row i has i % LENGTH + 1 labels or none."""
    generator = torch.Generator().manual_seed(seed)
    rows = sum(sizes)
    tokens = torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)
    labels = torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)
    kept = torch.arange(LENGTH) <= (torch.arange(rows) % LENGTH)[:, None]
    kept[::5] = False
    labels = labels.masked_fill(~kept, IGNORED)
    return list(zip(tokens.split(list(sizes)), labels.split(list(sizes)), strict=True))


def summed_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """(sum over the labels, their number as a tensor that nobody has read)."""
    tokens, labels = batch
    logits = model(tokens.flatten())
    loss = nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss, (labels != IGNORED).sum()


def counted_on_the_host(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    loss, count = summed_loss(model, batch)
    return loss, int(count)


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    loss, count = summed_loss(model, batch)
    return loss / count.clamp(min=1)


@dataclass
class Record:
    """What a loop gives: 0-d tensors, one for each step."""

    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)


def by_hand(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Any],
    loss_fn: Callable[[nn.Module, Any], Tensor],
    *,
    accumulate: int = 1,
    max_norm: float | None = None,
    scheduler: Any = None,
    precision: str | None = None,
    scaler: Any = None,
) -> Record:
    """The loop that people write. A window that is cut short is averaged over what it has."""
    record = Record()
    batches = list(batches)
    types = {"bf16": torch.bfloat16, "fp16": torch.float16}
    model.train()
    losses = []
    for index, batch in enumerate(batches):
        first = index - index % accumulate
        with torch.autocast("cpu", dtype=types[precision]) if precision else nullcontext():
            loss = loss_fn(model, batch)
        divided = loss if accumulate == 1 else loss / min(accumulate, len(batches) - first)
        (scaler.scale(divided) if scaler else divided).backward()
        losses.append(loss.detach())
        if len(losses) < accumulate and index + 1 < len(batches):
            continue
        if max_norm is not None:
            if scaler:
                scaler.unscale_(optimizer)
            record.norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm))
        if scaler:
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            stepped = scaler.get_scale() >= before
        else:
            optimizer.step()
            stepped = True
        if scheduler is not None and stepped:
            scheduler.step()
        optimizer.zero_grad()
        record.losses.append(losses[0] if len(losses) == 1 else torch.stack(losses).sum() / len(losses))
        losses = []
    return record


def gradients_at_steps(optimizer: torch.optim.Optimizer) -> list[list[Tensor]]:
    """A list that gets a copy of all gradients at each step of `optimizer`, as the step sees them."""
    seen: list[list[Tensor]] = []

    def copy(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters]
        seen.append([full(gradient).clone() for gradient in gradients])

    optimizer.register_step_pre_hook(copy)
    return seen


def full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Weights and optimizer state, to compare bit by bit."""
    kept = [value for group in optimizer.state.values() for value in group.values() if isinstance(value, Tensor)]
    return [*model.state_dict().values(), *kept]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def gradients_of_the_whole(rows: int = 32) -> list[Tensor]:
    """Gradients of all rows as one batch: the loss summed, divided by the count, backward."""
    whole = model()
    loss, count = summed_loss(whole, batches([rows])[0])
    (loss / count).backward()
    return [parameter.grad for parameter in whole.parameters()]


def distance(left: list[Tensor], right: list[Tensor]) -> float:
    """Norm of the difference relative to the norm of `right`."""
    flat, reference = (torch.cat([tensor.flatten() for tensor in tensors]).double() for tensors in (left, right))
    return float((flat - reference).norm() / reference.norm())


class Rounds:
    """A swarm of one: a round takes `target` items. `failures` averages fail first."""

    def __init__(self, model: nn.Module, target: int, failures: int = 0) -> None:
        self.parameters, self.target, self.failures = list(model.parameters()), target, failures
        self.sums: list[Tensor | None] = [None] * len(self.parameters)
        self.items = 0.0

    @contextmanager
    def micro_batch(self, count: Any, *, reduction: str) -> Iterator[None]:
        yield
        weight = 1.0 if reduction == "sum" else float(count)
        for index, parameter in enumerate(self.parameters):
            old = self.sums[index]
            self.sums[index] = parameter.grad * weight + (0 if old is None else old)
            parameter.grad = None
        self.items += float(count)

    def ready(self) -> bool:
        return self.items >= self.target

    @contextmanager
    def averaged(self) -> Iterator[object]:
        if self.failures:
            self.failures -= 1
            yield False
            return
        for parameter, total in zip(self.parameters, self.sums, strict=True):
            parameter.grad = total / self.items
        yield
        for index, parameter in enumerate(self.parameters):
            parameter.grad, self.sums[index] = None, None
        self.items = 0.0
