"""What is being done, in one line that leaves no trace."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.text import Text

from bareloop.renderers.units import plain

__all__ = ["progress_line"]


@contextlib.contextmanager
def progress_line(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A function that shows a sentence on standard error, or drops it when that is no terminal or `quiet`."""
    if quiet or not sys.stderr.isatty():
        yield lambda sentence: None
        return
    # Twice a second: a livelier line would take time from the scripts that are being timed.
    with Console(stderr=True).status("starting", refresh_per_second=2) as status:
        yield lambda sentence: status.update(Text(plain(sentence)))
