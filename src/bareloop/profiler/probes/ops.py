"""Operators that a step issues: host reads by line, collectives and copies with bytes, dtypes of matrix products.

Seen by a dispatch mode at the bottom of the mode stack: below autograd and autocast, in the forward, in backward and
in what C++ issues (the reducer's all-reduce). What an operator calls inside itself is not seen here; the number of
operators including those is the other window's (`operators.py`), because a mode doubles some of them.
Compiled regions stay compiled: only the operators that they call outside their kernels are seen.
"""

import functools
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from bareloop.profiler.probes.collectives import collective_name, largest_side_bytes
from bareloop.profiler.probes.every_step import EveryStep
from bareloop.profiler.probes.lifetime import Lifetime
from bareloop.profiler.probes.sites import Site, caller_outside_torch, expression, site_at
from bareloop.profiler.probes.transfers import COPIES, READS, Transfer, copies_of
from bareloop.trace import Collective, Copy, HostRead

__all__ = ["OpsFacts", "OpsWindow"]

_MATMULS = re.compile(
    r"aten::(?:mm|addmm|bmm|baddbmm|addbmm|mv|addmv|dot|_scaled_mm|_int_mm|_grouped_mm|_scaled_grouped_mm"
    r"|_addmm_activation|\w*convolution(?:_backward|_transpose)?|_cudnn_rnn(?:_backward)?|mkldnn_rnn_layer(?:_backward)?"
    r"|_scaled_dot_product_\w*attention\w*|_(?:flash|efficient)_attention_(?:forward|backward))"
)
_NAN_TEST = re.compile(r"\b(?:is_?nan|is_?inf|is_?finite|isneginf|isposinf)\b")
_BOOKKEEPING = ("profiler", "prim")


@dataclass(frozen=True, kw_only=True, slots=True)
class OpsFacts:
    """What a window of `OpsWindow` saw, per step."""

    issued_per_step: float
    """Operators that Python, autograd and C++ issued, not counting those that operators call inside themselves."""
    issued_by_phase: Mapping[str, float]
    host_reads: tuple[HostRead, ...]
    """Most frequent first."""
    collectives: tuple[Collective, ...]
    copies: tuple[Copy, ...]
    matmul_dtypes: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Operator:
    """What is decided about an operator once: its name and which counts it goes to."""

    name: str
    bookkeeping: bool
    collective: str | None
    read: Callable[[Sequence[Any], dict[str, Any]], Any] | None
    copies: bool
    matmul: bool


@functools.cache
def _operator(func: Any) -> _Operator:
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher-order operator (cond, flex_attention): counted as one
        return _Operator(str(func), False, None, None, False, False)
    name, overload = schema.name, f"{schema.name}.{schema.overload_name}"
    namespace, _, short = name.partition("::")
    read = READS.get(overload) or READS.get(name)
    collective = collective_name(namespace, short)
    return _Operator(
        name, namespace in _BOOKKEEPING, collective, read, name in COPIES, _MATMULS.fullmatch(name) is not None
    )


class OpsWindow:
    """Counts operators between `start()` and `stop()`, both called in the training thread at step boundaries.

    `phase()` is asked at each operator for the phase that it belongs to. Training's results stay bit-equal.
    """

    def __init__(self, phase: Callable[[], str]) -> None:
        self._phase = phase
        self._lifetime = Lifetime("OpsWindow", close=self._close)
        self._mode: Any = None
        self._failure: str = ""
        self._issued: Counter[str] = Counter()
        self._reads: Counter[tuple[Site, str, str, str, str]] = Counter()
        self._collectives: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
        self._copies: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
        self._matmuls: Counter[str] = Counter()
        self._every_step = EveryStep(self._reads)

    def start(self) -> None:
        """Begins to count in this thread and in the backward passes that it starts.

        Raises:
            RuntimeError: the window was started before.
        """
        self._lifetime.start()
        self._mode = _watching_mode()(self._observe)
        _insert_below_script_modes(self._mode)

    def step_ended(self) -> None:
        """Marks a step boundary within the window."""
        self._every_step.mark()

    def stop(self) -> None:
        """Ends counting and takes the mode off the stack, wherever on it the mode is by now.

        Raises:
            RuntimeError: the window is not open, or another thread started it.
        """
        self._lifetime.stop()

    def result(self, steps: int) -> OpsFacts:
        """The counts divided by the `steps` optimizer steps that ran in the window.

        Raises:
            ValueError: steps is below one.
            RuntimeError: the window is still open, or counting broke off; training went on undisturbed.
        """
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        self._lifetime.require_stopped()
        if self._failure:
            raise RuntimeError(f"operators were not counted to the end: {self._failure}")
        collectives = sorted(self._collectives.items(), key=lambda item: (-item[1][0], item[0]))
        copies = sorted(self._copies.items(), key=lambda item: (-item[1][0], item[0]))
        return OpsFacts(
            issued_per_step=self._issued.total() / steps,
            issued_by_phase={phase: count / steps for phase, count in self._issued.items()},
            host_reads=tuple(
                _host_read(*key, per_step=count / steps, in_every_step=self._every_step.grew(self._reads, key))
                for key, count in self._reads.most_common()
            ),
            collectives=tuple(
                Collective(op=op, per_step=calls / steps, bytes_per_step=size / steps, phase=phase)
                for (op, phase), (calls, size) in collectives
            ),
            copies=tuple(
                Copy(direction=direction, per_step=calls / steps, bytes_per_step=size / steps)
                for direction, (calls, size) in copies
            ),
            matmul_dtypes={dtype: count / steps for dtype, count in self._matmuls.items()},
        )

    def _close(self) -> None:
        if not _remove(self._mode):
            # Someone restored this thread's state to what it was before start(), e.g. start() ran inside backward.
            self._failure = self._failure or "the dispatch mode was gone before the window ended"

    def _observe(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        if self._failure:
            return
        try:
            self._count(_operator(func), args, kwargs, result)
        except Exception as error:  # never into the user's step: it is raised by result()
            self._failure = f"{type(error).__name__} at {func}: {error}"

    def _count(self, operator: _Operator, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        if operator.bookkeeping:
            return
        phase = self._phase()
        self._issued[phase] += 1
        if operator.collective is not None:
            entry = self._collectives[operator.collective, phase]
            entry[0] += 1
            # A barrier's tensor only says which device waits.
            entry[1] += 0 if operator.collective == "barrier" else largest_side_bytes([*args, result])
        if operator.matmul:
            self._matmuls[str(_tensor_dtype(args)).removeprefix("torch.")] += 1
        if operator.read is not None and (tensor := operator.read(args, kwargs)) is not None:
            self._read(operator.name, tensor.device.type, phase)
        if operator.copies:
            for transfer in copies_of(operator.name, args, kwargs, result):
                self._copied(operator.name, transfer, phase)

    def _copied(self, operator: str, transfer: Transfer, phase: str) -> None:
        entry = self._copies[transfer.direction]
        entry[0] += 1
        entry[1] += transfer.bytes
        if transfer.waits:
            self._read(operator, transfer.source_device, phase)

    def _read(self, operator: str, device: str, phase: str) -> None:
        frame, passed = caller_outside_torch(sys._getframe())
        if frame is None:  # an autograd device thread: its caller waits in the thread that called backward
            frame, passed = caller_outside_torch(sys._current_frames().get(self._lifetime.thread or 0))
        site = site_at(frame)
        texts = [site.source, *(expression(inner) for inner in _without_dispatch(passed)[:1])]
        kind = _kind(operator, passed, texts)
        self._reads[site, kind, operator.partition("::")[2], device, phase] += 1


def _host_read(
    site: Site, kind: str, op: str, device: str, phase: str, *, per_step: float, in_every_step: bool
) -> HostRead:
    return HostRead(
        location=site.location,
        function=site.function,
        source=site.source,
        kind=kind,
        per_step=per_step,
        phase=phase,
        in_user_code=site.in_user_code,
        op=op,
        device=device,
        in_every_step=in_every_step,
    )


def _kind(operator: str, passed: Sequence[FrameType], texts: Sequence[str]) -> str:
    """Whose read it is: see `HostRead.kind`."""
    files = [_inside_torch(frame) for frame in _without_dispatch(passed)]
    if operator == "aten::_local_scalar_dense" and files and files[0] == "autograd/graph.py":
        return "reducer"  # issued by C++ below the autograd engine, no Python in between
    if files and all(file.startswith("optim/") and not file.startswith("optim/lbfgs") for file in files):
        return "optimizer"
    return "nan_check" if any(_NAN_TEST.search(text) for text in texts) else "value"


def _without_dispatch(frames: Sequence[FrameType]) -> list[FrameType]:
    """torch's frames without those that only carry a call on: our own mode's entry and decorators."""
    carriers = ("utils/_contextlib.py", "utils/_python_dispatch.py", "_compile.py", "_dynamo/", "_ops.py")
    return [frame for frame in frames if not _inside_torch(frame).startswith(carriers)]


def _inside_torch(frame: FrameType) -> str:
    return frame.f_code.co_filename.replace("\\", "/").rpartition("/torch/")[2]


def _tensor_dtype(args: Sequence[Any]) -> Any:
    import torch

    return next(argument.dtype for argument in args if isinstance(argument, torch.Tensor))


@functools.cache
def _watching_mode() -> Any:
    """The class of our dispatch mode; made on first use because its base class needs torch."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    plain = (torch.Tensor, torch.nn.Parameter)

    class WatchingMode(TorchDispatchMode):
        supports_higher_order_operators = True

        def __init__(self, observe: Callable[[Any, Sequence[Any], dict[str, Any], Any], None]) -> None:
            super().__init__()
            self._observe = observe

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(kind not in plain for kind in types):
                # A tensor subclass (DTensor) first turns the call into operators on plain tensors: those come here.
                return NotImplemented
            kwargs = kwargs or {}
            result = func(*args, **kwargs)
            self._observe(func, args, kwargs, result)
            return result

    return WatchingMode


def _insert_below_script_modes(mode: Any) -> None:
    """Puts `mode` under the modes the script has on: it may leave those before we leave ours.

    The stack is written directly, without TorchDispatchMode.__enter__: that also raises flags which make inductor
    run compiled regions in another way.
    """
    from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode, _push_mode

    above = []
    while (top := _get_current_dispatch_mode()) is not None and not hasattr(top, "_mode_key"):
        above.append(_pop_mode())
    for entry in [mode, *reversed(above)]:
        _push_mode(entry)


def _remove(mode: Any) -> bool:
    """Takes `mode` off this thread's stack and leaves all others on; False when it is not on it."""
    from torch._C import _get_dispatch_stack_at, _len_torch_dispatch_stack
    from torch.utils._python_dispatch import _pop_mode, _push_mode

    if not any(_get_dispatch_stack_at(index) is mode for index in range(_len_torch_dispatch_stack())):
        return False
    above = []
    while (top := _pop_mode()) is not mode:
        above.append(top)
    for entry in reversed(above):
        _push_mode(entry)
    return True
