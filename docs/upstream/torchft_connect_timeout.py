"""torchft 0.2.0: a lighthouse that isn't there is noticed after the whole connect timeout, 60 s by default.

    python torchft_connect_timeout.py

A lighthouse on a taken port ends with "Address already in use". The workers that were given its address get "connection
refused" at once from the system, and go on trying for as long. The timeout is set to 2 s here.
"""

import inspect
import socket
import time
from datetime import timedelta

from torch.distributed import TCPStore
from torchft.coordination import LighthouseServer
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        try:
            LighthouseServer(bind=f"127.0.0.1:{port}", min_replicas=1)
            second = "started"
        except RuntimeError as error:
            second = str(error)
    with socket.socket() as probe:
        refused = probe.connect_ex(("127.0.0.1", port)) != 0
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    began = time.monotonic()
    try:
        Manager(
            pg=ProcessGroupGloo(), load_state_dict=None, state_dict=None, min_replica_size=1, rank=0, world_size=1,
            store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=f"http://127.0.0.1:{port}", replica_id="peer_0",
            hostname="127.0.0.1", connect_timeout=timedelta(seconds=2),
        )  # fmt: skip
        outcome = "built"
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    waited_s = time.monotonic() - began
    default = inspect.signature(Manager.__init__).parameters["connect_timeout"].default
    print(f"lighthouse on a taken port: {second}; the system refuses a connection at once: {refused}")
    print(
        f"manager: {outcome} after {waited_s:.1f} s with connect_timeout=2 s (default {default.total_seconds():.0f} s)"
    )
    print("fault: present" if waited_s >= 1.9 else "fault: gone")


if __name__ == "__main__":
    main()
