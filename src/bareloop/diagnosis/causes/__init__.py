"""The catalogue of causes: one file each, and this list. The docstring of a file is its page in the documentation."""

from bareloop.diagnosis.causes import (
    accumulation_differs,
    data_parallel_wrapper,
    flop_count_per_micro_step,
    global_batch_differs,
    gradient_clipping_differs,
    logging_per_step,
    loss_read_per_step,
    module_tree_walk_per_micro_step,
    nan_check_per_step,
    padding_to_maximum,
    planned_passes_differ,
)
from bareloop.diagnosis.evidence import Cause

__all__ = ["CAUSES", "cause"]

CAUSES: tuple[Cause, ...] = (
    global_batch_differs.CAUSE,
    accumulation_differs.CAUSE,
    data_parallel_wrapper.CAUSE,
    planned_passes_differ.CAUSE,
    gradient_clipping_differs.CAUSE,
    padding_to_maximum.CAUSE,
    loss_read_per_step.CAUSE,
    nan_check_per_step.CAUSE,
    module_tree_walk_per_micro_step.CAUSE,
    flop_count_per_micro_step.CAUSE,
    logging_per_step.CAUSE,
)


def cause(code: str) -> Cause:
    """The cause with this code.

    Raises:
        ValueError: no such cause.
    """
    for entry in CAUSES:
        if entry.code == code:
            return entry
    raise ValueError(f"cause must be one of {', '.join(entry.code for entry in CAUSES)}; got {code!r}")
