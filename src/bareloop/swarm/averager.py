"""Gradient accumulation at native cost, and honest rounds, for the users of `hivemind.Optimizer`.

    opt = hivemind.Optimizer(..., grad_averager_factory=native_averager())          # the whole change
    opt = hivemind.Optimizer(..., **hivemind_defaults())                            # with deadlines of seconds

The loop stays as it is: `opt.zero_grad(); loss.backward(); opt.step()`. hivemind 1.1.12 adds every gradient to a second
copy in `opt.step()`, one operator a tensor (76 ms a step for GPT-2 small on one core); here autograd's own add is the
accumulation, into a flat buffer, and `opt.step()` only counts (0.3 ms at any size). The price is a hook on each parameter,
2 us a backward, that puts the buffer's view into `param.grad`. Between backward passes the gradient is sealed: zeroing it
does nothing, and clipping or unscaling it raises at that line, since it is a part of a sum.

What a round applies: the mean over its samples, and after a failed round this peer's own mean, where upstream divides by
the number of micro-batches (1.6 to 1.8 times too large when they grow) and applies zeros after a failure. Micro-batches of one
size need nothing more. Others are weighted before backward, `with opt.grad_averager.micro_batch(n): loss.backward()`, or
at the end with `native_averager(compat=True)`, which keeps a second copy and takes one fused add a step.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from hivemind.averaging.control import StepControl
from hivemind.compression import Uniform8BitQuantization
from hivemind.compression.quantization import Quantization
from hivemind.optim.grad_averager import GradientAverager
from torch import Tensor

from bareloop.swarm.allreduce import WholeAverager
from bareloop.swarm.hivemind_options import mend_8bit
from bareloop.swarm.running_sum import RunningSum

__all__ = ["NativeAverager", "hivemind_defaults", "native_averager"]

_log = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of parameters: hivemind averages, and its offloaded optimizers step, in float32."""


def native_averager(*, compat: bool = False) -> Callable[..., "NativeAverager"]:
    """A factory for `hivemind.Optimizer(grad_averager_factory=...)`; all peers of the run must use it.

    `reuse_grad_buffers=True` is needed with `hivemind.GradScaler` only, and then forbids `opt.zero_grad()` as upstream does.

    Args:
        compat: let each micro-batch's gradient be clipped, unscaled and zeroed by itself, as upstream does: it is added in
            one fused operator in `opt.step()`, and the gradients take twice the memory.
    """

    def build(**kwargs: Any) -> NativeAverager:
        return NativeAverager(compat=compat, **kwargs)

    return build


def hivemind_defaults(*, transfer_s: float = 2.0) -> dict[str, Any]:
    """Arguments for `hivemind.Optimizer` that let survivors of a lost peer step again within ten seconds.

    Upstream's own (matchmaking 15 s, averaging 60 s, records of dead peers kept for 60 s) leave them waiting for minutes. A
    slower network needs more: `transfer_s` is what an all-reduce of the gradients and one of the parameters may take.

    Args:
        transfer_s: seconds; twice the measured time of an all-reduce is enough.

    Raises:
        ValueError: transfer_s is not above 0.
    """
    if not transfer_s > 0:
        raise ValueError(f"transfer_s={transfer_s!r}: must be the seconds that an all-reduce may take, above 0")
    return {
        "grad_averager_factory": native_averager(),
        "matchmaking_time": 1.5,  # a group forms when nobody new has come for this long
        "averaging_timeout": 4.5 + transfer_s,  # a search, an attempt that fails, and another search
        "next_chunk_timeout": max(2.0, transfer_s),  # silence of a groupmate that fails the attempt
        "tracker_opts": {"metadata_expiration": 5.0, "max_refresh_period": 2.0, "default_refresh_period": 1.0},
        "averager_opts": {"request_timeout": 1.0},  # upstream hands these to the state's averager only
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class _Round:
    """A round that was begun: its own mean is in the averaged tensors, until the group's is."""

    control: StepControl
    samples: int
    began_s: float
    means: int
    """Means that the averager had made when it began."""


class NativeAverager(WholeAverager, GradientAverager):
    """A `hivemind.optim.grad_averager.GradientAverager` whose gradients accumulate in flat buffers.

    A round gives up when it takes 3 times as long as the rounds before, but never earlier than two searches for a group
    take, nor later than hivemind's own timeout, which is also the limit until a round has been measured; after a round that
    gave up the limit doubles.

    Args:
        parameters: hivemind's main parameters; frozen ones are averaged as zeros, as upstream does.
        dht, prefix, **kwargs: see `hivemind.averaging.DecentralizedAverager`.
        compat: see `native_averager`.
        reuse_grad_buffers: the user calls neither zero_grad nor clip; hivemind.GradScaler is let through to the sum.

    Raises:
        ValueError: an option that is not supported, or parameters that are not plain float32, bfloat16 or float16 tensors.
    """

    _parent_pid = None  # upstream's __del__ reads it also when __init__ refused

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        dht: Any,
        prefix: str,
        compat: bool = False,
        reuse_grad_buffers: bool = False,
        **kwargs: Any,
    ) -> None:
        parameters = tuple(parameters)
        _refuse(parameters, compat, reuse_grad_buffers, kwargs)
        matchmaking_s = kwargs.setdefault("min_matchmaking_time", 5.0)
        kwargs.setdefault("request_timeout", min(3.0, matchmaking_s / 1.5))  # above it, matchmaking can deadlock
        self._sum = RunningSum(parameters, compat=compat, scaled=reuse_grad_buffers)
        self._patience = _Patience(least_s=2 * matchmaking_s + kwargs["request_timeout"])
        self._round: _Round | None = None
        # True: upstream then makes no accumulators of its own.
        super().__init__(
            parameters,  # pyright: ignore[reportArgumentType]
            dht=dht,
            prefix=prefix,
            reuse_grad_buffers=True,
            averaged_grads=self._sum.host_views,
            **kwargs,
        )
        self.reuse_grad_buffers = reuse_grad_buffers
        self._sum.pin()

    def run(self) -> None:
        mend_8bit()
        super().run()

    def _grads_from_parameters(self) -> Iterator[Tensor]:
        """Tensors of the gradients' sizes; upstream would make gradients where there are none."""
        return iter(self.parameters)

    def _grad_accumulators(self) -> Iterator[Tensor]:
        return iter(self._sum.views)

    @contextlib.contextmanager
    def micro_batch(self, count: int) -> Iterator[None]:
        """A block whose backward passes belong to a micro-batch of `count` samples, and weigh that much.

        `opt.step(batch_size=...)` after it must say the same number, or the sum where several blocks went before it.

        Raises:
            ValueError: count is not a whole number above 0.
            RuntimeError: inside another block.
        """
        with self._sum.micro_batch(count):
            yield

    def accumulate_grads_(self, batch_size: int) -> None:
        """Counts the backward passes since the last call as `batch_size` samples; called by `opt.step`.

        Raises:
            ValueError: it contradicts micro_batch(), or differs from the round's others without one; the round is then
                dropped, since its sum can't be told apart from the gradient that was added with a wrong weight.
            RuntimeError: a backward pass failed halfway, or something else changed the sum.
        """
        try:
            self._sum.count(batch_size)
        except ValueError:
            if self._sum.anchor is None:  # dropped
                self.local_samples_accumulated = self.local_times_accumulated = 0
            raise
        self.local_samples_accumulated += batch_size
        self.local_times_accumulated += 1

    def reset_accumulated_grads_(self) -> None:
        """Drops the sum and its samples."""
        self._accumulators_used_in_step = False
        self.local_samples_accumulated = self.local_times_accumulated = 0
        self._sum.reset()

    def step(
        self,
        weight: float | None = None,
        reset_accumulators: bool = True,
        control: StepControl | None = None,
        timeout: float | None = None,
        wait: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Averages with peers, weighted by samples; see `GradientAverager.step`, whose arguments it takes.

        After a failure the averaged gradients are this peer's own mean.
        """
        if control is None:
            control = self.schedule_step(timeout=timeout, **kwargs)
        elif kwargs:
            raise ValueError(
                f"{sorted(kwargs)} have no effect on a round that was scheduled; give them to schedule_step()"
            )
        if control.triggered:
            raise RuntimeError("this round was begun before: a StepControl is good for one")
        if self._round is not None:
            self._end_round()
        self.load_accumulators_into_averager_()
        samples = self.local_samples_accumulated
        control.weight = samples if weight is None else weight
        self._round = _Round(control=control, samples=samples, began_s=time.monotonic(), means=self.means)
        control.allow_allreduce()
        if reset_accumulators:
            self.reset_accumulated_grads_()
        self._sum.show()  # an optimizer that isn't offloaded gets the mean in param.grad
        self._new_averaged_grads = True
        self._patience.watch(control)
        return control.result(timeout) if wait else control

    def load_accumulators_into_averager_(self) -> None:
        """Brings this peer's mean into the averaged gradients; in a round that failed it is there already."""
        if self._round is not None:
            self._settle(self._round)
            return
        with self._locked():
            self._sum.load(self.local_samples_accumulated)
        self._sum.show()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """A block in which the averager's process leaves the averaged gradients alone."""
        while not self.lock_averaged_tensors.acquire(timeout=1.0):
            if not self.is_alive():
                raise RuntimeError("the averager's process died in the middle of a round: restart this peer")
        try:
            yield
        finally:
            self.lock_averaged_tensors.release()

    def _settle(self, begun: _Round) -> None:
        """Ends a round whose result hivemind could not have, and says what is in the averaged gradients."""
        if not begun.control.done():
            begun.control.cancel()
        with self._locked():  # an attempt under way ends first
            arrived = self.means > begun.means
        if arrived:
            _log.warning("The round took too long, but its mean arrived: stepping with the mean of the group")
        else:
            _log.warning(
                "The round failed: stepping with this peer's own mean, over its %d samples, without the other peers",
                begun.samples,
            )

    def notify_used_averaged_gradients(self) -> None:
        """Called by hivemind when the averaged gradients are in the optimizer."""
        super().notify_used_averaged_gradients()
        if self._round is not None:
            self._end_round()

    def _end_round(self) -> None:
        begun, self._round = self._round, None
        assert begun is not None
        if not begun.control.done():
            begun.control.cancel()
        elif not begun.control.cancelled() and begun.control.exception() is None:
            self._patience.took(time.monotonic() - begun.began_s)
        self._patience.unwatch()

    def shutdown(self) -> None:
        """Ends the averager's process and gives `param.grad` back to PyTorch."""
        self._patience.unwatch()
        self._sum.release()
        super().shutdown()


class _Patience:
    """How long a round may take from its beginning, by what rounds took before."""

    def __init__(self, *, least_s: float) -> None:
        self._least_s = least_s
        self._usual_s: float | None = None
        self._backoff = 1.0
        self._timer: threading.Timer | None = None

    @property
    def limit_s(self) -> float | None:
        """None until a round was measured."""
        return None if self._usual_s is None else self._backoff * max(self._least_s, 3 * self._usual_s)

    def took(self, round_s: float) -> None:
        self._usual_s = round_s if self._usual_s is None else 0.7 * self._usual_s + 0.3 * round_s
        self._backoff = 1.0

    def watch(self, control: StepControl) -> None:
        if self.limit_s is None:
            return
        self._timer = threading.Timer(self.limit_s, self._give_up, [control])
        self._timer.daemon = True
        self._timer.start()

    def unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self, control: StepControl) -> None:
        if not control.done():
            _log.warning("The round took %.1f s, several times the usual: giving it up", self.limit_s)
            self._backoff *= 2
            control.cancel()


def _refuse(parameters: tuple[Tensor, ...], compat: bool, reuse: bool, options: dict[str, Any]) -> None:
    """Raises ValueError for what is not supported."""
    for name in ("accumulate_grads_on", "averaged_grads", "averager_rank"):
        if options.pop(name, None) is not None:
            reason = (
                "PowerSGD has an averager of its own"
                if name == "averager_rank"
                else "the sum lies beside the parameters"
            )
            raise ValueError(f"{name} is not supported by native_averager() ({reason}): leave it out")
    if compat and reuse:
        raise ValueError(
            "reuse_grad_buffers=True with native_averager(compat=True): compat is for loops that zero their gradients."
            " Leave one of them out"
        )
    codec = options.get("compression")
    if isinstance(codec, Quantization):
        way = "take SizeAdaptiveCompression(threshold=65536, less=NoCompression(), greater_equal=Uniform8BitQuantization())"
        if not isinstance(codec, Uniform8BitQuantization):
            raise ValueError(
                f"grad_compression={type(codec).__name__}: hivemind can't read it back with numpy 2.4; {way}"
            )
        if any(parameter.numel() == 1 for parameter in parameters):
            raise ValueError(
                f"grad_compression={type(codec).__name__} divides by zero on a parameter of one element; {way}"
            )
    for parameter in parameters:
        if parameter.dtype not in _DTYPES:
            raise ValueError(
                f"params holds one of dtype {parameter.dtype}: hivemind averages in float32. Convert it, or leave it out"
            )
        if type(parameter) not in (Tensor, torch.nn.Parameter):
            raise ValueError(
                f"params holds a {type(parameter).__name__}: only plain tensors can be accumulated in a flat buffer; sharded"
                " models (DTensor) are not supported"
            )
