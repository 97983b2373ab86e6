"""What holds for every entry of the catalogue."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from bareloop.diagnosis import causes
from bareloop.diagnosis.causes import CAUSES, cause

FOLDER = Path(causes.__file__).parent
SCRIPTS = Path(__file__).parents[2] / "scripts"
SECTIONS = (
    "What it is",
    "Why it costs",
    "How it is counted",
    "How it is ablated",
    "What to change",
    "Example",
    "Source",
)


def test_the_list_holds_every_file_once():
    files = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
    assert sorted(entry.code for entry in CAUSES) == files


@pytest.mark.parametrize("entry", CAUSES, ids=lambda entry: entry.code)
def test_an_entry_is_documented_and_complete(entry):
    page = inspect.getdoc(sys.modules[f"bareloop.diagnosis.causes.{entry.code}"]) or ""
    positions = [page.index(f"\n{section}\n---") for section in SECTIONS]
    assert positions == sorted(positions)
    assert "https://" in page
    assert entry.detect or entry.contrast
    assert (entry.ablate is None) == bool(entry.no_ablation)
    assert entry.status in ("counted", "not_examined")
    for kind in ("sick", "twin"):
        script = SCRIPTS / f"{entry.code}_{kind}.py"
        assert script.name in page
        ast.parse(script.read_text(encoding="ascii"))


@pytest.mark.parametrize("entry", CAUSES, ids=lambda entry: entry.code)
def test_nothing_is_found_in_an_empty_trace(entry, make_trace):
    trace = make_trace()
    assert entry.detect is None or entry.detect(trace) is None
    assert entry.contrast is None or entry.contrast(trace, trace) is None
    assert entry.setting(trace) is None or isinstance(entry.setting(trace), str)


def test_cause_by_code():
    assert cause("nan_check_per_step").code == "nan_check_per_step"
    with pytest.raises(ValueError, match=r"nan_check_per_step.*got 'nonsense'"):
        cause("nonsense")


def test_the_catalogue_opens_without_torch():
    code = (
        "import sys, bareloop.diagnosis.causes; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
