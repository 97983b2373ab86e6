"""The places in torch where a training loop can be watched without its consent: wrappers that report to one listener.

Every wrapper calls what it wraps exactly once with the arguments it got. `install` puts them in, `uninstall` puts the
very objects back. The two overrides are the seams that ablations use.
"""

import functools
import os
from collections.abc import Callable
from typing import Any, Protocol

from bareloop.profiler.probes.phase_clock import PhaseClock, phase_index

__all__ = [
    "Listener",
    "batch_override",
    "clip_override",
    "install",
    "replace",
    "uninstall",
    "unwrap",
    "watch_transfers",
]

clip_override: Callable[..., Any] | None = None
"""Called instead of torch's clip_grad_norm_ with its arguments, when an ablation sets it."""
batch_override: Callable[[Any], Any] | None = None
"""Called with each batch that the training loader yields, when an ablation sets it."""

_MISSING = object()
_replaced: list[tuple[Any, str, Any]] = []
_hooks: list[Any] = []


class Listener(Protocol):
    """What the wrappers report to."""

    clock: PhaseClock
    gradients_ready: bool
    """True from a backward to the optimizer step: what is reduced meanwhile are gradients."""

    def loaded(self, loader: Any, batch: Any) -> Any:
        """A loader yielded a batch; returns what the script gets."""
        ...

    def backward(self, tensors: Any) -> None:
        """A backward pass is about to start from these tensors."""
        ...

    def clipped(self, kind: str, limit: float, norm: Any) -> None:
        """Gradients were clipped by "norm" or "value"."""
        ...

    def scaled(self, scaler: Any) -> None:
        """A GradScaler scaled a loss."""
        ...

    def before_step(self, optimizer: Any) -> None:
        """An optimizer is about to step."""
        ...

    def after_step(self, optimizer: Any, *, skipped: bool = False) -> None:
        """An optimizer stepped, or GradScaler skipped it."""
        ...

    def saved(self) -> None:
        """torch.save was called: the step holds a checkpoint."""
        ...


def replace(owner: Any, name: str, value: Any) -> None:
    """Sets `owner.name` and remembers what stood there, or that nothing did."""
    _replaced.append((owner, name, owner.__dict__.get(name, _MISSING)))
    setattr(owner, name, value)


def install(listener: Listener) -> None:
    """Puts all wrappers in."""
    import torch

    _optimizers(torch, listener)
    _loaders(torch, listener)
    _gradients(torch, listener)
    _schedulers(torch, listener)
    _scalers(torch, listener)
    _reductions(torch, listener)
    _ports(torch)
    replace(torch, "save", _saving(torch.save, listener))


def uninstall() -> None:
    """Takes wrappers and hooks out. Not from within an optimizer's step: torch is going through its hooks then."""
    unwrap()
    while _hooks:
        _hooks.pop().remove()


def unwrap() -> None:
    """Puts back what was replaced, last first; the hooks stay, and their listener may do nothing."""
    while _replaced:
        owner, name, value = _replaced.pop()
        if value is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, value)


def _in_phase(function: Callable[..., Any], listener: Listener, phase: str) -> Callable[..., Any]:
    index, clock = phase_index(phase), listener.clock

    @functools.wraps(function)
    def in_phase(*args: Any, **kwargs: Any) -> Any:
        clock.push(index)
        try:
            return function(*args, **kwargs)
        finally:
            clock.pop()

    return in_phase


def _saving(function: Callable[..., Any], listener: Listener) -> Callable[..., Any]:
    @functools.wraps(function)
    def save(*args: Any, **kwargs: Any) -> Any:
        listener.saved()
        return function(*args, **kwargs)

    return save


def _optimizers(torch: Any, listener: Listener) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    index, clock = phase_index("optimizer"), listener.clock

    def pre(optimizer: Any, args: Any, kwargs: Any) -> None:
        listener.before_step(optimizer)
        clock.push(index)

    def post(optimizer: Any, args: Any, kwargs: Any) -> None:
        clock.pop()
        listener.after_step(optimizer)

    _hooks.extend([register_optimizer_step_pre_hook(pre), register_optimizer_step_post_hook(post)])
    replace(torch.optim.Optimizer, "zero_grad", _in_phase(torch.optim.Optimizer.zero_grad, listener, "optimizer"))
    replace(torch.nn.Module, "zero_grad", _in_phase(torch.nn.Module.zero_grad, listener, "optimizer"))


def _loaders(torch: Any, listener: Listener) -> None:
    base = torch.utils.data.dataloader._BaseDataLoaderIter
    start, following = base.__init__, base.__next__
    index, clock = phase_index("data wait"), listener.clock

    @functools.wraps(start)
    def __init__(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        start(self, loader, *args, **kwargs)
        self._bareloop_loader = loader

    @functools.wraps(following)
    def __next__(self: Any) -> Any:
        clock.push(index)
        try:
            batch = following(self)
        finally:
            clock.pop()
        return listener.loaded(self.__dict__.get("_bareloop_loader"), batch)

    replace(base, "__init__", __init__)
    replace(base, "__next__", __next__)


def _gradients(torch: Any, listener: Listener) -> None:
    inner = _in_phase(torch.autograd.backward, listener, "backward")

    @functools.wraps(torch.autograd.backward)
    def backward(tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        listener.backward(tensors if tensors is not None else kwargs.get("tensors"))
        if tensors is None:
            return inner(*args, **kwargs)
        return inner(tensors, *args, **kwargs)

    replace(torch.autograd, "backward", backward)
    replace(torch.autograd, "grad", _in_phase(torch.autograd.grad, listener, "backward"))
    for name, kind in (("clip_grad_norm_", "norm"), ("clip_grad_value_", "value")):
        wrapped = _clip(getattr(torch.nn.utils, name), listener, kind)
        replace(torch.nn.utils, name, wrapped)
        replace(torch.nn.utils.clip_grad, name, wrapped)
    if hasattr(torch.nn.utils, "clip_grads_with_norm_"):  # torch 2.6; clip_grad_norm_ does not go through it
        replace(torch.nn.utils, "clip_grads_with_norm_", _scale(torch.nn.utils.clip_grads_with_norm_, listener))


def _clip(function: Callable[..., Any], listener: Listener, kind: str) -> Callable[..., Any]:
    limit = "max_norm" if kind == "norm" else "clip_value"
    inner = _in_phase(function, listener, "clip")

    @functools.wraps(function)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if kind == "norm" and clip_override is not None:
            return clip_override(parameters, *args, **kwargs)
        norm = inner(parameters, *args, **kwargs)
        listener.clipped(kind, args[0] if args else kwargs[limit], norm)
        return norm

    return clip


def _scale(function: Callable[..., Any], listener: Listener) -> Callable[..., Any]:
    """A clip to a norm that was computed before."""
    inner = _in_phase(function, listener, "clip")

    @functools.wraps(function)
    def scale(parameters: Any, max_norm: float, total_norm: Any, *args: Any, **kwargs: Any) -> None:
        if clip_override is not None:
            clip_override(parameters, max_norm)
            return
        inner(parameters, max_norm, total_norm, *args, **kwargs)
        listener.clipped("norm", max_norm, total_norm)

    return scale


def _schedulers(torch: Any, listener: Listener) -> None:
    schedulers = torch.optim.lr_scheduler
    index, clock = phase_index("scheduler"), listener.clock

    def wrap(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def scheduler_step(self: Any, *args: Any, **kwargs: Any) -> Any:
            clock.push(index)
            try:
                return step(self, *args, **kwargs)
            finally:
                clock.pop()

        return scheduler_step

    for kind in {kind for kind in vars(schedulers).values() if isinstance(kind, type)}:
        if issubclass(kind, schedulers.LRScheduler) and "step" in kind.__dict__:
            replace(kind, "step", wrap(kind.__dict__["step"]))


def _scalers(torch: Any, listener: Listener) -> None:
    kind = torch.amp.GradScaler
    scale, step = kind.scale, kind.step

    @functools.wraps(scale)
    def scaled(self: Any, outputs: Any) -> Any:
        listener.scaled(self)
        return scale(self, outputs)

    @functools.wraps(step)
    def stepped(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        calls = _step_calls(optimizer)
        result = step(self, optimizer, *args, **kwargs)
        if _step_calls(optimizer) == calls:
            listener.after_step(optimizer, skipped=True)
        return result

    def _step_calls(optimizer: Any) -> int:
        inner = getattr(optimizer, "optimizer", optimizer)
        return getattr(listener, "calls", {}).get(id(inner), 0)

    replace(kind, "scale", scaled)
    replace(kind, "step", stepped)


def _reductions(torch: Any, listener: Listener) -> None:
    """Gradients that the loop reduces by hand. What DDP and FSDP reduce overlaps backward and is part of it."""
    if not torch.distributed.is_available():
        return
    distributed = torch.distributed

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        timed = _in_phase(function, listener, "gradient reduction")

        @functools.wraps(function)
        def reduction(*args: Any, **kwargs: Any) -> Any:
            return (timed if listener.gradients_ready else function)(*args, **kwargs)

        return reduction

    for name in ("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor"):
        if hasattr(distributed, name):
            wrapped = wrap(getattr(distributed, name))
            replace(distributed, name, wrapped)
            replace(distributed.distributed_c10d, name, wrapped)


def watch_transfers(listener: Listener) -> None:
    """Times copies of host tensors to the device, once the script is known to train on one."""
    import torch

    for name in ("to", "cuda"):
        original = getattr(torch.Tensor, name)
        replace(torch.Tensor, name, _transfer(original, _in_phase(original, listener, "transfer")))


def _transfer(original: Callable[..., Any], timed: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def transfer(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (original if self.is_cuda else timed)(self, *args, **kwargs)

    return transfer


def _ports(torch: Any) -> None:
    """Two launches of a script that names its own rendezvous port must be able to live side by side."""
    port = os.environ.get("BARELOOP_MASTER_PORT")
    if not port or "TORCHELASTIC_RUN_ID" in os.environ or not torch.distributed.is_available():
        return
    start = torch.distributed.init_process_group

    @functools.wraps(start)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        if "MASTER_PORT" in os.environ:
            os.environ["MASTER_PORT"] = port
        method = kwargs.get("init_method")
        if isinstance(method, str) and method.startswith("tcp://") and ":" in method[6:]:
            kwargs["init_method"] = f"{method.rsplit(':', 1)[0]}:{port}"
        return start(*args, **kwargs)

    replace(torch.distributed, "init_process_group", init_process_group)
    replace(torch.distributed.distributed_c10d, "init_process_group", init_process_group)
