"""How a model reduces its gradients among ranks: over which groups, divided by what, and how to hold it back.

DistributedDataParallel and fully_shard both give the mean of the ranks' gradients. Whoever divides by a count of all
ranks has to undo that mean, and whoever accumulates has to reduce once a step: both need to know what is here.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Reduction", "last_reduces", "reduction"]

Groups: TypeAlias = "tuple[dist.ProcessGroup, ...]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduction:
    """How a model reduces its gradients. The defaults are those of a model that does not."""

    groups: Groups = ()
    """Groups of more than one rank: a sum over one after the other is a sum over all ranks."""
    ranks: int = 1
    """Ranks whose gradients are combined."""
    divisor: float = 1.0
    """What the sum of the ranks' gradients is divided by: `ranks`, unless set_gradient_divide_factor was called."""
    synchronise: Callable[[bool], None] | None = None
    """Switches reducing on or off for the forward and backward passes to come; None where there is none."""
    abandon: Callable[[], None] | None = None
    """Forgets what the model keeps of a window that an exception ended; None where it keeps nothing."""


def reduction(model: nn.Module) -> Reduction:
    """How `model` reduces: by DistributedDataParallel, fully_shard (sharded or hybrid), or not at all.

    A wrapper is found at any depth, below torch.compile's too. A communication hook of DDP is taken to average.

    Raises:
        ValueError: FullyShardedDataParallel; DDP and fully_shard mixed; submodules that reduce over different groups.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Reduction()
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    modules = list(model.modules())
    if any(isinstance(module, FullyShardedDataParallel) for module in modules):
        raise ValueError("model has FullyShardedDataParallel in it: use torch.distributed.fsdp.fully_shard instead")
    replicated = [module for module in modules if isinstance(module, DistributedDataParallel)]
    sharded = [module for module in modules if isinstance(module, FSDPModule)]
    if replicated and sharded:
        raise ValueError("model mixes DistributedDataParallel and fully_shard: use fully_shard with a 2-d mesh instead")
    if replicated:
        return _replicated(replicated)
    return _sharded(sharded) if sharded else Reduction()


def last_reduces(synchronise: Callable[[bool], None]) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Window to the same window, in which the passes of the last micro-batch alone reduce.

    It takes a micro-batch from the loader before the one before it is computed, to know which one is the last.
    """

    def window(batches: Iterator[Any]) -> Iterator[Any]:
        reducing = True
        for batch in batches:
            for following in batches:
                if reducing:
                    synchronise(False)
                    reducing = False
                yield batch
                batch = following
            if not reducing:
                synchronise(True)
            yield batch

    return window


def _replicated(modules: Sequence[DistributedDataParallel]) -> Reduction:
    over: list[dist.ProcessGroup] = [module.process_group for module in modules]  # pyright: ignore[reportAssignmentType]
    groups, size = _the_only("process groups", [((group,), group.size()) for group in over])

    def synchronise(on: bool) -> None:
        for module in modules:
            module.require_backward_grad_sync = on  # what no_sync() sets; read in forward

    return _reduction(groups, size, synchronise)


def _sharded(modules: Sequence[Any]) -> Reduction:
    # None of this is public, and nothing public tells it: a parameter's mesh has dimensions that do not average, too.
    states = [module._get_fsdp_state() for module in modules]
    found: list[tuple[Groups, float]] = []
    for parameters in (group for state in states for group in state._fsdp_param_groups):
        mesh: Any = parameters.mesh_info
        sides = (getattr(mesh, side, None) for side in ("shard_process_group", "replicate_process_group"))
        groups = tuple(group for group in sides if group is not None)
        found.append((groups, parameters.gradient_divide_factor or math.prod(group.size() for group in groups)))
    groups, divisor = _the_only("meshes or gradient divide factors", found)

    def synchronise(on: bool) -> None:
        for module in modules:
            module.set_requires_gradient_sync(on, recurse=False)

    def abandon() -> None:
        for module, state in zip(modules, states, strict=True):
            if state._is_root and hasattr(module, "reset_iter_state"):  # torch 2.13: ends a forward that was cut off
                module.reset_iter_state()
        # Gradients that were not reduced wait on the unsharded parameters, where neither it nor zero_grad() reaches them.
        for parameter in (one for state in states for group in state._fsdp_param_groups for one in group.fsdp_params):
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None

    return _reduction(groups, divisor, synchronise, abandon)


def _the_only(what: str, found: Sequence[tuple[Groups, float]]) -> tuple[Groups, float]:
    """The (groups, divisor) that all parts of a model have in common."""
    kinds = {(tuple(tuple(dist.get_process_group_ranks(group)) for group in groups), by) for groups, by in found}
    if len(kinds) != 1:
        raise ValueError(f"parts of model reduce with {len(kinds)} different {what}: steps needs one for all of it")
    return found[0]


def _reduction(
    groups: Groups,
    divisor: float,
    synchronise: Callable[[bool], None],
    abandon: Callable[[], None] | None = None,
) -> Reduction:
    return Reduction(
        groups=tuple(group for group in groups if group.size() > 1),
        ranks=math.prod(group.size() for group in groups),
        divisor=float(divisor),
        synchronise=synchronise,
        abandon=abandon,
    )
