"""Several ranks under DistributedDataParallel as one peer: rank 0 talks to the swarm, the others do as it says.

After each micro-batch rank 0 broadcasts five numbers (40 bytes, over gloo, so that no device is waited for), after a
mean that was had the mean, after a state that was replaced the state. The alternative, each rank a peer, averages over
the slow network what DDP has averaged already, once for each rank.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from bareloop.swarm.engine import Engine, RoundFailed, StateReplaced, TrainingState

__all__ = ["RankedEngine", "over_ranks"]

_DONE, _FAILED, _REPLACED, _BROKEN = range(4)
"""How rank 0's question to the engine ended."""


def over_ranks(engine: Engine, model: nn.Module) -> Engine:
    """`engine` for a model of one process; for one under DistributedDataParallel an engine that all ranks share.

    Every rank calls it, and every method of what it returns, in the same order.

    Raises:
        ValueError: parts of the model are under DistributedDataParallel with different groups.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return engine
    wrappers = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    groups = {tuple(dist.get_process_group_ranks(wrapper.process_group)) for wrapper in wrappers}
    if len(groups) > 1:
        raise ValueError(
            f"parts of model are under DistributedDataParallel with {len(groups)} different groups of ranks"
        )
    if not wrappers or len(next(iter(groups))) == 1:
        return engine
    return RankedEngine(engine, wrappers[0].process_group)


class RankedEngine:
    """An `Engine` on each rank of a group, of which rank 0's has one beneath it."""

    def __init__(self, engine: Engine, group: Any) -> None:
        """Group: of DistributedDataParallel; all its ranks make one."""
        ranks = dist.get_process_group_ranks(group)
        self._source = ranks[0]
        self._leads = dist.get_rank() == self._source
        self._engine = engine
        self._by_device = group
        self._by_host: Any = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        self._state: TrainingState | None = None
        self.round = 0
        self.peers = 0
        self.global_samples = 0.0

    def start(self, state: TrainingState, buffers: Sequence[Tensor], *, round: int = 0) -> None:
        """As `Engine.start`; all ranks have rank 0's state when it returns."""
        self._state = state
        self._decide(lambda: self._engine.start(state, buffers, round=round))
        self._share_state()

    def ready(self, samples: float) -> bool:
        return bool(self._decide(lambda: self._engine.ready(samples)))

    def average(self, buffers: Sequence[Tensor], samples: float) -> float:
        of_all = self._decide(lambda: self._engine.average(buffers, samples))
        for buffer in buffers:
            self._send(buffer)
        return of_all

    def applied(self) -> None:
        self._decide(lambda: self._engine.applied())

    def publish(self, record: str) -> None:
        if self._leads:
            self._engine.publish(record)

    def close(self) -> None:
        """Rank 0 leaves; the others have nothing open, and nothing waits for them."""
        if self._leads:
            self._engine.close()

    def _decide(self, ask: Callable[[], float | None]) -> float:
        """What rank 0's engine answers, on all ranks, or raises."""
        outcome, value, error = _asked(ask) if self._leads else (_DONE, 0.0, None)
        of_rank_0 = self._engine if self._leads and outcome != _BROKEN else self
        numbers = [outcome, value, of_rank_0.round, of_rank_0.peers, of_rank_0.global_samples]
        answer = torch.tensor(numbers, dtype=torch.float64)
        dist.broadcast(answer, self._source, group=self._by_host)
        outcome, value, round, peers, self.global_samples = answer.tolist()
        self.round, self.peers = int(round), int(peers)
        if outcome == _REPLACED:
            self._share_state()
        if error is not None:
            raise error
        if outcome == _FAILED:
            raise RoundFailed("the mean could not be had; rank 0 says why")
        if outcome == _REPLACED:
            raise StateReplaced("the others had gone on; rank 0 has loaded their state")
        if outcome == _BROKEN:
            raise RuntimeError("the swarm's engine failed on rank 0; its error says why")
        return value

    def _share_state(self) -> None:
        state = self._state
        assert state is not None
        for tensor in (*state.model.parameters(), *state.model.buffers()):
            self._send(tensor.detach())
        optimizer = self._shared_tree(state.optimizer.state_dict())
        scheduler = None if state.scheduler is None else self._shared_tree(state.scheduler.state_dict())
        if not self._leads:
            state.optimizer.load_state_dict(optimizer)
            if state.scheduler is not None:
                state.scheduler.load_state_dict(scheduler)

    def _shared_tree(self, own: Any) -> Any:
        """Rank 0's `own`, with its tensors in host memory. What is not a tensor is pickled: from one process of this peer to
        another, nothing of it comes from the network."""
        described = [tree_map_only(Tensor, lambda tensor: torch.empty_like(tensor, device="meta"), own)]
        dist.broadcast_object_list(described, self._source, group=self._by_host)

        def give(tensor: Tensor) -> Tensor:
            dist.broadcast(tensor.detach().cpu().contiguous(), self._source, group=self._by_host)
            return tensor

        def take(meta: Tensor) -> Tensor:
            tensor = torch.empty(meta.shape, dtype=meta.dtype)
            dist.broadcast(tensor, self._source, group=self._by_host)
            return tensor

        return tree_map_only(Tensor, give, own) if self._leads else tree_map_only(Tensor, take, described[0])

    def _send(self, tensor: Tensor) -> None:
        """Rank 0's `tensor` into that of the others."""
        whole = tensor.contiguous()
        group = self._by_host if tensor.device.type == "cpu" else self._by_device
        dist.broadcast(whole, self._source, group=group)
        if whole is not tensor and not self._leads:
            tensor.copy_(whole)


def _asked(ask: Callable[[], float | None]) -> tuple[int, float, BaseException | None]:
    """(how it ended, answer, what it raised)."""
    try:
        return _DONE, float(ask() or 0), None
    except RoundFailed as error:
        return _FAILED, 0.0, error
    except StateReplaced as error:
        return _REPLACED, 0.0, error
    except BaseException as error:
        return _BROKEN, 0.0, error
