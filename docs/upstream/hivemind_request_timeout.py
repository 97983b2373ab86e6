"""hivemind 1.1.12: `matchmaking_time` of 3 s or less warns about a `request_timeout` that the user did not set.

    python hivemind_request_timeout.py

`DecentralizedAverager(request_timeout=3.0)` is a default that `hivemind.Optimizer` never adapts; each of its two averagers
warns of deadlocks. The way out is `averager_opts={"request_timeout": ...}` below `matchmaking_time`... for one of the two:
`averager_opts` goes to the state averager only, in spite of its documentation, so the gradient averager keeps warning.
"""

import logging
import tempfile
from pathlib import Path

import hivemind
import torch


def warnings_of(dht: hivemind.DHT, run: str, file: Path, **options: object) -> int:
    """How often the two averagers of an optimizer warn; they are processes of their own, so it is read from a file."""
    log = logging.getLogger("hivemind")
    handler = logging.FileHandler(file)
    log.addHandler(handler)
    optimizer = hivemind.Optimizer(
        dht=dht, run_id=run, target_batch_size=8, batch_size_per_step=8, matchmaking_time=2.0,
        optimizer=torch.optim.SGD([torch.nn.Parameter(torch.ones(4))], lr=0.1), **options,
    )  # fmt: skip
    optimizer.shutdown()
    log.removeHandler(handler)
    return file.read_text().count("request_timeout smaller than min_matchmaking_time")


def main() -> None:
    for handler in logging.getLogger("hivemind").handlers:
        handler.setLevel(logging.CRITICAL)
    dht = hivemind.DHT(start=True, nat_port_map=False)
    with tempfile.TemporaryDirectory() as folder:
        default = warnings_of(dht, "default", Path(folder, "default"))
        asked = warnings_of(dht, "asked", Path(folder, "asked"), averager_opts={"request_timeout": 1.0})
    dht.shutdown()
    print(f"matchmaking_time=2: {default} warnings; with averager_opts={{'request_timeout': 1.0}}: {asked}")
    print("fault: present" if asked else "fault: gone")


if __name__ == "__main__":
    main()
