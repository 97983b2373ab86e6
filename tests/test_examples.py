"""The examples run as their users run them: as a command, in a folder where they leave nothing behind."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
"""--standalone takes a free port."""


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """`python command` in `folder`, on one thread per process; a launcher that hangs is ended with its workers."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, *command]
    with subprocess.Popen(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun then ends its workers, which are in sessions of their own
            try:
                process.communicate(timeout=60)
            finally:
                process.kill()
            raise
    return subprocess.CompletedProcess(words, process.returncode, stdout, stderr)


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


def _words_of_the_trainer(done: subprocess.CompletedProcess[str]) -> str:
    """The last line that a script of a pair prints: its losses to nine digits."""
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("pair", "flags"),
    [
        ("trainer", ["--steps", "4", "--accumulate", "2", "--layers", "1"]),
        pytest.param("sft", ["--steps", "3", "--layers", "1", "--lora"], marks=pytest.mark.slow),
    ],
)
def test_lean_example_prints_the_numbers_of_its_stock_twin(
    pair: str, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")  # TRL counts its trainers
    stock, lean = (
        _words_of_the_trainer(run(tmp_path, str(EXAMPLES / f"{pair}_{kind}.py"), *flags)) for kind in ("stock", "lean")
    )
    assert stock.startswith("loss ")
    assert lean == stock
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("pair", ["trainer", "sft"])
def test_lean_example_differs_in_the_trainer_alone(pair: str) -> None:
    stock, lean = (
        (EXAMPLES / f"{pair}_{kind}.py").read_text(encoding="utf-8").partition("\n")[2].split("\n")
        for kind in ("stock", "lean")
    )
    added = [line.strip() for line in lean if line not in stock]
    removed = [line.strip() for line in stock if line not in lean]
    assert len(removed) == 1 and removed[0].startswith("trainer = ")
    assert added[0] == "import bareloop"
    assert len(added) == 2 and added[1].startswith("trainer = bareloop.")


@pytest.mark.parametrize("script", ["digits_loop.py", "digits_steps.py"])
def test_digits_run_and_leave_nothing(script: str, tmp_path: Path) -> None:
    done = run(tmp_path, str(EXAMPLES / script), "--steps", "3")
    assert done.returncode == 0, done.stderr
    assert "3/3" in done.stderr, "three optimizer steps on the progress bar"
    assert done.stdout.startswith("accuracy 0.")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="hivemind runs on Linux")
@pytest.mark.parametrize("engine", ["hivemind", "torchft"])
def test_two_peers_reach_the_loss_of_one_process_with_the_same_batches(engine: str, tmp_path: Path) -> None:
    done = run(
        tmp_path, str(EXAMPLES / "gpt2_swarm.py"), "--engine", engine, "--peers", "2", "--steps", "3", "--target", "64"
    )
    assert done.returncode == 0, done.stderr
    first, second = (float(loss) for loss in re.findall(r"^peer \d: loss ([\d.]+); \d+ rows", done.stdout, re.M))
    (alone,) = re.findall(r"^one process, same batches: loss ([\d.]+)$", done.stdout, re.M)
    assert first == pytest.approx(float(alone), rel=1e-5)
    assert second == pytest.approx(float(alone), rel=1e-5)
    assert list(tmp_path.iterdir()) == []
