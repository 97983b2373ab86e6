"""Measured rounds on shaped links against what `bareloop swarm plan` predicts.

    sudo python benchmarks/swarm_plan.py measure --out rounds.json      # root, `ip`, `tc`; about 8 minutes on 2 cores
    python benchmarks/swarm_plan.py report rounds.json                  # fit, errors, extrapolation, as Markdown

Each peer is a process in a network namespace of its own. For hivemind a round is matchmaking with a full group and the
butterfly all-reduce of `DecentralizedAverager`; for torchft a quorum, an all-reduce of two numbers, the ring all-reduce
of `ProcessGroupGloo` and the vote to commit, through `Manager`. A round is as long as its slowest peer's. Every peer's mean is
checked; a round in which one did not have it is counted, and repeated.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from shaped_links import FORK, Links, shaped_links

LINKS = ((25, 2), (25, 40), (100, 2), (100, 40), (50, 20))
"""(Mbit/s, round trip in ms) of every measurement."""
RUNS = (
    ("hivemind", 2, 1_000_000, "none"),
    ("hivemind", 4, 1_000_000, "none"),
    ("hivemind", 8, 1_000_000, "none"),
    ("hivemind", 3, 3_000_000, "fp16"),
    ("torchft", 2, 1_000_000, "none"),
    ("torchft", 4, 1_000_000, "none"),
    ("torchft", 8, 1_000_000, "none"),
    ("torchft", 3, 3_000_000, "none"),
    ("torchft", 8, 100_000, "none"),
    ("hivemind", 8, 100_000, "none"),
)
"""(engine, peers, parameters, compression)."""


def main() -> None:
    """Measures or reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(required=True, dest="mode")
    measure = modes.add_parser("measure")
    measure.add_argument("--out", type=Path, required=True, help="JSON; what is there is kept and added to")
    measure.add_argument("--rounds", type=int, default=3, help="of each kind; their median counts")
    measure.add_argument("--only", type=int, help="index of one entry of RUNS")
    modes.add_parser("report").add_argument("rounds", type=Path)
    options = parser.parse_args()
    if options.mode == "report":
        from swarm_plan_report import report

        print(report(json.loads(options.rounds.read_text())))
        return
    if os.geteuid() != 0:
        sys.exit(
            "measuring needs root, for network namespaces and tc: sudo python benchmarks/swarm_plan.py measure ..."
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # namespaces are removed on the way out
    for index, run in enumerate(RUNS):
        if options.only in (None, index):
            for point in measured(*run, rounds=options.rounds):
                points = json.loads(options.out.read_text()) if options.out.exists() else []
                options.out.write_text(json.dumps([*points, point], indent=1))


def measured(engine: str, peers: int, parameters: int, compression: str, *, rounds: int) -> "Iterator[dict[str, Any]]":
    """One point for each of `LINKS`."""
    import hivemind  # noqa: F401 - children are forked with these imported
    import torchft  # noqa: F401

    with shaped_links(peers) as links, ExitStack() as undo:
        links.shape(mbit=1000, rtt_ms=0)
        talk = _started(engine, links, parameters, compression, undo)
        for mbit, rtt_ms in LINKS:
            links.shape(mbit=mbit, rtt_ms=rtt_ms)
            got_mbit, got_rtt_ms = links.measured(megabytes=mbit * 0.04)
            _round(talk, links)  # the first at a new shape finds its window sizes
            tried = [_round(talk, links) for _ in range(rounds)]
            while sum(one["wrong"] == 0 for one in tried) < rounds and len(tried) < 3 * rounds:
                tried.append(_round(talk, links))
            each = [one for one in tried if one["wrong"] == 0]
            assert each, "no round gave the mean"
            point = {
                "engine": engine,
                "peers": peers,
                "parameters": parameters,
                "compression": compression,
                "mbit": mbit,
                "rtt_ms": rtt_ms,
                "measured_mbit": got_mbit,
                "measured_rtt_ms": got_rtt_ms,
                "rounds": tried,
                **{
                    name: statistics.median(one[name] for one in each) for name in ("prepare_s", "average_s", "round_s")
                },
            }
            print({name: value for name, value in point.items() if name != "rounds"}, flush=True)
            yield point
        for pipe in talk:
            pipe.send(None)


def _started(engine: str, links: Links, parameters: int, compression: str, undo: ExitStack) -> "list[Connection]":
    """A pipe to each peer; peer 0 starts first and tells the address for the others."""
    work: Callable[..., None] = {"hivemind": _hivemind_peer, "torchft": _torchft_peer}[engine]
    talk: list[Connection] = []
    first = ""
    for peer in range(links.peers):
        ours, theirs = FORK.Pipe()
        process = links.start(peer, work, theirs, peer, links.peers, first, parameters, compression)
        undo.callback(process.join, 10)
        talk.append(ours)
        if peer == 0:
            first = _heard(ours)
    for pipe in talk[1:]:
        _heard(pipe)
    return talk


def _heard(pipe: Connection) -> Any:
    if not pipe.poll(120):
        sys.exit("a peer is silent for 120 s")
    return pipe.recv()


def _round(talk: "Sequence[Connection]", links: Links) -> "dict[str, float]":
    """All peers prepare (find each other), then all average: the slowest peer's seconds of each, the bytes that the busiest put
    on its link to average, and how many were left without the mean by an engine that reported success."""
    for pipe in talk:
        pipe.send("prepare")
    prepare_s = max(_heard(pipe) for pipe in talk)
    before = links.sent_bytes()
    for pipe in talk:
        pipe.send("average")
    heard = [_heard(pipe) for pipe in talk]
    average_s = max(seconds for seconds, _ in heard)
    wrong = sum(not right for _, right in heard)
    sent = max(after - base for after, base in zip(links.sent_bytes(), before, strict=True))
    times = {"prepare_s": prepare_s, "average_s": average_s, "round_s": prepare_s + average_s}
    return {**times, "sent_bytes": sent, "wrong": wrong}


def _hivemind_peer(
    address: str, pipe: Connection, peer: int, peers: int, first: str, parameters: int, compression: str
) -> None:
    import hivemind
    import torch
    from hivemind.averaging.control import AveragingStage

    torch.set_num_threads(1)
    dht = hivemind.DHT(
        initial_peers=[first] if first else [],
        host_maddrs=[f"/ip4/{address}/tcp/0"],
        start=True,
        use_relay=False,
        auto_nat=False,
        nat_port_map=False,
    )
    tensor = torch.full((parameters,), float(peer))
    kinds = {"none": hivemind.compression.NoCompression, "fp16": hivemind.compression.Float16Compression}
    averager = hivemind.averaging.DecentralizedAverager(
        [tensor],
        dht,
        start=True,
        prefix="plan",
        target_group_size=peers,
        min_group_size=peers,
        min_matchmaking_time=5,
        request_timeout=3,
        compression=kinds[compression](),
    )
    pipe.send(str(dht.get_visible_maddrs()[0]))
    while pipe.recv():
        with averager.get_tensors() as tensors:
            tensors[0].fill_(float(peer))
        began = time.monotonic()
        control = averager.step(wait=False, require_trigger=True, timeout=100)
        while control.stage not in (AveragingStage.AWAITING_TRIGGER, AveragingStage.FINISHED):
            time.sleep(0.002)
        pipe.send(time.monotonic() - began)
        pipe.recv()
        began = time.monotonic()
        control.allow_allreduce()
        control.result(100)
        spent = time.monotonic() - began
        with averager.get_tensors() as tensors:
            pipe.send((spent, bool((tensors[0] - (peers - 1) / 2).abs().max() < 1e-2)))
    averager.shutdown()
    dht.shutdown()


def _torchft_peer(
    address: str, pipe: Connection, peer: int, peers: int, first: str, parameters: int, compression: str
) -> None:
    import torch
    from torch.distributed import ReduceOp, TCPStore
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    if peer == 0:
        lighthouse = LighthouseServer(
            bind=f"{address}:29510", min_replicas=peers, join_timeout_ms=5000, heartbeat_timeout_ms=20000
        )
        first = f"http://{address}:29510"
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=100)),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=peers,
        use_async_quorum=False,
        replica_id=f"peer{peer}",
        store_addr=address,
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=first,
        hostname=address,
        timeout=timedelta(seconds=100),
        quorum_timeout=timedelta(seconds=100),
        init_sync=False,
    )
    pipe.send(first)
    while pipe.recv():
        began = time.monotonic()
        manager.start_quorum()
        manager.allreduce(torch.tensor([1.0, 2.0]), reduce_op=ReduceOp.SUM).wait()
        pipe.send(time.monotonic() - began)
        tensor = torch.full((parameters,), float(peer))
        pipe.recv()
        began = time.monotonic()
        manager.allreduce(tensor, reduce_op=ReduceOp.SUM).wait()
        assert manager.should_commit(), "not committed"
        spent = time.monotonic() - began
        pipe.send((spent, bool((tensor - peers * (peers - 1) / 2).abs().max() < 1e-2)))
    manager.shutdown(wait=False)
    if peer == 0:
        lighthouse.shutdown()


if __name__ == "__main__":
    main()
