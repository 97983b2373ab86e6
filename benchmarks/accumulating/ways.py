"""Ways to gather the gradients of micro-batches, each as what a user's loop does before forward and after backward.

hivemind's are its own `Optimizer` on a loopback DHT, with a target batch that is never reached: its `zero_grad`, its
`GradientAverager.accumulate_grads_` and its progress tracker run as they are. "1.1.6" is that version's loop on today's
code: `zero_grad` wrote zeros then, since `set_to_none` became the default one release later (hivemind 559).
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bareloop.swarm.accumulator import FlatAccumulator

__all__ = ["JOINED", "WAYS", "Way", "way"]

_NEVER = 10**12
"""Samples: a target batch that no round reaches."""
JOINED = ("hivemind", "torchft")
"""Timed and not counted: once a second a micro-step sends a record too, so they are not all alike."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """What a loop calls around the forward and backward of a micro-batch."""

    before: Callable[[], Any]
    after: Callable[[], Any]


def _nothing() -> None:
    """PyTorch's own accumulation takes no call."""


@contextmanager
def _alone(parameters: Sequence[Tensor], samples: int) -> Iterator[Way]:
    """No accumulation: each backward finds no gradient, what all extras are counted from."""

    def drop() -> None:
        for parameter in parameters:
            parameter.grad = None

    yield Way(before=drop, after=_nothing)


@contextmanager
def _native(parameters: Sequence[Tensor], samples: int) -> Iterator[Way]:
    yield Way(before=_nothing, after=_nothing)


@contextmanager
def _flat(parameters: Sequence[Tensor], samples: int, *, compat: bool) -> Iterator[Way]:
    accumulator = FlatAccumulator(parameters, compat=compat)
    block: Any = None

    def enter() -> None:
        nonlocal block
        block = accumulator.micro_batch(samples)
        block.__enter__()

    yield Way(before=enter, after=lambda: block.__exit__(None, None, None))
    accumulator.release()


@contextmanager
def _joined(parameters: Sequence[Tensor], samples: int, *, engine: str) -> Iterator[Way]:
    """A peer alone in a run whose round never ends, with what `steps` and Trainer ask of it in each micro-step."""
    from bareloop.swarm.door import join
    from bareloop.swarm.serve import ServeOptions, serving

    with ExitStack() as stack:
        peers: Sequence[str] = ()
        if engine == "torchft":
            peers = stack.enter_context(serving(ServeOptions(engine=engine, port=0))).addresses
        run = stack.enter_context(join("counted", target_batch=_NEVER, engine=engine, peers=peers))
        run.attach(nn.ParameterList(parameters), torch.optim.SGD(parameters, lr=0.1))
        block: Any = None

        def enter() -> None:
            nonlocal block
            block = run.micro_batch(samples)
            block.__enter__()

        def leave() -> None:
            block.__exit__(None, None, None)
            run.ready()

        yield Way(before=enter, after=leave)


@contextmanager
def _hivemind(
    parameters: Sequence[Tensor],
    samples: int,
    *,
    set_to_none: bool = True,
    zero: bool = True,
    **options: Any,
) -> Iterator[Way]:
    with _optimizer(parameters, samples, **options) as optimizer:
        before = partial(optimizer.zero_grad, set_to_none=set_to_none) if zero else _nothing
        yield Way(before=before, after=optimizer.step)


@contextmanager
def _told(parameters: Sequence[Tensor], samples: int) -> Iterator[Way]:
    """Native, and what every loop on hivemind pays beside it: its tracker is told of each micro-step, and tells the DHT."""
    with _optimizer(parameters, samples, reuse_grad_buffers=True) as optimizer:
        counted = itertools.count(samples, samples)
        yield Way(before=_nothing, after=lambda: optimizer.tracker.report_local_progress(0, next(counted)))


@contextmanager
def _own_averager(parameters: Sequence[Tensor], samples: int) -> Iterator[Way]:
    from bareloop.swarm.averager import native_averager

    with _hivemind(parameters, samples, grad_averager_factory=native_averager()) as found:
        yield found


@contextmanager
def _optimizer(parameters: Sequence[Tensor], samples: int, **options: Any) -> Iterator[Any]:
    """A `hivemind.Optimizer` that trains alone on loopback and accumulates for ever."""
    import hivemind

    dht = hivemind.DHT(host_maddrs=["/ip4/127.0.0.1/tcp/0"], nat_port_map=False, start=True)
    optimizer = None
    try:
        optimizer = hivemind.Optimizer(
            dht=dht,
            run_id="counted",
            target_batch_size=_NEVER,
            batch_size_per_step=samples,
            optimizer=torch.optim.SGD(parameters, lr=0.1),
            **options,
        )
        yield optimizer
    finally:
        if optimizer is not None:
            optimizer.shutdown()
        dht.shutdown()
        dht.join(10)


WAYS: Mapping[str, Callable[..., Any]] = {
    "alone": _alone,
    "native": _native,
    "told": _told,
    "default": _hivemind,
    "reuse": partial(_hivemind, reuse_grad_buffers=True, zero=False),
    "zeroing": partial(_hivemind, set_to_none=False),
    "ours": partial(_flat, compat=False),
    "compat": partial(_flat, compat=True),
    "averager": _own_averager,
    "hivemind": partial(_joined, engine="hivemind"),
    "torchft": partial(_joined, engine="torchft"),
}
"""`report.LABELS` says what they are."""


def way(name: str, parameters: Sequence[Tensor], samples: int) -> Any:
    """A context manager that enters with the `Way` of this name over `parameters`, whose gradients are dropped first."""
    for parameter in parameters:
        parameter.grad = None
    return WAYS[name](parameters, samples)
