"""How models reduce among ranks, and `steps` on two processes: one pair for all cases, see two_ranks.py."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import two_ranks as pair
from torch import nn

from bareloop.trainer.ranks import Reduction, last_reduces, reduction


def test_a_model_in_one_process_reduces_nothing() -> None:
    assert reduction(nn.Linear(2, 2)) == Reduction(groups=(), ranks=1, divisor=1.0, synchronise=None, abandon=None)


@pytest.mark.parametrize(("length", "switches"), [(0, []), (1, []), (2, [False, True]), (4, [False, True])])
def test_reducing_is_switched_twice_a_window(length: int, switches: list[bool]) -> None:
    seen: list[Any] = []
    for batch in last_reduces(seen.append)(iter(range(length))):
        seen.append(f"batch {batch}")
    assert [event for event in seen if isinstance(event, bool)] == switches
    assert [event for event in seen if not isinstance(event, bool)] == [f"batch {index}" for index in range(length)]
    if length > 1:
        assert seen[-2:] == [True, f"batch {length - 1}"]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each case of two_ranks.py said on rank 0: "ok" or a traceback."""
    folder = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).parent / "two_ranks.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", str(script), str(rank), str(folder / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    return dict(line.split("\t", 1) for output in outputs for line in output.splitlines() if "\t" in line)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", pair.CASES)
def test_two_ranks(outcomes: dict[str, str], case: str, rank: int) -> None:
    assert outcomes[f"{case}/{rank}"] == "ok", outcomes[f"{case}/{rank}"].encode().decode("unicode_escape")
