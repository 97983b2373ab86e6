"""`trainer.lean_report`: which parts of the hot loop are lean in this run, which are not, and why."""

from dataclasses import dataclass

__all__ = ["LOOP", "FallBack", "LeanReport"]

LOOP = "loop"
"""The part of a fall back that takes the whole hot loop: the stock one runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FallBack:
    """A part of the loop that is not lean."""

    part: str
    """`LOOP`, or one part of it: "training_step", "clip", "events", ..."""
    reason: str
    """Why, in a clause: what was found, and where."""

    def __str__(self) -> str:
        return f"{self.part}: {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LeanReport:
    """What a lean trainer does of the stock trainer's hot loop, at the moment of asking.

    Before `train()` it says what can be known then; the parts are decided when an epoch starts.
    """

    loop_is_lean: bool
    """False: the stock loop runs (or would), for the reasons in `fallen_back`."""
    lean: tuple[str, ...] = ()
    """Parts that are lean; empty before the first epoch and under the stock loop."""
    fallen_back: tuple[FallBack, ...] = ()
    """Parts that run as the stock loop runs them: overridden by the user, unknown to this version, or not covered."""
    non_finite_losses: int = 0
    """Micro-steps with a loss of NaN or infinity since `train()` began that `logging_nan_inf_filter` kept out of the
    logged loss, in this process. Without the filter they are in the logged loss and are not counted here."""
    largest_micro_batch: int | None = None
    """Samples of the largest micro-batch that is tried since an out-of-memory error, under `shrink_on_out_of_memory`."""

    def reasons(self, part: str) -> tuple[str, ...]:
        """Why `part` is not lean; empty when it is, or has not been decided yet."""
        return tuple(each.reason for each in self.fallen_back if each.part == part)

    def __str__(self) -> str:
        lines = ["hot loop: " + ("lean" if self.loop_is_lean else "stock")]
        if self.lean:
            lines.append("lean parts: " + ", ".join(self.lean))
        lines.extend(f"not lean: {each}" for each in self.fallen_back)
        if self.non_finite_losses:
            lines.append(f"losses of NaN or infinity kept out of the log: {self.non_finite_losses} micro-steps")
        if self.largest_micro_batch is not None:
            lines.append(f"after running out of memory: micro-batches of at most {self.largest_micro_batch} samples")
        return "\n".join(lines)
