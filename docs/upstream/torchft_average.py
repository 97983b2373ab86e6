"""torchft 0.2.0: the average over replicas ignores how many samples each of them had.

    python torchft_average.py

`Manager.allreduce` divides the sum by the number of participants. Two replicas with mean gradients 1.0 over 30 samples and
5.0 over 10 have the mean 2.0; each gets 3.0. Right where the batch is the same everywhere, wrong where peers accumulate
what they manage to.
"""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
from torch.distributed import TCPStore
from torchft.coordination import LighthouseServer
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo


def replica(name: str, lighthouse: str, gradient: float) -> float:
    limit = timedelta(seconds=30)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit), load_state_dict=lambda state: None, state_dict=dict, min_replica_size=2,
        rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=lighthouse,
        replica_id=name, hostname="127.0.0.1", timeout=limit, init_sync=False,
    )  # fmt: skip
    manager.start_quorum()
    tensor = torch.full((4,), gradient)
    manager.allreduce(tensor).wait()
    assert manager.should_commit()
    manager.shutdown(wait=False)
    return tensor[0].item()


def main() -> None:
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=10000)
    with ThreadPoolExecutor(2) as pool:
        means = list(pool.map(replica, ("peer_0", "peer_1"), (lighthouse.address(),) * 2, (1.0, 5.0)))
    lighthouse.shutdown()
    print(f"1.0 over 30 samples and 5.0 over 10: each replica gets {means}, the mean over the samples is 2.0")
    print("fault: present" if means != [2.0, 2.0] else "fault: gone")


if __name__ == "__main__":
    main()
