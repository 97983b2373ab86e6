import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import bareloop
from bareloop.diagnosis.evidence import Comparison, Diagnosis
from bareloop.profiler.failures import RunFailed, UsageError
from bareloop.renderers.json import dumps, read, require_writable, write
from bareloop.renderers.terminal import render


def test_a_comparison_and_its_report_survive_the_file(comparison: Comparison, tmp_path: Path) -> None:
    write(comparison, tmp_path / "c.json")
    assert read(tmp_path / "c.json") == comparison
    assert render(read(tmp_path / "c.json"), width=80, color=False) == render(comparison, width=80, color=False)


def test_a_diagnosis_survives_the_file(diagnosis: Diagnosis, tmp_path: Path) -> None:
    write(diagnosis, tmp_path / "d.json")
    assert read(tmp_path / "d.json") == diagnosis


def test_the_keys_that_others_rely_on(comparison: Comparison, diagnosis: Diagnosis) -> None:
    value = json.loads(dumps(comparison))
    assert value["schema"] == "bareloop.comparison/1"
    assert {"verdict", "differences"} <= value["work"].keys()
    assert value["math"]["first_difference"] == {"step": 1, "quantity": "batch"}
    assert {"per", "ratio", "low", "high", "verdict", "control"} <= value["speed"].keys()
    wanted = "cause script status counts saving_s_per_step low high setting fix changes_math location"
    assert set(wanted.split()) <= value["findings"][0].keys()
    assert {"work", "phases", "counts", "findings"} <= json.loads(dumps(diagnosis)).keys()


def test_infinity_is_strict_json(comparison: Comparison, tmp_path: Path) -> None:
    math_verdict = comparison.math
    first = replace(math_verdict.differences[0], a=math.inf, b=math.nan)
    record = replace(comparison, math=replace(math_verdict, differences=(first,)))

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not strict JSON")

    json.loads(dumps(record), parse_constant=refuse)
    write(record, tmp_path / "c.json")
    back = read(tmp_path / "c.json")
    assert isinstance(back, Comparison)
    assert back.math.differences[0].a == math.inf


def test_a_file_is_replaced_and_keeps_its_mode_and_link(diagnosis: Diagnosis, tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    write(diagnosis, link)
    assert link.is_symlink()
    assert read(real) == diagnosis
    assert real.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("not json", "is not JSON"),
        ('{"schema": "bareloop.diagno', "is not JSON"),
        ("[1, 2]", "schema None is not one that can be shown"),
        ('{"schema": "other/1"}', "schema 'other/1' is not one"),
        ('{"schema": "bareloop.trace/1"}', "schema 'bareloop.trace/1' is not one"),
        ('{"schema": "bareloop.comparison/2"}', "'bareloop.comparison/2' is newer than 'bareloop.comparison/1'"),
        ('{"schema": "bareloop.diagnosis/1"}', "does not hold one"),
    ],
)
def test_a_wrong_file_is_refused_with_a_way_out(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"x\.json") as refusal:
        read(file)
    assert words in str(refusal.value)
    assert any(way in str(refusal.value) for way in ("--json", "upgrade"))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no\.json.*No such file"):
        read(tmp_path / "no.json")


def test_a_path_that_can_not_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    require_writable(tmp_path / "new.json")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="does not exist"):
        require_writable(tmp_path / "no" / "new.json")
    with pytest.raises(UsageError, match="is a folder"):
        require_writable(tmp_path)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="a superuser may write everywhere")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    with pytest.raises(UsageError, match="not writable"):
        require_writable(folder / "new.json")


def test_a_failing_write_leaves_the_old_file_and_no_other(
    diagnosis: Diagnosis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "d.json").write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunFailed, match=r"d\.json.*No space left"):
        write(diagnosis, tmp_path / "d.json")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("d.json", "old")]


def test_a_stored_record_is_shown_without_torch(comparison: Comparison, tmp_path: Path) -> None:
    write(comparison, tmp_path / "c.json")
    program = (
        "import sys\n"
        "sys.modules['torch'] = None\n"  # importing it raises ImportError
        f"sys.argv = ['bareloop', 'show', {str(tmp_path / 'c.json')!r}]\n"
        "from bareloop.__main__ import main\n"
        "main()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(bareloop.__file__).parents[1]), "COLUMNS": "80"}
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == render(comparison, width=80, color=False)
