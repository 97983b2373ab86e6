"""The functions that the lean loop stands for are the tested ones, and a change in one of them is noticed."""

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from bareloop.trainer import upstream
from bareloop.trainer.report import LOOP


def test_the_installed_libraries_are_the_tested_ones() -> None:
    current = {
        where: upstream.fingerprint(upstream.function_at(where))
        for functions in upstream.TESTED_FUNCTIONS.values()
        for where in functions
    }
    tested = {where: digits for functions in upstream.TESTED_FUNCTIONS.values() for where, digits in functions.items()}
    changed = {where: digits for where, digits in current.items() if digits != tested[where]}
    assert not changed, "read what changed upstream, then put these in TESTED_FUNCTIONS"
    assert upstream.mismatches() == ()
    for name, version in upstream.versions().items():
        assert version in upstream.TESTED_VERSIONS[name]


def test_a_function_replaced_at_run_time_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    where = "transformers.trainer:Trainer.compute_loss"
    assert upstream.is_tested(where)
    monkeypatch.setattr(transformers.Trainer, "compute_loss", lambda *args, **kwargs: None)
    assert not upstream.is_tested(where)
    (found,) = upstream.mismatches()
    assert found.part == LOOP
    assert "Trainer.compute_loss" in found.reason
    assert transformers.__version__ in found.reason


def test_a_function_that_is_gone_upstream_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "TESTED_FUNCTIONS", {"clip": {"transformers.trainer:Trainer._no_such": "0" * 12}})
    upstream._at_import.cache_clear()
    try:
        (found,) = upstream.mismatches()
    finally:
        monkeypatch.undo()
        upstream._at_import.cache_clear()
        upstream._at_import()
    assert found.part == "clip"
    assert "_no_such" in found.reason


def function_of(folder: Path, name: str, source: str) -> Callable[..., object]:
    path = folder / f"{name}.py"
    path.write_text(textwrap.dedent(source))
    scope: dict[str, Callable[..., object]] = {}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    return scope["work"]


def test_the_fingerprint_looks_at_code_only(tmp_path: Path) -> None:
    plain = function_of(tmp_path, "plain", "def work(x):\n    return x + 1\n")
    told = function_of(
        tmp_path,
        "told",
        '''
        def work(x):
            """Says something.

            At length.
            """
            # and here too

            return x + 1
        ''',
    )
    other = function_of(tmp_path, "other", 'def work(x):\n    """Says something."""\n    return x + 2\n')
    text = function_of(tmp_path, "text", 'def work(x):\n    return """Says something."""\n')
    same_text = function_of(tmp_path, "same_text", 'def work(x):\n    return """Says something else."""\n')
    assert upstream.fingerprint(plain) == upstream.fingerprint(told) != upstream.fingerprint(other)
    assert upstream.fingerprint(text) != upstream.fingerprint(same_text)


def test_a_function_without_source_has_no_fingerprint() -> None:
    scope: dict[str, Callable[..., object]] = {}
    exec("def work(): pass", scope)
    assert upstream.fingerprint(scope["work"]) == ""
    assert upstream.fingerprint(len) == ""
