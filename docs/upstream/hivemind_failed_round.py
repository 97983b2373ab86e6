"""hivemind 1.1.12: after a failed averaging round the optimizer gets a gradient of zeros.

    python hivemind_failed_round.py

A second peer reports progress and then never joins the all-reduce, as one that was killed does. The first peer's optimizer
steps, logs "Proceeding with local gradients", counts an epoch, and its parameters don't move: the accumulators were
zeroed when the round began, and the fallback reads those.
"""

import logging
import time

import hivemind
import torch
from hivemind.optim.progress_tracker import ProgressTracker
from hivemind.utils.crypto import RSAPrivateKey


class Heard(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if "local gradients" in record.getMessage():
            print(f'log: "{record.getMessage()}"')


def micro_step(optimizer: hivemind.Optimizer, weight: torch.nn.Parameter, samples: int) -> None:
    optimizer.zero_grad()
    weight.square().sum().backward()
    optimizer.step(batch_size=samples)


def main() -> None:
    log = logging.getLogger("hivemind")
    for handler in log.handlers:
        handler.setLevel(logging.CRITICAL)
    log.addHandler(Heard())
    dht = hivemind.DHT(start=True, nat_port_map=False)
    other = hivemind.DHT(initial_peers=[str(a) for a in dht.get_visible_maddrs()], start=True, nat_port_map=False)
    absent = ProgressTracker(other, "failed", 8, private_key=RSAPrivateKey(), start=True)
    absent.report_local_progress(local_epoch=0, samples_accumulated=1)

    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = hivemind.Optimizer(
        dht=dht, run_id="failed", target_batch_size=8, matchmaking_time=0.5, averaging_timeout=1.5, verbose=True,
        optimizer=torch.optim.SGD([weight], lr=0.1), tracker_opts={"max_refresh_period": 0.5},
    )  # fmt: skip
    handed: list[float] = []
    optimizer.opt.register_step_pre_hook(lambda *_: handed.append(weight.grad.norm().item()))  # type: ignore[union-attr]
    optimizer.tracker.report_local_progress(local_epoch=0, samples_accumulated=1)
    deadline = time.monotonic() + 60
    while optimizer.tracker.global_progress.num_peers < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    peers = optimizer.tracker.global_progress.num_peers
    while optimizer.local_epoch == 0 and time.monotonic() < deadline:
        micro_step(optimizer, weight, 8)
    print(
        f"{peers} peers; gradient of each micro-batch 4.0, handed to the optimizer {handed[:1]}, weights {weight.tolist()},"
    )
    print(f"epoch {optimizer.local_epoch}")
    optimizer.shutdown()
    for part in (absent, other, dht):
        part.shutdown()
    assert handed and peers == 2, "the round was not tried: no verdict"
    print("fault: present" if handed[0] == 0 else "fault: gone")


if __name__ == "__main__":
    main()
