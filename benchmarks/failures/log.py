"""What a peer writes down, and how it is read while it still writes. A SIGKILL loses nothing that was written."""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["PARAMETERS", "Event", "Log", "Story"]

PARAMETERS = 18_755
"""Of `failures.peer.network`: elements of each vector."""

Event = dict[str, Any]


class Log:
    """Events as JSON lines, vectors as raw float32 beside them; both survive a SIGKILL of their writer."""

    def __init__(self, folder: Path, name: str) -> None:
        self._events = (folder / f"{name}.jsonl").open("ab", buffering=0)
        self._vectors = (folder / f"{name}.f32").open("ab", buffering=0)

    def write(self, kind: str, **values: Any) -> None:
        """Appends an event; tensors among its values become their place in the file of vectors."""
        for key, value in values.items():
            if isinstance(value, Tensor):
                values[key] = self._vectors.tell()
                self._vectors.write(value.detach().contiguous().numpy().tobytes())
        self._events.write(json.dumps({"time": time.time(), "kind": kind, **values}).encode() + b"\n")

    def close(self) -> None:
        """Closes both files."""
        self._events.close()
        self._vectors.close()


@dataclass(kw_only=True, slots=True)
class Story:
    """What one peer wrote down."""

    name: str
    folder: Path
    events: list[Event] = field(default_factory=list)
    _read: int = 0

    def follow(self) -> None:
        """Reads what was written since the last call."""
        path = self.folder / f"{self.name}.jsonl"
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                self.events.append(json.loads(line))

    def of(self, *kinds: str, since: float = 0.0) -> list[Event]:
        """Events of these kinds, in order."""
        return [event for event in self.events if event["kind"] in kinds and event["time"] >= since]

    def vector(self, place: int) -> np.ndarray:
        """float32[PARAMETERS] at a place of the file of vectors."""
        return np.fromfile(self.folder / f"{self.name}.f32", dtype=np.float32, count=PARAMETERS, offset=place)
