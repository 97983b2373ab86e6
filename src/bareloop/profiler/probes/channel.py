"""The line between a training process and the bareloop that started it: one JSON object per line.

The process speaks only at step boundaries and when it ends. A closed line (bareloop was killed) reads as "stop", so no
process is left behind.
"""

import json
import socket
from typing import Any

__all__ = ["Channel"]


class Channel:
    """A connection to the session's socket."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._buffer = b""

    def send(self, message: dict[str, Any]) -> bool:
        """Sends one message; False when bareloop is gone."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> dict[str, Any]:
        """Waits for the next command; `{"command": "stop"}` when bareloop is gone."""
        while b"\n" not in self._buffer:
            try:
                block = self._socket.recv(65536)
            except OSError:
                block = b""
            if not block:
                return {"command": "stop", "gone": True}
            self._buffer += block
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def close(self) -> None:
        """Closes the connection, as a forked child must for its copy."""
        self._socket.close()
