"""torchft 0.2.0: whoever reaches the lighthouse, or a manager's port, can end a trainer's process.

    python torchft_kill.py

The lighthouse's web page has a "kill" button for each replica, without a password: a POST makes it ask the replica's
manager, which ends its process. The manager's own port takes the same request from anyone; it listens on all interfaces of
the machine, whatever `hostname` says.
"""

import logging
import multiprocessing
import re
import time
import urllib.error
import urllib.request
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

from torch.distributed import TCPStore
from torchft.coordination import LighthouseServer
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo


def trainer(pipe: Connection) -> None:
    logging.disable(logging.CRITICAL)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(), load_state_dict=lambda state: None, state_dict=dict, min_replica_size=1, rank=0,
        world_size=1, store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=pipe.recv(), replica_id="peer_0",
        hostname="127.0.0.1", timeout=timedelta(seconds=15), init_sync=False,
    )  # fmt: skip
    manager.start_quorum()
    manager.wait_quorum()
    pipe.send("training")
    time.sleep(60)


def listens_on_all(port: int) -> bool:
    """Whether a socket listens at `port` on all interfaces (Linux)."""
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    heard = [row[1].split(":") for row in rows if row[3] == "0A"]  # listening
    return any(int(at, 16) == port and not address.strip("0") for address, at in heard)


def main() -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=trainer, args=(theirs,))
    process.start()
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100)
    address = lighthouse.address()
    port = address.rpartition(":")[2]
    ours.send(address)
    assert ours.poll(60) and ours.recv() == "training"
    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=10).read().decode()
    (name,) = set(re.findall(r"peer_0:[0-9a-f-]{36}", page))
    managers = [int(found) for found in set(re.findall(r"http://127\.0\.0\.1:(\d+)", page))]
    open_to_all = [listens_on_all(found) for found in managers]
    try:
        urllib.request.urlopen(
            urllib.request.Request(f"http://127.0.0.1:{port}/replica/{name}/kill", method="POST"), timeout=10
        )
    except urllib.error.HTTPError:
        pass  # the killed one gives no answer
    process.join(10)
    ended = process.exitcode
    process.kill()
    lighthouse.shutdown()
    print(f"after a POST without a password the trainer's exit code is {ended} (None: it lives)")
    print(f"its manager, told hostname=127.0.0.1, listened on all interfaces: {open_to_all}")
    print("fault: present" if ended is not None else "fault: gone")


if __name__ == "__main__":
    main()
