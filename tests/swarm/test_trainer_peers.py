"""Lean trainers as peers on the real engines, one of them two ranks under DistributedDataParallel, against one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("hivemind")
pytest.importorskip("torchft")

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))
from swarm_runs import one_process
from trainer_peer import SETTINGS

from bareloop.swarm.serve import ServeOptions, serving

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:hivemind")
PEER = Path(__file__).with_name("trainer_peer.py")
ROUNDS = 6
PATIENCE_S = 180.0
"""Guard against hanging, nothing that is judged."""


def _launched(*command: str, log: Path) -> "subprocess.Popen[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    with log.open("w") as output:
        return subprocess.Popen([sys.executable, *command], stdout=output, stderr=output, text=True, env=environment)


@pytest.mark.parametrize("engine", ["hivemind", "torchft"])
def test_trainers_train_as_one_process_that_has_all_their_rows(engine: str, tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    started: list[subprocess.Popen[str]] = []
    with serving(ServeOptions(engine=engine, port=0)) as served:
        given = {"engine": engine, "address": served.addresses[0], "rounds": ROUNDS, "folder": tmp_path}
        options = [f"--{name}={value}" for name, value in given.items()]
        try:
            for number, launcher in enumerate((torchrun, [])):
                command = [*launcher, str(PEER), "--peer", str(number), *options]
                started.append(_launched(*command, log=tmp_path / f"{number}.log"))
            for number, peer in enumerate(started):
                assert peer.wait(PATIENCE_S) == 0, (tmp_path / f"{number}.log").read_text()[-3000:]
        finally:
            for process in started:
                process.terminate()
            for process in started:
                process.wait(30)
    ranks = [torch.load(tmp_path / f"{name}.pt") for name in ("0-0", "0-1", "1-0")]
    assert all(rank["steps"][index] for rank in ranks for index in range(ROUNDS)), "all in every round"
    for rank in ranks[1:]:
        assert all(torch.equal(a, b) for a, b in zip(rank["weights"], ranks[0]["weights"], strict=True))
    rounds = [torch.cat([rows for rank in ranks for rows in rank["steps"][index]]) for index in range(ROUNDS)]
    alone = one_process(tmp_path / "alone", rounds, **SETTINGS)
    weights = alone.model.state_dict().values()
    assert max(float((a - b).abs().max()) for a, b in zip(weights, ranks[0]["weights"], strict=True)) < 2e-6
