"""The command on real scripts: the files that others rely on, and the codes that CI relies on."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import bareloop

SCRIPTS = Path(__file__).parent / "scripts"
PLAIN = str(SCRIPTS / "loops" / "plain.py")


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "bareloop", *words], capture_output=True, text=True, timeout=200)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A script against itself with four times the batch per step."""
    path = tmp_path_factory.mktemp("report") / "report.json"
    ran = run("compare", "--budget", "30", "--launches", "2", "--json", str(path), f"{PLAIN} --accumulate 4", PLAIN)
    assert ran.returncode == 0, ran.stderr
    return json.loads(path.read_text())


def test_the_keys_of_a_comparison(comparison: dict[str, Any]) -> None:
    assert comparison["schema"] == "bareloop.comparison/1"
    assert comparison["work"]["verdict"] == "different"
    differences = {difference["quantity"]: difference for difference in comparison["work"]["differences"]}
    assert (differences["samples_per_step"]["a"], differences["samples_per_step"]["b"]) == (128, 32)
    assert (differences["micro_steps_per_step"]["a"], differences["micro_steps_per_step"]["b"]) == (4, 1)
    assert comparison["math"]["verdict"] == "different"
    assert comparison["math"]["first_difference"] == {"step": 1, "quantity": "batch"}
    assert comparison["math"]["differences"]
    speed = comparison["speed"]
    assert speed["per"] == "sample"
    assert speed["low"] <= speed["ratio"] <= speed["high"]
    assert speed["verdict"] in ("slower", "faster", "equal", "undecided")
    assert speed["control"]["low"] <= speed["control"]["ratio"] <= speed["control"]["high"]
    assert "unexplained" in comparison
    keys = {"cause", "script", "status", "counts", "saving_s_per_step", "low", "high", "setting", "fix", "changes_math"}
    assert all(keys | {"location"} <= set(finding) for finding in comparison["findings"])
    assert {"global_batch_differs", "accumulation_differs"} <= {finding["cause"] for finding in comparison["findings"]}


def test_a_stored_report_is_shown_again(comparison: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "again.json"
    path.write_text(json.dumps(comparison))
    ran = run("show", str(path))
    assert ran.returncode == 0
    assert "not comparable" in " ".join(ran.stdout.split())


def test_the_keys_of_a_diagnosis_and_the_records_behind_them(tmp_path: Path) -> None:
    diagnosis = bareloop.explain(PLAIN, argv=["--accumulate", "2"], budget_s=25, launches=2)
    assert diagnosis.work.micro_steps_per_step == 2
    assert diagnosis.phases is not None
    assert sum(diagnosis.phases.seconds.values()) == pytest.approx(diagnosis.phases.step_s)
    assert diagnosis.counts is not None and diagnosis.counts.ops_per_step
    assert diagnosis.findings == ()
    assert diagnosis.schema == "bareloop.diagnosis/1"


def test_fail_on_unequal_work_and_other_world_sizes() -> None:
    ddp = SCRIPTS / "loops" / "ddp.py"
    functional = SCRIPTS / "loops" / "plain.py"
    ran = run(
        "compare", "--no-ablate", "--budget", "40", "--launches", "2", "--fail-on", "unequal-work",
        f"torchrun --nproc-per-node 2 {ddp}", str(functional),
    )  # fmt: skip
    assert ran.returncode == 1, ran.stderr
    assert "world size" in " ".join(ran.stdout.split())
