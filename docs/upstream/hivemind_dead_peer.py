"""hivemind 1.1.12: after a peer was killed, the survivor's parameters stand still until the peer's record expires.

    python hivemind_dead_peer.py            # takes about two minutes

Two peers train, with micro-batches of 8 samples every 50 ms towards a target of 256; one is killed (SIGKILL, all of its
processes). The survivor goes on counting epochs, each with a failed round and a gradient of zeros
(hivemind_failed_round.py), until the dead peer's progress record is 60 s old (`metadata_expiration`).
"""

import logging
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection

import hivemind
import torch


def train(pipe: Connection, first: bool, seconds: float = 150.0) -> None:
    os.setsid()
    for handler in logging.getLogger("hivemind").handlers:
        handler.setLevel(logging.CRITICAL)
    known = [] if first else pipe.recv()
    dht = hivemind.DHT(initial_peers=known, start=True, nat_port_map=False)
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = hivemind.Optimizer(
        dht=dht, run_id="killed", target_batch_size=256, batch_size_per_step=8, matchmaking_time=2.0,
        averaging_timeout=10.0, optimizer=torch.optim.SGD([weight], lr=1e-3),
    )  # fmt: skip
    norms: list[float] = []
    optimizer.opt.register_step_pre_hook(lambda *_: norms.append(weight.grad.norm().item()))  # type: ignore[union-attr]
    pipe.send([str(a) for a in dht.get_visible_maddrs()])
    samples, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.05)
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()
        samples += 8
        if norms:
            pipe.send((optimizer.tracker.global_progress.num_peers, norms.pop(), samples))
            samples = 0


def main() -> None:
    context = multiprocessing.get_context("fork")
    pipes, peers, known = [], [], []
    for first in (True, False):
        ours, theirs = context.Pipe()
        peers.append(context.Process(target=train, args=(theirs, first)))
        peers[-1].start()
        if not first:
            ours.send(known)
        known = ours.recv()
        pipes.append(ours)
    good = 0
    while good < 3:  # rounds of both
        number, norm, _ = pipes[0].recv()
        good = good + 1 if number == 2 and norm > 0 else 0
    os.killpg(peers[1].pid, signal.SIGKILL)  # type: ignore[arg-type]
    killed, lost, zeros, seen = time.monotonic(), 0, 0, False
    while pipes[0].poll(120):
        _, norm, samples = pipes[0].recv()
        zero, seen = norm == 0, seen or norm == 0
        lost, zeros = lost + samples * zero, zeros + zero
        if (seen and not zero) or time.monotonic() - killed > 120:
            break
    print(
        f"killed after 3 rounds of two; then {zeros} epochs with a gradient of zeros, {lost} samples of the survivor lost,"
    )
    print(f"parameters moved again {time.monotonic() - killed:.0f} s after the kill")
    os.killpg(peers[0].pid, signal.SIGKILL)  # type: ignore[arg-type]
    print("fault: present" if zeros else "fault: gone")


if __name__ == "__main__":
    main()
