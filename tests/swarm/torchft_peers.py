"""Peers that get killed: run as a program, it imports torch and torchft once and forks a peer for each line it reads.

A line is a JSON object {"peer", "address", "target", "rounds", "size", "pause_s", "dies"}. Each peer writes what
happens to it to stdout, one JSON object a line.
"""

import json
import os
import signal
import sys
import time
import traceback
import zlib
from typing import Any

import torch
from torch import nn

from bareloop.swarm.accumulator import FlatAccumulator
from bareloop.swarm.engine import RoundFailed, StateReplaced, TrainingState
from bareloop.swarm.torchft_engine import TorchFTEngine


def main() -> None:
    tell(what="ready")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    for line in sys.stdin:
        order = json.loads(line)
        if os.fork() == 0:
            try:
                train(**order)
            except BaseException:
                tell(what="error", peer=order["peer"], error=traceback.format_exc())
            os._exit(0)


RUN: dict[str, str] = {}
"""What each line of this process says of the run that it belongs to."""


def tell(**facts: Any) -> None:
    os.write(1, (json.dumps({**RUN, **facts}) + "\n").encode())  # in one piece, since all write to one pipe


def train(peer: int, address: str, target: float, rounds: int, size: int, pause_s: float, dies: bool) -> None:
    """Trains until round `rounds`; one that `dies` does so between quorum and all-reduce, when three of them average."""
    RUN["address"] = address
    torch.manual_seed(peer)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    engine = TorchFTEngine("run", target, [address])
    total = 0.0

    def average(buffers: Any, samples: float) -> None:
        nonlocal total
        if dies and engine.round > 3 and engine.peers == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        total = engine.average(buffers, samples)

    accumulator = FlatAccumulator(model.parameters(), average=average)
    engine.start(TrainingState(model=model, optimizer=optimizer, scheduler=None), accumulator.buffers)
    tell(what="started", peer=peer, pid=os.getpid(), round=engine.round)
    while engine.round < rounds:
        with accumulator.micro_batch(size):
            model(torch.randn(size, 4)).square().mean().backward()
        time.sleep(pause_s)
        samples = accumulator.samples
        try:
            if not engine.ready(samples):
                continue
            with accumulator.averaged():
                optimizer.step()
        except RoundFailed:
            tell(what="failed", peer=peer, round=engine.round, samples=samples)
            continue
        except StateReplaced:
            accumulator.reset()
            tell(what="replaced", peer=peer, round=engine.round, samples=samples)
            continue
        engine.applied()
        tell(
            what="applied",
            peer=peer,
            round=engine.round,
            samples=samples,
            total=total,
            peers=engine.peers,
            moment=time.monotonic(),
            parameters=zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters())),
        )
    engine.close()
    tell(what="ended", peer=peer, samples=accumulator.samples)


if __name__ == "__main__":
    main()
