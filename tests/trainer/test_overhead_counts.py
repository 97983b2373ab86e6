"""What the lean loops do per step against the bare loop of the same work: exact counts, the same on every machine.

Runs `benchmarks/trainer_overhead.py --counts`, which says how it counts; one launch of one process and one of two.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "trainer_overhead.py"
SETTINGS = [(processes, accumulate) for processes in (1, 2) for accumulate in (1, 8)]
NEVER_MORE = ("ops", "host_reads", "collectives", "copies")
PYTHON_CALLS_MORE = 60
"""Per micro-step."""

Counts = dict[tuple[int, int], dict[str, dict[str, Any]]]


@pytest.fixture(scope="module", name="counts")
def counts_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Counts]:
    """(processes, accumulate) -> contestant -> count -> per step; both launches run at the same time."""
    folder = tmp_path_factory.mktemp("counts")
    children = {}
    for processes in (1, 2):
        command = [sys.executable, str(SCRIPT), "--counts", "--layers", "1", "--accumulate", "1", "8"]
        command += ["--processes", str(processes), "--only", "steps", "lean", "stock"]
        command += ["--json", str(folder / f"{processes}.json")]
        children[processes] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    found: Counts = {}
    try:
        for processes, child in children.items():
            _, errors = child.communicate(timeout=300)
            assert child.returncode == 0, errors
            for entry in json.loads((folder / f"{processes}.json").read_text())["counts"]:
                found[processes, entry["setting"]["accumulate"]] = entry["results"]
    finally:
        for child in children.values():
            child.kill()
    yield found


@pytest.mark.parametrize(("processes", "accumulate"), SETTINGS)
@pytest.mark.parametrize(("contestant", "bare"), [("lean", "bare_tokens"), ("steps", "bare")])
def test_no_op_read_collective_or_copy_more_than_the_bare_loop(
    counts: Counts, processes: int, accumulate: int, contestant: str, bare: str
) -> None:
    ours, theirs = (counts[processes, accumulate][name] for name in (contestant, bare))
    more = {key: ours[key] - theirs[key] for key in NEVER_MORE if ours[key] > theirs[key]}
    assert not more
    assert theirs["ops"] > 100 * accumulate, "the bare loop's own work was seen"


@pytest.mark.parametrize(("processes", "accumulate"), SETTINGS)
@pytest.mark.parametrize(("contestant", "bare"), [("lean", "bare_tokens"), ("steps", "bare")])
def test_few_python_calls_more_than_the_bare_loop(
    counts: Counts, processes: int, accumulate: int, contestant: str, bare: str
) -> None:
    ours, theirs = (counts[processes, accumulate][name]["python_calls"] for name in (contestant, bare))
    assert (ours - theirs) / accumulate <= PYTHON_CALLS_MORE


@pytest.mark.parametrize(("processes", "accumulate"), SETTINGS)
def test_the_contestants_did_the_same_work(counts: Counts, processes: int, accumulate: int) -> None:
    """Else their counts would compare nothing: same batches, clip and schedule end in the same weights, to the bit."""
    apart = {name: found["weights_apart"] for name, found in counts[processes, accumulate].items()}
    assert apart == dict.fromkeys(apart, 0.0)


@pytest.mark.parametrize(("processes", "accumulate"), SETTINGS)
def test_the_stock_trainers_cost_is_seen(counts: Counts, processes: int, accumulate: int) -> None:
    """The counters would show it if the lean trainer ran the stock loop."""
    stock, bare = (counts[processes, accumulate][name] for name in ("stock", "bare_tokens"))
    assert (stock["python_calls"] - bare["python_calls"]) / accumulate > 500
    assert stock["host_reads"] - bare["host_reads"] == 2 * accumulate, "the NaN filter's isnan and isinf"
    assert stock["ops"] > bare["ops"]


@pytest.mark.parametrize("accumulate", [1, 8])
def test_gradients_are_reduced_once_a_step_by_all(counts: Counts, accumulate: int) -> None:
    """And the Trainer's token count is gathered once."""
    found = counts[2, accumulate]
    assert {name: found[name]["collectives"] for name in ("bare", "steps")} == {"bare": 1, "steps": 1}
    assert {found[name]["collectives"] for name in ("bare_tokens", "lean", "stock")} == {2}
