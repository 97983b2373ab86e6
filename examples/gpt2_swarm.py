"""The GPT-2 of `gpt2_loop.py`, trained by several peers together, and by one process on the very same batches.

    python examples/gpt2_swarm.py                       # hivemind, two peers on this machine
    python examples/gpt2_swarm.py --engine torchft --peers 3

Each peer takes its share of the rows, and how many micro-batches it gives to a round is up to its speed. What it gave is
written down, so that afterwards one process can train on the batches of all peers, round by round: the losses must agree.
A peer elsewhere needs no more than what `peer` does: `swarm.join` with the address, and `steps`.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path

import corpus
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from bareloop import steps, swarm

RUN = "gpt2-example"
BLOCK = 32


def main() -> None:
    options = arguments()
    if options.join:
        peer(options)
        return
    with tempfile.TemporaryDirectory() as folder, ExitStack() as open_processes:
        address = open_processes.enter_context(served(options.engine))
        peers = [
            open_processes.enter_context(launched([*sys.argv, "--join", address, "--rank", str(rank), "--log", folder]))
            for rank in range(options.peers)
        ]
        codes = [process.wait() for process in peers]
        if any(codes):
            raise SystemExit(f"peers ended with {codes}")
        logs = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(options.peers)]
    numbers = [str(number) for number in range(1, options.steps + 1)]
    alone = one_process(options, [[batch for log in logs for batch in log["rounds"].get(n, [])] for n in numbers])
    for log in logs:
        given = sum(map(len, log["rounds"].values())) * options.batch
        print(f"peer {log['rank']}: loss {log['loss']:.6f}; {given} rows of its own in {len(log['rounds'])} rounds")
    print(f"one process, same batches: loss {alone:.6f}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["hivemind", "torchft"], default="hivemind")
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8, help="rounds")
    parser.add_argument("--batch", type=int, default=4, help="rows in a micro-batch")
    parser.add_argument("--target", type=int, default=256, help="rows in a round, of all peers")
    parser.add_argument("--join", metavar="ADDRESS", help="be a peer of the run that this address belongs to")
    parser.add_argument("--rank", type=int, default=0, help="which share of the rows a peer takes")
    parser.add_argument("--log", default=".", help="folder in which a peer writes down its batches")
    return parser.parse_args()


def peer(options: argparse.Namespace) -> None:
    """Trains with the others."""
    torch.set_num_threads(1)
    model, optimizer = made()
    rows, given, rounds, lost = data(), [], {}, 0.0

    def batches() -> Iterator[Tensor]:
        share = range(options.rank, len(rows) - options.batch, options.peers)
        for start in cycle(share):
            if run.round >= options.steps:  # reached by the others' rounds
                return
            given.append(start)
            yield rows[start : start + options.batch]

    # A run needs no number of peers; this one waits for all of them, since it is over in seconds.
    together = {"hivemind": swarm.HivemindOptions, "torchft": swarm.TorchFTOptions}[options.engine](
        min_peers=options.peers
    )
    with swarm.join(
        RUN, target_batch=options.target, engine=options.engine, peers=[options.join], options=together
    ) as run:
        for step in steps(model, optimizer, batches(), loss, accumulate=run, max_norm=1.0):
            status = run.status
            # What this peer gave to a round that went on without it is in no mean, neither here nor there.
            dropped = round((status.lost_samples - lost) / options.batch)
            rounds[status.round], lost = given[dropped:], status.lost_samples
            given.clear()
            print(f"peer {options.rank}: loss {step.loss.item():.4f}; {status}", flush=True)
            if status.round >= options.steps:
                break
    written = {"rank": options.rank, "rounds": rounds, "loss": held_out(model)}
    (Path(options.log) / f"{options.rank}.json").write_text(json.dumps(written))


def one_process(options: argparse.Namespace, rounds: list[list[int]]) -> float:
    """Loss after the same rounds, each as one window of a loop without peers."""
    model, optimizer = made()
    rows = data()
    for starts in rounds:
        window = [rows[start : start + options.batch] for start in starts]
        for _ in steps(model, optimizer, window, loss, accumulate=len(window), max_norm=1.0):
            pass
    return held_out(model)


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(42)
    config = GPT2Config(
        vocab_size=corpus.VOCABULARY,
        n_positions=BLOCK,
        n_embd=64,
        n_layer=2,
        n_head=2,
        bos_token_id=corpus.EOS,
        eos_token_id=corpus.EOS,
    )
    model = GPT2LMHeadModel(config)
    # Dropout would draw other numbers in every process, and the losses could not be compared.
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)


def data() -> Tensor:
    """Tokens[N, BLOCK], the last 64 rows of which nobody trains on."""
    return torch.tensor(corpus.rows(BLOCK))


def loss(model: nn.Module, rows: Tensor) -> tuple[Tensor, int]:
    """Summed loss of rows[B, BLOCK] and the number of rows: a round is counted in rows."""
    return model(input_ids=rows, labels=rows).loss * len(rows), len(rows)


@torch.no_grad()
def held_out(model: nn.Module) -> float:
    rows = data()[-64:]
    return loss(model.eval(), rows)[0].item() / len(rows)


@contextmanager
def served(engine: str) -> Iterator[str]:
    """Address of a bootstrap peer, as `bareloop swarm serve` prints it."""
    command = [sys.executable, "-m", "bareloop", "swarm", "serve", "--engine", engine, "--port", "0"]
    with launched(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            found = re.search(r'peers=\["([^"]+)"', line)
            if found:
                yield found[1]
                return
        raise SystemExit(f"{' '.join(command)} ended with {process.wait()} before it printed an address")


@contextmanager
def launched(command: list[str], **options) -> Iterator[subprocess.Popen]:
    """A child process that does not outlive the block."""
    if command[0].endswith(".py"):
        command = [sys.executable, *command]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **options)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=30)


if __name__ == "__main__":
    main()
