"""Scripts that go wrong, each in its own way: one sentence that says what happened, and nothing left running."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

FAULTY = Path(__file__).parent.parent / "scripts" / "faulty"
LOOPS = FAULTY.parent / "loops"


def explain(*words: str, budget: float = 60, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "bareloop", "explain", "--no-ablate", "--budget", str(budget), *words],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=cwd,
    )


def left_running(word: str) -> list[str]:
    """Command lines of live processes that mention `word` (Linux)."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except (OSError, IndexError):
            continue
        if word in line and state != "Z" and int(entry.name) != os.getpid() and "bareloop explain" not in line:
            found.append(line)
    return found


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ("no_such.py", 2, "no such script"),
        ("never_trains.py", 3, "without an optimizer step"),
        ("ends_after_3_steps.py", 3, "ended by itself after 3 optimizer steps"),
        ("fails_on_import.py", 4, "failed by itself"),
        ("fails_at_step_3.py", 4, "failed by itself after 3 optimizer steps"),
        ("fails_in_its_model.py", 4, "failed by itself"),
        ("reads_stdin.py", 4, "--stdin FILE"),
    ],
)
def test_one_sentence_and_the_right_code(script: str, code: int, said: str) -> None:
    ran = explain(str(FAULTY / script))
    assert ran.returncode == code, ran.stderr
    assert said in " ".join(ran.stderr.split())
    assert "bareloop/profiler" not in ran.stderr, "no frame of ours in what the user sees"
    assert not left_running(script)


def test_the_scripts_own_traceback_is_shown() -> None:
    ran = explain(str(FAULTY / "fails_at_step_3.py"))
    assert "ValueError: boom at step 3" in ran.stderr
    assert "ModuleNotFoundError" in explain(str(FAULTY / "fails_on_import.py")).stderr


def test_a_file_as_standard_input(tmp_path: Path) -> None:
    answers = tmp_path / "answers"
    answers.write_text("Ada\n")
    ran = explain("--launches", "2", "--budget", "25", "--stdin", str(answers), str(FAULTY / "reads_stdin.py"))
    assert ran.returncode == 0, ran.stderr


def test_a_script_that_prints_a_lot_does_not_block() -> None:
    ran = explain("--launches", "2", "--budget", "25", str(FAULTY / "prints_a_lot.py"))
    assert ran.returncode == 0, ran.stderr


def test_a_budget_that_ends_before_the_first_step() -> None:
    started = time.monotonic()
    ran = explain(str(FAULTY / "slow_to_start.py"), budget=4)
    assert ran.returncode == 3
    assert "--budget" in ran.stderr
    assert time.monotonic() - started < 40
    assert not left_running("slow_to_start.py")


def test_a_script_that_swallows_exits_is_ended() -> None:
    ran = explain("--launches", "2", "--budget", "20", str(FAULTY / "swallows_exits.py"))
    assert "had to be ended" in " ".join((ran.stdout + ran.stderr).split())
    assert not left_running("swallows_exits.py")


def test_a_rank_that_dies() -> None:
    ran = explain("--", "torchrun", "--nproc-per-node", "2", str(FAULTY / "a_rank_dies.py"))
    assert ran.returncode == 4, ran.stderr
    assert "failed by itself" in ran.stderr
    assert not left_running("a_rank_dies.py")


def test_ctrl_c_leaves_nothing_behind() -> None:
    running = subprocess.Popen(
        [sys.executable, "-m", "bareloop", "explain", str(LOOPS / "plain.py"), "--workers", "2"],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # Where the tests themselves run in the background, a shell has told them to ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    time.sleep(6)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "Traceback" not in said
    assert not left_running("loops/plain.py")
