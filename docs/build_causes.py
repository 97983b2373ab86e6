"""Writes docs/causes/: one page per cause, from the docstring of its file.

python docs/build_causes.py
"""

import inspect
import sys
from pathlib import Path

from bareloop.diagnosis.causes import CAUSES

FOLDER = Path(__file__).parent / "causes"


def pages() -> dict[str, str]:
    """File name -> text of each page, the index among them."""
    found, index = {}, ["# Causes", "", "| cause | what it is |", "|---|---|"]
    for cause in CAUSES:
        module = sys.modules[f"bareloop.diagnosis.causes.{cause.code}"]
        text = inspect.getdoc(module)
        assert text is not None
        found[f"{cause.code}.md"] = f"# {cause.code}\n\n{text}\n"
        index.append(f"| [{cause.code}]({cause.code}.md) | {cause.title} |")
    found["README.md"] = "\n".join(index) + "\n"
    return found


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
