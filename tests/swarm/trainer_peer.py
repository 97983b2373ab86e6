"""A peer of `test_trainer_peers.py`: a lean trainer in a swarm with a real engine, alone or as the ranks that torchrun starts.

Leaves (rows of each step, weights at the end) in a file for each rank.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))
from small_runs import gpt2, rows, trainer

from bareloop import swarm
from bareloop.trainer.hf import Trainer

__all__ = ["SETTINGS", "TARGET", "model"]

TARGET = 12
SETTINGS: dict[str, Any] = {
    "gradient_accumulation_steps": 1,
    "save_strategy": "no",
    "max_grad_norm": 0.5,
    "optim": "sgd",
    "learning_rate": 0.1,
}


class Rows(TrainerCallback):
    """Writes down which rows the model was trained on in each step."""

    def __init__(self) -> None:
        self.steps: list[list[Tensor]] = [[]]

    def take(self, model: Any, arguments: Any, named: dict[str, Any]) -> None:
        """A hook before each forward."""
        self.steps[-1].append(named["input_ids"].clone())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append([])


def model() -> nn.Module:
    """GPT-2 of one layer without dropout, which would draw other numbers in every process."""
    made = gpt2()
    for module in made.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return made


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
    noted, own = Rows(), rows(48)[options.peer :: 2]
    with swarm.join(
        "trainers", target_batch=TARGET, engine=options.engine, peers=[options.address], options=kind(min_peers=2)
    ) as run:
        made = trainer(
            options.folder / str(options.peer),
            cls=lambda **arguments: Trainer(swarm=run, **arguments),
            model=model(),
            data=[{"input_ids": row} for row in own],
            max_steps=options.rounds,
            **SETTINGS,
        )
        made.model.register_forward_pre_hook(noted.take, with_kwargs=True)
        made.add_callback(noted)
        made.train()
    found = {"steps": noted.steps[: options.rounds], "weights": list(made.model.state_dict().values())}
    torch.save(found, options.folder / f"{options.peer}-{made.args.process_index}.pt")


if __name__ == "__main__":
    main()
