"""Which extra of bareloop a missing package belongs to. Standard library only: bareloop's probes import it."""

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["needs"]


@contextmanager
def needs(what: str, extra: str) -> Iterator[None]:
    """A block that imports what `what` needs.

    Raises:
        ImportError: a package is not installed; the message says which, and that `extra` brings it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("bareloop"):
            raise
        package = error.name.partition(".")[0]
        raise ImportError(f"{what} needs {package}, which is not installed: pip install 'bareloop[{extra}]'") from error
