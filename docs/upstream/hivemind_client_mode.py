"""hivemind 1.1.12: `hivemind.Optimizer(client_mode=...)` is replaced by the DHT's client mode.

    python hivemind_client_mode.py

The constructor keeps the argument only where it is None. A peer that must not be connected to (client_mode=True) offers
itself to others all the same.
"""

import logging

import hivemind
import torch


def main() -> None:
    for handler in logging.getLogger("hivemind").handlers:
        handler.setLevel(logging.CRITICAL)
    dht = hivemind.DHT(start=True, nat_port_map=False)
    optimizer = hivemind.Optimizer(
        dht=dht, run_id="client", target_batch_size=8, batch_size_per_step=8, client_mode=True,
        optimizer=torch.optim.SGD([torch.nn.Parameter(torch.ones(4))], lr=0.1),
    )  # fmt: skip
    taken, averager = optimizer.client_mode, optimizer.grad_averager.client_mode
    optimizer.shutdown()
    dht.shutdown()
    print(f"asked for client_mode=True; the optimizer has {taken}, its gradient averager has {averager}")
    print("fault: present" if not taken else "fault: gone")


if __name__ == "__main__":
    main()
