"""The one error of checkpoints that cannot be written or resumed from."""

__all__ = ["CheckpointError"]


class CheckpointError(RuntimeError, ValueError):
    """A checkpoint could not be written, or cannot be resumed from. The message names the folder and the way out.

    A `ValueError` too, which is what the stock trainer raises for a folder that is not there.
    """
