"""What the user typed after `bareloop explain`, as a command that can be started."""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from bareloop.profiler.failures import UsageError

__all__ = ["Command", "command_from_side", "command_from_words"]

LABEL_WIDTH = 60
LAUNCHERS = ("python", "torchrun", "accelerate", "deepspeed")
"""Programs whose first word ending in .py is the script they start, so its absence can be told beforehand."""
WAYS_OUT = "give a script that ends in .py, -m MODULE, or after -- the whole command, e.g. -- torchrun train.py"


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command that trains."""

    label: str
    """What the user wrote, cut to 60 characters."""
    argv: tuple[str, ...]
    """What is started: the first word is a path."""
    script: str | None
    """The Python file that it runs, as the user wrote it; None for a module or when it can't be told."""


def command_from_words(words: Sequence[str], *, module: str | None = None) -> Command:
    """The command for `words`: a script and its arguments, or with a program first, a whole command line.

    Args:
        words: as a shell hands them over. A leading "--" is dropped; leading words "-m", MODULE name a module.
        module: module to run with `words` as its arguments.

    Raises:
        UsageError: nothing to run, no such script, no such program.
    """
    words = tuple(words[1:] if words and words[0] == "--" and module is None else words)
    if module is None and words[:1] == ("-m",):
        if len(words) < 2:
            raise UsageError("-m needs the name of a module, as in: -m package.module ARGS")
        module, words = words[1], words[2:]
    if module is not None:
        label = _label(("-m", module, *words))
        return Command(label=label, argv=(sys.executable, "-m", module, *words), script=None)
    if not words or not words[0]:
        raise UsageError(f"nothing to run: {WAYS_OUT}")
    if _is_script(words[0]):
        return Command(label=_label(words), argv=(sys.executable, *words), script=words[0])
    program = _program(words[0])
    return Command(label=_label(words), argv=(program, *words[1:]), script=_script_of(words))


def command_from_side(text: str) -> Command:
    """The command for one side of a comparison: one shell word, split again as a shell splits it.

    Raises:
        UsageError: an open quote, nothing in it, or what `command_from_words` refuses.
    """
    if os.path.isfile(text):  # a file name with spaces in it
        return command_from_words((text,))
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"can't split {text!r} into words: {error}; check its quotes") from None
    return command_from_words(words)


def _label(words: Sequence[str]) -> str:
    text = shlex.join(words)
    return text if len(text) <= LABEL_WIDTH else text[: LABEL_WIDTH - 3].rstrip() + "..."


def _is_script(word: str) -> bool:
    """True for a Python file; an executable file without the ending is a program and starts by itself."""
    if word.endswith(".py"):
        _require(word)
        return True
    return os.path.isfile(word) and not os.access(word, os.X_OK)


def _require(script: str) -> None:
    if os.path.isdir(script):
        raise UsageError(f"{script!r} is a folder, not a script")
    if not os.path.isfile(script):
        raise UsageError(f"no such script: {script!r} (looked from {os.getcwd()}); check the path")


def _program(word: str) -> str:
    """Path of the program: a path as it is, a name first beside the running Python, so the venv's own wins."""
    if os.sep in word:
        if os.path.isfile(word) and os.access(word, os.X_OK):
            return word
        raise UsageError(f"no such program: {word!r}; {WAYS_OUT}")
    folder = os.path.dirname(sys.executable)
    beside = os.path.join(folder, word)
    if os.path.isfile(beside) and os.access(beside, os.X_OK):
        return beside
    if word == "python":
        return sys.executable
    found = shutil.which(word)
    if found is None:
        raise UsageError(f"no such program or script: {word!r} (looked in {folder} and on PATH); {WAYS_OUT}")
    return found


def _script_of(words: Sequence[str]) -> str | None:
    """The script that a launcher's command line starts.

    A line with -m, --module or -c starts no file, and a word with a space in it is a command for another shell.
    """
    if any(word in ("-m", "--module", "-c") for word in words[1:]):
        return None
    scripts = [word for word in words[1:] if word.endswith(".py") and word[0] != "-" and " " not in word]
    if not scripts:
        return None
    if os.path.basename(words[0]).startswith(LAUNCHERS):
        _require(scripts[0])
    return scripts[0] if os.path.isfile(scripts[0]) else None
