"""The machine and the versions a run was observed on."""

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Environment"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """Where one process of the run ran."""

    python: str = ""
    torch: str = ""
    packages: Mapping[str, str] = field(default_factory=dict[str, str])
    """Version of each framework that the process had imported: transformers, accelerate, lightning, trl, peft, ..."""
    framework: str | None = None
    """Who owns the loop, seen on the stack at the step: "transformers", "lightning", "accelerate"; None: a plain loop."""
    device: str = "cpu"
    """Device type that the trained parameters live on: "cpu", "cuda", ..."""
    device_name: str = ""
    cores: int = 0
    threads: int = 0
    """torch.get_num_threads() at the first step."""
    interop_threads: int = 0
    loader_workers: int | None = None
    """num_workers of the loader that fed the training steps; None without a torch DataLoader."""
    prefetched_batches: int = 0
    """Batches that the loader's workers may hold ready: workers x prefetch_factor."""
    resident_bytes: int = 0
    """Resident memory of the process after the first steps."""
