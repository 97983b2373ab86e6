"""torchft 0.2.0: its DistributedDataParallel crashes the survivor on gloo when a replica dies in the all-reduce.

    python torchft_ddp_crash.py

Two replicas agree on a quorum; one is killed before its backward pass. `_ManagedWork.wait` reports gloo's "connection reset"
to the manager and returns without having set the future that the wrapper's hook then asserts on, so that backward raises an
AssertionError instead of leaving the step uncommitted. `manager.allreduce(t).wait()` and `should_commit()` by hand survive.
"""

import logging
import multiprocessing
import os
import signal
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
from torch.distributed import TCPStore
from torchft.coordination import LighthouseServer
from torchft.ddp import DistributedDataParallel
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo


def replica(name: str, pipe: Connection, dies: bool) -> None:
    logging.disable(logging.CRITICAL)
    limit = timedelta(seconds=15)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit), load_state_dict=lambda state: None, state_dict=dict, min_replica_size=1,
        rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=pipe.recv(),
        replica_id=name, hostname="127.0.0.1", timeout=limit, init_sync=False,
    )  # fmt: skip
    model = DistributedDataParallel(manager, torch.nn.Linear(4, 4))
    manager.start_quorum()
    manager.wait_quorum()
    pipe.send(manager.num_participants())
    pipe.recv()
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        model(torch.ones(2, 4)).sum().backward()
        pipe.send(f"went on, commits: {manager.should_commit()}")
    except AssertionError as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        pipe.send(f"raised AssertionError at {os.path.basename(at.filename)}:{at.lineno}: {at.line}")
    os._exit(0)


def main() -> None:
    context = multiprocessing.get_context("fork")
    pipes, replicas = [], []
    for name, dies in (("peer_0", False), ("peer_1", True)):
        ours, theirs = context.Pipe()
        pipes.append(ours)
        replicas.append(context.Process(target=replica, args=(name, theirs, dies)))
        replicas[-1].start()
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=10000)
    for pipe in pipes:
        pipe.send(lighthouse.address())
    quorums = [pipe.recv() for pipe in pipes]
    pipes[1].send("go")
    replicas[1].join(30)
    pipes[0].send("go")
    outcome = pipes[0].recv() if pipes[0].poll(40) else "hung"
    replicas[0].kill()
    lighthouse.shutdown()
    print(f"quorums of {quorums}; the other was killed before its backward pass; the survivor {outcome}")
    print("fault: present" if outcome.startswith("raised") or outcome == "hung" else "fault: gone")


if __name__ == "__main__":
    main()
