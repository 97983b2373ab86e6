import io

import pytest

from bareloop.renderers.progress import progress_line


class Terminal(io.StringIO):
    """A standard error that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def _written(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, *, quiet: bool) -> str:
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with progress_line(quiet=quiet) as progress:
        progress("timing [a] against b")
    return stream.getvalue()


def test_a_terminal_sees_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "timing [a] against b" in _written(monkeypatch, Terminal(), quiet=False)


def test_nothing_is_written_when_quiet_or_into_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _written(monkeypatch, Terminal(), quiet=True) == ""
    assert _written(monkeypatch, io.StringIO(), quiet=False) == ""
