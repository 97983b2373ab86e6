"""Lean trainers as peers on the real engines, one of them two ranks under DistributedDataParallel, against one process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("hivemind")
pytest.importorskip("torchft")

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))
from small_runs import run
from trainer_peer import SETTINGS, model

PEER = Path(__file__).with_name("trainer_peer.py")
ROUNDS = 6
PATIENCE_S = 180.0
"""Guard against hanging, nothing that is judged."""


def _launched(*command: str, log: Path) -> "subprocess.Popen[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    with log.open("w") as output:
        return subprocess.Popen([sys.executable, *command], stdout=output, stderr=output, text=True, env=environment)


def _address(engine: str, folder: Path) -> "tuple[subprocess.Popen[str], str]":
    log = folder / "serve.log"
    served = _launched("-m", "bareloop", "swarm", "serve", "--engine", engine, "--port", "0", log=log)
    while (found := re.search(r'peers=\["([^"]+)"', log.read_text())) is None:
        assert served.poll() is None, log.read_text()
    return served, found[1]


@pytest.mark.parametrize("engine", ["hivemind", "torchft"])
def test_trainers_train_as_one_process_that_has_all_their_rows(engine: str, tmp_path: Path) -> None:
    served, address = _address(engine, tmp_path)
    options = ["--engine", engine, "--address", address, "--rounds", str(ROUNDS), "--folder", str(tmp_path)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    started = [served]
    try:
        for number, launcher in enumerate((torchrun, [])):
            command = [*launcher, str(PEER), "--peer", str(number), *options]
            started.append(_launched(*command, log=tmp_path / f"{number}.log"))
        for number, peer in enumerate(started[1:]):
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
    alone = run(
        tmp_path / "alone",
        cls=transformers.Trainer,
        model=model(),
        data=[{"input_ids": rows} for rows in rounds],
        collate=lambda samples: {"input_ids": samples[0]["input_ids"], "labels": samples[0]["input_ids"]},
        per_device_train_batch_size=1,
        max_steps=ROUNDS,
        train_sampling_strategy="sequential",
        **SETTINGS,
    )
    weights = alone.model.state_dict().values()
    assert max(float((a - b).abs().max()) for a, b in zip(weights, ranks[0]["weights"], strict=True)) < 2e-6
