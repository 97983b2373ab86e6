"""What bareloop leaves behind: nothing. The user's folder, environment and modules are as they were."""

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

SCRIPT = """
import pickle, sys, copy
import helper
import torch
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
assert not any("bareloop" in entry for entry in sys.path), sys.path
for step in range(10**6):
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    copy.deepcopy(pickle.loads(pickle.dumps(model)))
    assert set(vars(model)) == KEYS, set(vars(model)) ^ KEYS
""".replace("optimizer = ", "KEYS = set(vars(model))\noptimizer = ", 1)


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


def run(folder: Path, *words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "bareloop", *words],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=150,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("answer = 42\n")
    return tmp_path


def test_the_users_folder_stays_as_it_was_byte_for_byte(folder: Path) -> None:
    before = contents(folder)
    temporary = set(os.listdir(tempfile.gettempdir()))
    ran = run(folder, "explain", "--budget", "20", "--launches", "2", "train.py")
    assert ran.returncode == 0, ran.stderr
    assert contents(folder) == before
    left = {name for name in set(os.listdir(tempfile.gettempdir())) - temporary if name.startswith("bareloop-")}
    assert not left


def test_a_sitecustomize_that_is_there_already_still_runs(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    site = tmp_path_factory.mktemp("site")
    (site / "sitecustomize.py").write_text("import sys\nsys.users_own_sitecustomize = True\n")
    script = folder / "train.py"
    script.write_text("import sys\nassert sys.users_own_sitecustomize\n" + script.read_text())
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    ran = run(folder, "explain", "--budget", "20", "--launches", "2", "train.py", PYTHONPATH=path)
    assert ran.returncode == 0, ran.stderr


def test_the_switch_turns_the_probes_off(folder: Path) -> None:
    (folder / "train.py").write_text(SCRIPT.replace("10**6", "50"))
    ran = run(folder, "explain", "--budget", "30", "train.py", BARELOOP_DISABLE="1")
    assert ran.returncode == 3
    assert "BARELOOP_DISABLE" in ran.stderr
