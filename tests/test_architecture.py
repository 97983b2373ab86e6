"""The house rules that no linter knows: what importing us loads, which characters we write, how long things are."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

FILE_LINES = 400
FUNCTION_LINES = 45
TABLES: frozenset[str] = frozenset()
"""Names "file.py:function" or "file.py" of declarative tables, which may be longer."""

THE_LOOP = {"data", "swarm", "trainer"}
"""Rooms that run on the user's clock; they are loaded when they are asked for, and may import torch at their top."""

LIGHT = [
    "bareloop",
    "bareloop.__main__",
    "bareloop.benchmark",
    "bareloop.diagnosis.evidence",
    "bareloop.profiler.options",
    "bareloop.renderers",
    "bareloop.trace",
]
"""What `bareloop show` needs, on a machine that has no torch."""


@pytest.mark.parametrize("module", LIGHT)
def test_import_loads_neither_torch_nor_a_framework(module: str) -> None:
    heavy = ["torch", "transformers", "accelerate", "lightning"]
    program = f"import {module}, json, sys; print(json.dumps([name for name in {heavy} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_the_clinic_imports_without_torch() -> None:
    """No module of the clinic imports torch or a framework at its top level, probes included."""
    offenders = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        if path.relative_to(ROOT / "src" / "bareloop").parts[0] not in THE_LOOP
        for node in _top_level_imports(ast.parse(path.read_text(encoding="utf-8")))
        if _roots(node) & {"torch", "transformers", "accelerate", "lightning"}
    ]
    assert offenders == []


def test_the_loops_names_are_loaded_when_asked_for() -> None:
    program = (
        "import sys, bareloop; assert 'torch' not in sys.modules; from bareloop import steps;"
        "assert 'torch' in sys.modules and 'transformers' not in sys.modules; assert 'steps' in dir(bareloop);"
        "assert issubclass(bareloop.Trainer, __import__('transformers').Trainer)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_a_name_that_needs_what_is_not_installed_says_so() -> None:
    program = "import sys; sys.modules['transformers'] = None; import bareloop; bareloop.Trainer"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1
    assert "ImportError: bareloop.Trainer needs transformers" in done.stderr
    assert "pip install 'bareloop[hf]'" in done.stderr


@pytest.mark.parametrize("path", [*SOURCES, *EXAMPLES], ids=lambda path: str(path.relative_to(ROOT)))
def test_source_is_ascii_and_short(path: Path) -> None:
    text = path.read_bytes()
    assert text.isascii(), f"{path}: line {_first_non_ascii_line(text)} is not ASCII"
    tree = ast.parse(text)
    if path.name not in TABLES:
        assert len(text.splitlines()) <= FILE_LINES
    long = [
        f"{node.name} at line {node.lineno}: {_lines(node)} lines"
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and _lines(node) > FUNCTION_LINES
        and f"{path.name}:{node.name}" not in TABLES
    ]
    assert long == []


def test_every_module_says_what_it_exports() -> None:
    missing = [str(path.relative_to(ROOT)) for path in SOURCES if not _exports(path)]
    assert missing == []


def _top_level_imports(tree: ast.Module) -> list[ast.Import | ast.ImportFrom]:
    """Import statements that run when the module is imported: not those in functions or under TYPE_CHECKING."""
    found: list[ast.Import | ast.ImportFrom] = []
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found.append(node)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting.extend(node.orelse)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            waiting.extend(ast.iter_child_nodes(node))
    return found


def _roots(node: ast.Import | ast.ImportFrom) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    return {(node.module or "").partition(".")[0]}


def _lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function less its docstring: a reference page may be long, what it describes may not."""
    first = node.body[0]
    has_docstring = ast.get_docstring(node) is not None
    docstring = (first.end_lineno or first.lineno) - first.lineno + 1 if has_docstring else 0
    return (node.end_lineno or node.lineno) - node.lineno + 1 - docstring


def _first_non_ascii_line(text: bytes) -> int:
    return next(number for number, line in enumerate(text.splitlines(), start=1) if not line.isascii())


def _exports(path: Path) -> bool:
    """True when the module has `__all__`, or nothing in it but a docstring (a room's bare `__init__`)."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    if path.name == "sitecustomize.py" or all(isinstance(node, ast.Expr) for node in body):
        return True
    return any(
        isinstance(node, (ast.Assign, ast.AnnAssign)) and "__all__" in ast.unparse(node).partition("=")[0]
        for node in body
    )
