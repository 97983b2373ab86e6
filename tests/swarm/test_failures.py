"""Failures that happen to real swarms, and the judge that says what they did to gradients and samples.

`benchmarks/swarm_failures.py` has the whole matrix and its seconds; here two failures are let loose on each engine, and what is
judged is that every gradient was a true mean, that nothing was lost, and that the survivors went on.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from failures.judge import difference, findings
from failures.log import PARAMETERS, Log, Story

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "swarm_failures.py"
PATIENCE_S = 240.0
"""Guards against a hang."""
ENGINES, CASES = ("hivemind", "torchft"), ("kill-all-reduce", "one-left")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], dict[str, Any]]]:
    """(engine, case) -> outcome; the runs go on side by side, since they mostly wait."""
    out = tmp_path_factory.mktemp("failures") / "runs.jsonl"
    command = [sys.executable, str(SCRIPT), "--engine", *ENGINES, "--case", *CASES]
    command += ["--runs", "1", "--steps", "2", "--side-by-side", "4", "--out", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        printed, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)  # it ends all peers before itself
            process.communicate(timeout=60)
    assert process.returncode == 0, printed
    found = [json.loads(line) for line in out.read_text().splitlines()]
    yield {(outcome["engine"], outcome["case"]): outcome for outcome in found}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("engine", ENGINES)
def test_survivors_lose_nothing_and_go_on(
    outcomes: dict[tuple[str, str], dict[str, Any]], engine: str, case: str
) -> None:
    outcome = outcomes[engine, case]
    assert outcome["wrong"] == outcome["zero"] == outcome["lost"] == outcome["twice"] == 0, outcome
    assert outcome["next_step_s"] > 0, outcome  # not NaN: all have stepped
    assert outcome["apart"] <= 1e-5, outcome
    assert outcome["checked"] >= 2 * 2 + 2, outcome
    assert [v for v in outcome["violations"] if "s without a step" not in v] == []


def _peer(folder: Path, name: str, *events: tuple[str, dict[str, Any]]) -> Story:
    log, story = Log(folder, name), Story(name=name, folder=folder)
    for kind, values in events:
        log.write(kind, **values)
    log.close()
    story.follow()
    return story


def _attempt(gradient: Tensor, rows: int, round: int = 0) -> tuple[str, dict[str, Any]]:
    return "attempt", {"round": round, "samples": rows, "rows": rows, "vector": gradient}


def _applied(gradient: Tensor, rows: int, round: int = 0, shift: float = 0.0) -> tuple[str, dict[str, Any]]:
    return "applied", {"round": round, "rows": rows, "vector": gradient, "parameters": gradient + shift}


def _replaced(rows: int) -> tuple[str, dict[str, Any]]:
    return "replaced", {"round": 0, "rows": rows, "where": "ready"}


@pytest.fixture
def gradients() -> tuple[Tensor, Tensor, Tensor]:
    """Those of 8 rows, of 24 rows, and the mean of both."""
    one, other = torch.randn(2, PARAMETERS, generator=torch.Generator().manual_seed(0))
    return one, other, (8 * one + 24 * other) / 32


def test_a_true_mean_is_found(tmp_path: Path, gradients: tuple[Tensor, Tensor, Tensor]) -> None:
    one, other, mean = gradients
    peers = [
        _peer(tmp_path, "dead", _attempt(other, 24)),
        _peer(tmp_path, "a", _attempt(one, 8), _applied(mean, 8)),
    ]
    found = findings(peers)
    assert (found.checked, found.wrong, found.zero, found.twice, found.lost) == (1, 0, 0, 0, {"dead": 0, "a": 0})
    assert found.worst < 1e-6


@pytest.mark.parametrize("wrong", ["unweighted", "without itself", "slightly off"])
def test_what_is_no_mean_is_found(tmp_path: Path, gradients: tuple[Tensor, Tensor, Tensor], wrong: str) -> None:
    one, other, mean = gradients
    given = {"unweighted": (one + other) / 2, "without itself": other, "slightly off": mean * 1.0001}[wrong]
    a = _peer(tmp_path, "a", _attempt(one, 8), _applied(given, 8))
    b = _peer(tmp_path, "b", _attempt(other, 24), _applied(mean, 24))
    a.events[1]["time"] = b.events[1]["time"]  # both gave before either applied
    found = findings([a, b])
    assert (found.wrong, found.zero, found.lost) == (1, 0, {"a": 8, "b": 0})
    assert difference([a, b]) == pytest.approx(float((given - mean).abs().max()))


def test_zeros_are_found(tmp_path: Path, gradients: tuple[Tensor, Tensor, Tensor]) -> None:
    found = findings([_peer(tmp_path, "a", _attempt(gradients[0], 8), _applied(torch.zeros(PARAMETERS), 8))])
    assert (found.wrong, found.zero, found.lost) == (0, 1, {"a": 8})


def test_rows_that_never_came_to_the_engine_make_it_wrong(tmp_path: Path, gradients: tuple[Tensor, ...]) -> None:
    """The gradient of 8 rows where 16 went through the loss: the judge compares with what the loss saw."""
    found = findings([_peer(tmp_path, "a", _attempt(gradients[1], 16), _applied(gradients[0], 16))])
    assert (found.wrong, found.lost) == (1, {"a": 16})


def test_samples_that_others_applied_are_not_lost(tmp_path: Path, gradients: tuple[Tensor, Tensor, Tensor]) -> None:
    """A peer that missed the mean, and took over the state of one that has it, loses what it added after that."""
    one, other, mean = gradients
    a = _peer(tmp_path, "a", _attempt(one, 8), _replaced(24))
    b = _peer(tmp_path, "b", _attempt(other, 24), _applied(mean, 24))
    assert findings([a, b]).lost == {"a": 16, "b": 0}


def test_samples_that_count_twice_are_found(tmp_path: Path, gradients: tuple[Tensor, Tensor, Tensor]) -> None:
    one, other, mean = gradients
    a = _peer(tmp_path, "a", _attempt(one, 8), _attempt(other, 16), _applied(other, 16))
    b = _peer(tmp_path, "b", _attempt(other, 24), _applied(mean, 24))
    a.events[1]["time"] = a.events[2]["time"] = b.events[1]["time"] + 1
    assert findings([a, b]).twice == 8


def test_a_round_that_was_undone_is_lost(tmp_path: Path, gradients: tuple[Tensor, Tensor, Tensor]) -> None:
    """Two parts of a network went on by themselves, and one of them took over the other's state."""
    one, other, _ = gradients
    a = _peer(tmp_path, "a", _attempt(one, 8), _applied(one, 8), _replaced(0))
    b = _peer(tmp_path, "b", _attempt(other, 24), _applied(other, 24, shift=1.0))
    assert findings([a, b]).lost == {"a": 8, "b": 0}
