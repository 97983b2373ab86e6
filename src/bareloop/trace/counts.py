"""What a process did per step, counted in windows of their own, where nothing is timed."""

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Builtin", "Collective", "Copy", "Counts", "FunctionCount", "HostRead"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRead:
    """A tensor's value read into Python (`.item()`, `bool(t)`, `nonzero`), by call site."""

    location: str
    """file:line of the nearest frame outside torch."""
    function: str
    """Name of the function that holds the line."""
    source: str
    """Text of the expression that read, "" when the source is not at hand."""
    kind: str
    """"nan_check" (the expression tests isnan / isinf / isfinite), "value" (a number is read),
    "optimizer" (torch.optim's own step counters: host tensors, no wait on any device), "reducer" (C++ code below
    backward: DistributedDataParallel's bitmap of unused parameters)."""
    per_step: float
    phase: str
    in_user_code: bool = True
    """False when the line belongs to an installed package."""
    in_every_step: bool = True
    """False when it was missing in a step of the window: then it is done now and then, not per step."""
    op: str = ""
    """aten op that did the read: _local_scalar_dense, nonzero, ..."""
    device: str = ""
    """Type of the device that held the value; nothing waits for a read of "cpu" in a run on another device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """Collective communication, by kind."""

    op: str
    per_step: float
    bytes_per_step: float | None
    phase: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """Copies between devices (or of one device onto itself with another dtype), by direction."""

    direction: str
    """"host to device", "device to host", "device to device", "cast"."""
    per_step: float
    bytes_per_step: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionCount:
    """Calls of one Python function per step."""

    file: str
    line: int
    """First line of the function."""
    function: str
    """Qualified name, as in Class.method."""
    per_step: float
    caller: str = ""
    """file:line of the most frequent call site outside torch, "" when not recorded."""
    in_every_step: bool = True
    """False when it was missing in a step of the window: then it is done now and then, not per step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Builtin:
    """Calls of one C function (`print`, `write`, `flush`, `numel`) from one call site per step."""

    name: str
    location: str
    function: str
    per_step: float
    source: str = ""
    in_every_step: bool = True
    """False when it was missing in a step of the window: then it is done now and then, not per step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """One process's counts per step, from counting windows."""

    steps: int
    """Steps in each counting window."""
    micro_steps_per_step: float
    ops_per_step: float | None
    """aten operators, those that operators call inside themselves included, backward's too; None when not counted."""
    ops_by_phase: Mapping[str, float]
    python_calls_per_step: float | None
    """Python function calls (C functions not counted); None when a debugger or tracer of the user's was in the way."""
    python_calls_by_phase: Mapping[str, float]
    modules: int = 0
    """Modules in the trained model's tree."""
    module_train_calls_per_step: float = 0.0
    """Calls of Module.train, recursion counted."""
    module_train_in_every_step: bool = True
    """False when a step of the window had none: after an evaluation only, not per step."""
    host_reads: tuple[HostRead, ...] = ()
    collectives: tuple[Collective, ...] = ()
    copies: tuple[Copy, ...] = ()
    matmul_dtypes: Mapping[str, float] = field(default_factory=dict[str, float])
    """dtype -> matrix products and convolutions per step in fact run in it."""
    functions: tuple[FunctionCount, ...] = ()
    """Functions called at least once per step; the most frequent, and every one on the watch list."""
    builtins: tuple[Builtin, ...] = ()

    @property
    def host_reads_per_step(self) -> float:
        """Host reads per step without the optimizer's own step counters."""
        return sum(read.per_step for read in self.host_reads if read.kind != "optimizer")
