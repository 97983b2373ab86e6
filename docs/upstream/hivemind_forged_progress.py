"""hivemind 1.1.12: one record of a stranger in the DHT stops the training of every peer.

    python hivemind_forged_progress.py

Progress records are signed, so nobody can overwrite another's; but anybody may add one of their own, and `ProgressTracker`
takes the largest epoch of all records for the swarm's. A stranger who says "epoch 1000000" makes every peer think that it is
behind: each `step()` drops its gradient and tries to download a state. It lasts as long as the record is renewed.
"""

import logging
import time

import hivemind
import torch
from hivemind.optim.progress_tracker import ProgressTracker
from hivemind.utils.crypto import RSAPrivateKey


def main() -> None:
    for handler in logging.getLogger("hivemind").handlers:
        handler.setLevel(logging.CRITICAL)
    dht = hivemind.DHT(start=True, nat_port_map=False)
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = hivemind.Optimizer(
        dht=dht, run_id="forged", target_batch_size=8, batch_size_per_step=8, matchmaking_time=0.5, averaging_timeout=1.5,
        optimizer=torch.optim.SGD([weight], lr=0.1), tracker_opts={"max_refresh_period": 0.5},
    )  # fmt: skip
    stranger = hivemind.DHT(initial_peers=[str(a) for a in dht.get_visible_maddrs()], start=True, nat_port_map=False)
    liar = ProgressTracker(stranger, "forged", 8, private_key=RSAPrivateKey(), start=True)
    liar.report_local_progress(local_epoch=1_000_000, samples_accumulated=1)
    deadline = time.monotonic() + 30
    while optimizer.tracker.global_epoch < 1_000_000:
        assert time.monotonic() < deadline, "the record was not read: no verdict"
        time.sleep(0.1)
    for _ in range(10):
        optimizer.zero_grad()
        weight.square().sum().backward()
        optimizer.step()
    epoch = optimizer.local_epoch
    optimizer.shutdown()
    for part in (liar, stranger, dht):
        part.shutdown()
    print(f"10 full batches after the record: epoch {epoch}, weights {weight.tolist()} (all ones: nothing was learnt)")
    print("fault: present" if weight.tolist() == [1.0] * 4 else "fault: gone")


if __name__ == "__main__":
    main()
