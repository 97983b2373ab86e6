"""The libraries as they are, for comparison: `hivemind.Optimizer`, and torchft's wrappers of model and optimizer.

Both are set up to notice failures as fast as their arguments allow without ours: hivemind with matchmaking of 2 s and an
averaging timeout of 10 s, torchft with the lighthouse of our engine and a timeout of 5 s. torchft has no accumulation, so
its peers take a batch of a third of the target a step.
"""

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from failures.peer import MICRO_BATCH, TARGET, Witness, parameters_of

__all__ = ["train"]


def train(witness: Witness, address: str) -> None:
    """Trains until the run is stopped."""
    if witness.part.engine == "hivemind.Optimizer":
        _hivemind(witness, address)
    else:
        _torchft(witness, address)


def _hivemind(witness: Witness, address: str) -> None:
    import hivemind
    from hivemind.optim.grad_averager import GradientAverager

    dht = hivemind.DHT(
        host_maddrs=[f"/ip4/{witness.part.host}/tcp/0"],
        initial_peers=[address],
        start=True,
        use_relay=False,
        use_auto_relay=False,
        use_ipfs=False,
    )
    inner: list[torch.optim.Optimizer] = []

    def build(groups: Any) -> torch.optim.Optimizer:
        inner.append(torch.optim.SGD(groups, lr=0.05, momentum=0.9))
        return inner[0]

    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id=witness.part.folder.name,
        target_batch_size=TARGET,
        batch_size_per_step=MICRO_BATCH,
        params=list(witness.model.parameters()),
        optimizer=build,
        matchmaking_time=2.0,
        averaging_timeout=10.0,
    )
    step, load = GradientAverager.step, optimizer.load_state_from_peers

    def averaged(self: Any, *values: Any, **named: Any) -> Any:
        if optimizer.local_epoch == optimizer.tracker.global_epoch:
            witness.attempt(optimizer.local_epoch, len(witness.rows))
        return step(self, *values, **named)

    def loaded(*values: Any, **named: Any) -> Any:
        witness.drop("step")
        return load(*values, **named)

    GradientAverager.step, optimizer.load_state_from_peers = averaged, loaded
    inner[0].register_step_pre_hook(lambda *_: _attempt_alone(witness, optimizer.local_epoch - 1))
    witness.watch(inner[0])
    witness.log.write("joined", round=optimizer.local_epoch, parameters=parameters_of(witness.model))
    for rows in witness.micro_batches():
        optimizer.zero_grad()
        loss, count = witness.loss(witness.model, rows)
        (loss / count).backward()
        witness.timed(optimizer.step, "ready", batch_size=count)
    optimizer.shutdown()
    dht.shutdown()


def _attempt_alone(witness: Witness, round: int) -> None:
    """Writes down what a peer has that steps without having asked others."""
    if witness.rows and (witness.tried != len(witness.rows) or witness.round != round):
        witness.attempt(round, len(witness.rows))


def _torchft(witness: Witness, address: str) -> None:
    from torch.distributed import TCPStore
    from torchft.ddp import DistributedDataParallel
    from torchft.manager import Manager
    from torchft.optim import OptimizerWrapper
    from torchft.process_group import ProcessGroupGloo

    model, host = witness.model, witness.part.host
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=lambda state: _load(model, optimizer, state),
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        timeout=timedelta(seconds=5),
        quorum_timeout=timedelta(seconds=30),
        connect_timeout=timedelta(seconds=5),
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        lighthouse_addr=f"http://{address}",
        replica_id=witness.part.name,
        init_sync=False,  # all begin with the same weights; else the others give zeros to the first mean
        hostname=host,
    )
    wrapped, wrapper = DistributedDataParallel(manager, model), OptimizerWrapper(manager, optimizer)
    witness.watch(optimizer)
    witness.log.write("joined", round=0, parameters=parameters_of(model))
    for rows in _batches(witness):
        witness.timed(wrapper.zero_grad, "ready")
        witness.round = manager.current_step()
        loss, count = witness.loss(wrapped, rows)
        witness.attempt(manager.current_step(), count)
        witness.averaging = True
        witness.timed((loss / count).backward, "average")
        witness.timed(wrapper.step, "ready")
        witness.averaging = False
        if witness.rows:  # not committed: torchft keeps nothing
            witness.drop("step")
    manager.shutdown(wait=False)


def _batches(witness: Witness) -> Any:
    gathered: list[Tensor] = []
    for rows in witness.micro_batches():
        gathered.append(rows)
        if len(gathered) * MICRO_BATCH * 3 >= TARGET:
            yield torch.cat(gathered)
            gathered.clear()


def _load(model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: Any) -> None:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
