"""The open and shut of a window that no `with` block can hold.

A window starts in one call of an optimizer hook and stops in a later one, in the training thread. Processes forked
in between (loader workers) inherit what the window put into that thread, so it is taken out there at once.
"""

import os
import threading
from collections.abc import Callable

__all__ = ["Lifetime"]


class Lifetime:
    """One start and one stop, in the same thread; `close` also runs in children forked in between."""

    def __init__(self, name: str, *, close: Callable[[], None]) -> None:
        self._name = name
        self._close = close
        self._thread: int | None = None
        self._stopped = False

    @property
    def thread(self) -> int | None:
        """Identifier of the thread that started the window."""
        return self._thread

    def start(self) -> None:
        """Marks the window as open.

        Raises:
            RuntimeError: it was started before; a window is used once.
        """
        if self._thread is not None:
            raise RuntimeError(f"{self._name} was already started; make a new one for another window")
        self._thread = threading.get_ident()
        _open.append(self)
        _watch_forks()

    def stop(self) -> None:
        """Marks the window as shut and runs `close`.

        Raises:
            RuntimeError: it is not open, or another thread started it.
        """
        if self._thread is None or self._stopped:
            raise RuntimeError(f"{self._name} is not open: call start() before stop(), and stop() once")
        if self._thread != threading.get_ident():
            raise RuntimeError(f"{self._name} must be stopped in the thread that started it")
        self._end()

    def require_stopped(self) -> None:
        """Raises RuntimeError while the window is open or was never started."""
        if not self._stopped:
            raise RuntimeError(f"{self._name} has no result before stop()")

    def _end(self) -> None:
        self._stopped = True
        if self in _open:
            _open.remove(self)
        self._close()


_open: list[Lifetime] = []
_forks_watched = False


def _watch_forks() -> None:
    # os.register_at_fork can't be undone: one callback for the process, which does nothing without open windows.
    global _forks_watched
    if not _forks_watched and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_close_in_child)
        _forks_watched = True


def _close_in_child() -> None:
    for lifetime in list(_open):
        lifetime._end()
