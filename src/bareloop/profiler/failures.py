"""The ways a run ends without a report, one class per exit code."""

__all__ = ["RunFailed", "ScriptFailed", "UsageError"]


class UsageError(ValueError):
    """The user named something that can't be (exit code 2): no such script, a step count below one."""


class RunFailed(RuntimeError):
    """bareloop could not make a report (exit code 3). Says nothing about the script's quality."""


class ScriptFailed(RuntimeError):
    """The script ended by its own fault (exit code 4).

    `output` is the end of what it printed, its own traceback included.
    """

    def __init__(self, message: str, *, output: str = "", returncode: int | None = None) -> None:
        super().__init__(message)
        self.output = output
        self.returncode = returncode
