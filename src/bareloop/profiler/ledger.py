"""The ledgers of all processes of a run, as one."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from bareloop.trace import Ledger, ProcessFacts

__all__ = ["merged"]

SUMMED = ("samples_per_step", "tokens_per_step", "real_tokens_per_step", "labels_per_step")


def merged(processes: Sequence[ProcessFacts]) -> Ledger:
    """All processes together: what a step consumes is summed, what all of them do alike is the first one's."""
    first = processes[0].work
    ledgers = [process.work for process in processes]
    together = {name: _sum(ledgers, lambda ledger, name=name: getattr(ledger, name)) for name in SUMMED}
    tokens, real = together["tokens_per_step"], together["real_tokens_per_step"]
    padding = 1.0 - real / tokens if tokens and real is not None else None
    return replace(first, **together, padding_share=padding, world_size=max(ledger.world_size for ledger in ledgers))


def _sum(ledgers: Sequence[Ledger], value: Callable[[Ledger], float | None]) -> float | None:
    values = [value(ledger) for ledger in ledgers]
    known = [item for item in values if item is not None]
    return sum(known) if len(known) == len(values) else None
