"""The examples run as their users run them: as a command, in a folder where they leave nothing behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
"""--standalone takes a free port."""


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """`python command` in `folder`, on one thread per process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize("script", ["gpt2_trainer.py", "gpt2_loop.py"])
def test_gpt2_runs_and_leaves_nothing(script: str, tmp_path: Path) -> None:
    done = run(tmp_path, str(EXAMPLES / script), "--steps", "3", "--accumulate", "2", "--layers", "1")
    assert done.returncode == 0, done.stderr
    assert "3/3" in done.stderr, "three optimizer steps on the progress bar"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("script", "planned"), [("t5_trainer.py", "3/3"), ("t5_loop.py", "/128")])
def test_t5_runs_on_two_processes_and_leaves_nothing(script: str, planned: str, tmp_path: Path) -> None:
    done = run(tmp_path, *TORCHRUN, str(EXAMPLES / script), "--steps", "3")
    assert done.returncode == 0, done.stderr
    assert planned in done.stderr, "what the progress bar counts up to"
    assert list(tmp_path.iterdir()) == []


def test_t5_rows_divide_evenly_on_two_processes() -> None:
    """Else the Trainer script's plan would be nearly, and not exactly, twice the loop's."""
    program = "import sys; sys.argv = ['t5']; import t5_task; print(*map(len, t5_task.rows()))"
    done = run(EXAMPLES, "-c", program)
    assert done.returncode == 0, done.stderr
    training, validation = map(int, done.stdout.split())
    assert (training, validation) == (1024, 64)
    assert training % (4 * 2) == 0, "batch 4 on two processes"


def test_corpus_is_the_same_in_every_process() -> None:
    program = "import corpus, hashlib; print(hashlib.sha256(repr(corpus.rows(32)).encode()).hexdigest())"
    first, second = (run(EXAMPLES, "-c", program) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
