"""hivemind 1.1.12: each micro-step's progress is published in the DHT, and the training thread waits for the interpreter.

    python hivemind_report_per_step.py

`Optimizer.step` tells the tracker of each micro-step, and the tracker's thread publishes each: it has a minimal period for
reading the others' progress and none for telling its own. The record is made, serialized and handed to the DHT's process in
Python, in the training process, so forward and backward wait for the interpreter meanwhile; and the nodes that hold the key
get a signed record a step from each peer.
"""

import time

import hivemind
import torch
from torch import nn

STEPS = 40
STEP_S = 0.05
"""A micro-step: 20 a second, as a small model's."""


def main() -> None:
    model = nn.Linear(4, 1)
    dht = hivemind.DHT(start=True, nat_port_map=False)
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="reports",
        target_batch_size=10**9,
        batch_size_per_step=1,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        reuse_grad_buffers=True,
    )
    published = 0
    store = dht.store

    def counted(*arguments: object, **named: object) -> object:
        nonlocal published
        published += named.get("key") == "reports_progress"
        return store(*arguments, **named)

    dht.store = counted
    others_s = 0.0
    for _ in range(STEPS):
        model(torch.ones(1, 4)).mean().backward()
        optimizer.step()
        before_s = time.process_time() - time.thread_time()
        time.sleep(STEP_S)
        others_s += time.process_time() - time.thread_time() - before_s
    optimizer.shutdown()
    dht.shutdown()
    print(
        f"{STEPS} micro-steps in {STEPS * STEP_S:.0f} s: {published} records published,"
        f" {1e3 * others_s / STEPS:.1f} ms of CPU a step in the other threads of the training process"
    )
    print("fault: present" if published > STEPS / 2 else "fault: gone")


if __name__ == "__main__":
    main()
