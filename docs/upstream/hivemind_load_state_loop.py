"""hivemind 1.1.12: a joiner whose download takes longer than `load_state_timeout` repeats it forever, from the start.

    python hivemind_load_state_loop.py

`Optimizer.load_state_from_peers` retries in a bare `while True` without a pause or a limit, inside `step()`. Here the donor
takes 2 s for its state and the joiner waits for 0.2 s.
"""

import logging
import os
import threading
import time

import hivemind
import torch
from hivemind.optim.state_averager import TrainingStateAverager


def slowly(averager: TrainingStateAverager, get=TrainingStateAverager.get_current_state):
    time.sleep(2)
    return get(averager)


class Retries(logging.Handler):
    heard = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.heard += "retrying" in record.getMessage()


def peer(dht: hivemind.DHT) -> hivemind.Optimizer:
    return hivemind.Optimizer(
        dht=dht, run_id="loop", target_batch_size=8, batch_size_per_step=8, load_state_timeout=0.2,
        optimizer=torch.optim.SGD([torch.nn.Parameter(torch.ones(4))], lr=0.1),
    )  # fmt: skip


def main() -> None:
    log, retries = logging.getLogger("hivemind"), Retries()
    for handler in log.handlers:
        handler.setLevel(logging.CRITICAL)
    log.addHandler(retries)
    TrainingStateAverager.get_current_state = slowly  # type: ignore[method-assign]
    first = hivemind.DHT(start=True, nat_port_map=False)
    second = hivemind.DHT(initial_peers=[str(a) for a in first.get_visible_maddrs()], start=True, nat_port_map=False)
    donor, joiner = peer(first), peer(second)
    deadline = time.monotonic() + 30
    while len((second.get("loop_state_averager.all_averagers", latest=True) or ({},))[0]) < 2:
        assert time.monotonic() < deadline, "the donor was not found: no verdict"
        time.sleep(0.1)
    loading = threading.Thread(target=joiner.load_state_from_peers, daemon=True)
    loading.start()
    loading.join(3)
    print(f"after 3 s: still loading {loading.is_alive()}, retries {retries.heard}")
    print("fault: present" if loading.is_alive() and retries.heard > 2 else "fault: gone", flush=True)
    for part in (donor.state_averager, donor.grad_averager, joiner.state_averager, joiner.grad_averager, second, first):
        part.terminate()
    os._exit(0)  # the thread can't be ended


if __name__ == "__main__":
    main()
