"""What the docs generate or promise is what the code has."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_causes_pages_are_current() -> None:
    spec = importlib.util.spec_from_file_location("build_causes", ROOT / "docs" / "build_causes.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = {path.name: path.read_text() for path in (ROOT / "docs" / "causes").iterdir()}
    assert written == module.pages(), "run python docs/build_causes.py"
