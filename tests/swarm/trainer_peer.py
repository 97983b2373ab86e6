"""A peer of `test_trainer_peers.py`: a lean trainer in a swarm with a real engine, alone or as the ranks that torchrun starts.

Leaves (rows of each step, weights at the end) in a file for each rank.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))
from small_runs import rows, trainer
from swarm_runs import EXACT, Notes, without_dropout

from bareloop import swarm
from bareloop.trainer.hf import Trainer

__all__ = ["SETTINGS"]

TARGET = 12
SETTINGS: dict[str, Any] = {"max_grad_norm": 0.5, **EXACT}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--peer", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kind = {"hivemind": swarm.HivemindOptions, "torchft": swarm.TorchFTOptions}[options.engine]
    noted, own = Notes(), rows(48)[options.peer :: 2]
    with swarm.join(
        "trainers", target_batch=TARGET, engine=options.engine, peers=[options.address], options=kind(min_peers=2)
    ) as run:
        made = trainer(
            options.folder / str(options.peer),
            cls=lambda **arguments: Trainer(swarm=run, **arguments),
            model=without_dropout(),
            data=[{"input_ids": row} for row in own],
            max_steps=options.rounds,
            gradient_accumulation_steps=1,
            save_strategy="no",
            **SETTINGS,
        )
        noted.watch(made)
        made.train()
    found = {"steps": noted.steps[: options.rounds], "weights": list(made.model.state_dict().values())}
    torch.save(found, options.folder / f"{options.peer}-{made.args.process_index}.pt")


if __name__ == "__main__":
    main()
