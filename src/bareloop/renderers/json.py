"""A diagnosis or comparison to a JSON file and back; the reader needs no torch."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from bareloop.diagnosis.evidence import COMPARISON_SCHEMA, DIAGNOSIS_SCHEMA, Comparison, Diagnosis
from bareloop.profiler.failures import RunFailed, UsageError
from bareloop.trace import decode, encode

__all__ = ["dumps", "read", "require_writable", "write"]

KINDS = {COMPARISON_SCHEMA: Comparison, DIAGNOSIS_SCHEMA: Diagnosis}


def dumps(record: Comparison | Diagnosis) -> str:
    """The record as strict JSON text (no bare NaN or Infinity), keys in the order of the fields."""
    return json.dumps(encode(record), indent=1, allow_nan=False) + "\n"


def write(record: Comparison | Diagnosis, path: str | os.PathLike[str]) -> None:
    """Writes the record to `path`, whole or not at all: a file that was there survives a full disk.

    Raises:
        RunFailed: the folder is gone or not writable, or the disk is full.
    """
    target = Path(os.path.realpath(path))  # a link stays one
    try:
        _replace(target, dumps(record))
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunFailed(f"the report was made, but {str(path)!r} could not be written: {reason}") from error


def _replace(target: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, _mode(target))
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def require_writable(path: str | os.PathLike[str]) -> None:
    """Refuses a path that `write` could not fill, before the minutes that a run takes.

    Raises:
        UsageError: its folder is missing or not writable, or it is a folder itself.
    """
    target = Path(os.path.realpath(path))
    folder = target.parent
    if target.is_dir():
        raise UsageError(f"--json {str(path)!r} is a folder; name a file in it")
    if not folder.is_dir():
        raise UsageError(f"--json {str(path)!r}: the folder {str(folder)!r} does not exist; create it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--json {str(path)!r}: the folder {str(folder)!r} is not writable; name another one")


def read(path: str | os.PathLike[str]) -> Comparison | Diagnosis:
    """The record that `write` put into `path`.

    Raises:
        UsageError: no such file, not JSON, not ours, written by a newer bareloop, or with keys missing.
    """
    value = _load(Path(path))
    schema = value.get("schema") if isinstance(value, dict) else None
    kind = KINDS.get(schema) if isinstance(schema, str) else None
    if kind is None:
        raise UsageError(f"{str(path)!r}: {_refusal(schema)}")
    try:
        return decode(kind, value)
    except (TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{str(path)!r} says schema {schema!r} but does not hold one ({error}); write it again with --json"
        ) from None


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"can't read {str(path)!r}: {error.strerror}; check the path") from None
    except ValueError as error:
        raise UsageError(
            f"{str(path)!r} is not JSON ({error}); give a file that bareloop explain or compare wrote with --json"
        ) from None


def _refusal(schema: object) -> str:
    known = " or ".join(KINDS)
    if isinstance(schema, str):
        name, _, number = schema.rpartition("/")
        ours = [have for have in KINDS if have.rpartition("/")[0] == name]
        if ours and number.isdigit() and int(number) > int(ours[0].rpartition("/")[2]):
            return f"schema {schema!r} is newer than {ours[0]!r}, which this bareloop reads; upgrade bareloop"
    return f"schema {schema!r} is not one that can be shown ({known}); give a file written with --json"


def _mode(target: Path) -> int:
    """Permission bits for the file: those it has, else those that the umask gives a new file."""
    if target.exists():
        return target.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
