"""Makes the packages that stand beside these tests importable by their own names, and collections of garbage short."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def frozen_heap() -> Iterator[None]:
    """Keeps what is alive out of the collections that accelerate asks for in every `train()`: 0.4 s each without it."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
