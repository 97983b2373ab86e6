"""What surrounds the training loop: versions, framework, wrapper, optimizers, loader. Read at the first steps only.

Everything here is read off live objects. Frameworks are looked up in `sys.modules`: what the script did not import
is not imported for it.
"""

import contextlib
import dis
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

from bareloop.trace import Environment, Group, Optimizer

__all__ = [
    "LoaderFacts",
    "autocast_dtype",
    "frame_locals",
    "learning_rate",
    "loader_facts",
    "loader_shards",
    "observe_environment",
    "observe_optimizer",
    "observe_wrapper",
    "trainable_parameters",
    "trainer_on_stack",
    "unwrap_loader",
    "weight_decay",
]

_PACKAGES = {
    "transformers": "transformers",
    "accelerate": "accelerate",
    "lightning": "lightning",
    "pytorch_lightning": "pytorch-lightning",
    "trl": "trl",
    "peft": "peft",
    "datasets": "datasets",
    "tokenizers": "tokenizers",
    "deepspeed": "deepspeed",
    "hivemind": "hivemind",
    "torchft": "torchft",
    "torchtitan": "torchtitan",
    "torchvision": "torchvision",
    "torchdata": "torchdata",
    "timm": "timm",
    "bitsandbytes": "bitsandbytes",
    "flash_attn": "flash-attn",
    "numpy": "numpy",
    "tqdm": "tqdm",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}
_TRAINERS = {
    "transformers": (("transformers.trainer", "Trainer"),),
    "lightning": (
        ("lightning.pytorch.trainer.trainer", "Trainer"),
        ("pytorch_lightning.trainer.trainer", "Trainer"),
    ),
}
_INNER_LOADER = ("base_dataloader", "_dataloader", "_loader", "dataloader", "iterable")

_FUNCTION_FRAME = 0x1 | 0x2
_SNAPSHOT_IS_SHARED = sys.version_info < (3, 13)


class LoaderFacts(NamedTuple):
    """What a loader says of itself; None where it does not."""

    workers: int | None = None
    prefetched_batches: int = 0
    """Batches that the workers may hold ready."""
    batch_size: int | None = None
    """Samples per batch of this process."""
    dataset_size: int | None = None
    """Samples in the whole data set, all processes' shares together."""


def frame_locals(frame: FrameType) -> dict[str, Any]:
    """A copy of a frame's local variables that leaves no trace in the frame; empty when that can't be.

    Before Python 3.13 a frame keeps the snapshot made for `f_locals`, and with it every tensor that was local then:
    it is emptied. A function that calls `locals()` holds the same snapshot, so its frame is not read at all.
    """
    code = frame.f_code
    if not code.co_flags & _FUNCTION_FRAME:
        return dict(frame.f_locals)
    if _SNAPSHOT_IS_SHARED and _calls_locals(code):
        return {}
    snapshot = frame.f_locals
    copied = dict(snapshot)
    if _SNAPSHOT_IS_SHARED:
        snapshot.clear()
    return copied


def _calls_locals(code: CodeType) -> bool:
    if "locals" not in code.co_names:
        return False
    return any(step.argval == "locals" and step.opname == "LOAD_GLOBAL" for step in dis.get_instructions(code))


def observe_environment(parameters: Iterable[Any], loader: Any, frame: FrameType | None) -> Environment:
    """The machine, the versions and the owner of the loop.

    Args:
        parameters: the trained parameters; the first one's device is the run's.
        loader: the loader that fed the training steps, None without one.
        frame: the Python frame at which the optimizer stepped.
    """
    import torch

    first = next(iter(parameters), None)
    device = torch.device("cpu") if first is None else first.device
    loaded = loader_facts(loader)
    return Environment(
        python=platform.python_version(),
        torch=torch.__version__,
        packages=_versions(),
        framework=_framework(frame),
        device=device.type,
        device_name=_device_name(device),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 0),
        threads=torch.get_num_threads(),
        interop_threads=torch.get_num_interop_threads(),
        loader_workers=loaded.workers,
        prefetched_batches=loaded.prefetched_batches,
        resident_bytes=_resident_bytes(),
    )


def trainer_on_stack(frame: FrameType | None, framework: str) -> Any:
    """The innermost `self` on the stack that is a trainer of "transformers" (or a subclass) or of "lightning"."""
    kinds = tuple(
        kind
        for module, name in _TRAINERS[framework]
        if (kind := getattr(sys.modules.get(module), name, None)) is not None
    )
    if not kinds:
        return None
    for caller in _callers(frame):
        if "self" in caller.f_code.co_varnames[:1]:
            owner = frame_locals(caller).get("self")
            if isinstance(owner, kinds):
                return owner
            trainer = getattr(owner, "__dict__", {}).get("trainer")
            if isinstance(trainer, kinds):
                return trainer
    return None


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _framework(frame: FrameType | None) -> str | None:
    for name in _TRAINERS:
        if trainer_on_stack(frame, name) is not None:
            return name
    modules = {str(caller.f_globals.get("__name__", "")).partition(".")[0] for caller in _callers(frame)}
    if modules & {"lightning", "lightning_fabric"}:  # Fabric has no trainer
        return "lightning"
    return "accelerate" if "accelerate" in modules else None


def _versions() -> dict[str, str]:
    found = {}
    for module, package in _PACKAGES.items():
        if module in sys.modules:
            version = getattr(sys.modules[module], "__version__", None)
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # a source tree on the path
                version = importlib.metadata.version(package)
            found[package] = str(version or "unknown")
    return found


def _device_name(device: Any) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu" and os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
            return next(named, platform.machine())
    return platform.processor() or platform.machine()


def _resident_bytes() -> int:
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm", encoding="ascii") as fields:
            return int(fields.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kilobytes, but bytes on macOS
    return int(peak if sys.platform == "darwin" else peak * 1024)


def observe_wrapper(module: Any) -> str:
    """What spreads the model over devices: "none", "DataParallel", "DistributedDataParallel", ...

    The outermost wrapper wins; a DeepSpeed engine gives "DeepSpeedEngine".
    """
    kinds = [
        (label, kind)
        for name, attribute, label in (
            ("torch.nn.parallel", "DataParallel", "DataParallel"),
            ("torch.nn.parallel", "DistributedDataParallel", "DistributedDataParallel"),
            ("torch.distributed.fsdp", "FullyShardedDataParallel", "FullyShardedDataParallel"),
            ("torch.distributed.fsdp", "FSDPModule", "FSDP2"),
            ("deepspeed.runtime.engine", "DeepSpeedEngine", "DeepSpeedEngine"),
        )
        if isinstance(kind := getattr(sys.modules.get(name), attribute, None), type)
    ]
    for part in module.modules():
        for label, kind in kinds:
            if isinstance(part, kind):
                return label
    return "none"


def observe_optimizer(optimizer: Any, per_step: float) -> Optimizer:
    """The optimizer as it runs: `fused` and `foreach` are what its defaults resolve to on these parameters.

    Args:
        per_step: calls of its step per step of the run.
    """
    optimizer = _bare(optimizer)
    modes = {_mode(optimizer, group) for group in optimizer.param_groups}
    fused, foreach = modes.pop() if len(modes) == 1 else (None, None)
    groups = tuple(
        Group(
            learning_rate=float(group["lr"]) if "lr" in group else float("nan"),
            weight_decay=None if group.get("weight_decay") is None else float(group["weight_decay"]),
            tensors=len(group["params"]),
            elements=sum(_elements(parameter) for parameter in group["params"]),
        )
        for group in optimizer.param_groups
    )
    return Optimizer(name=type(optimizer).__name__, fused=fused, foreach=foreach, groups=groups, per_step=per_step)


def _mode(optimizer: Any, group: dict[str, Any]) -> tuple[bool | None, bool | None]:
    """(fused, foreach) in effect for a group: torch decides only when neither was asked for."""
    import torch

    if "foreach" not in group and "fused" not in group:
        return None, None
    fused, foreach = group.get("fused"), group.get("foreach")
    if fused is None and foreach is None:
        resolve: Callable[..., tuple[bool, bool]] | None = getattr(
            sys.modules[torch.optim.Optimizer.__module__], "_default_to_fused_or_foreach", None
        )
        if resolve is None:
            return None, None
        stepped = [parameter for parameter in group["params"] if parameter.requires_grad]
        fused, foreach = resolve(stepped, bool(group.get("differentiable", False)), use_fused=False)
        if isinstance(group.get("lr"), torch.Tensor) and not group.get("capturable", False):
            foreach = False
    has_fused = "fused" in group
    return (bool(fused) if has_fused else None), (bool(foreach) if "foreach" in group else None)


def _bare(optimizer: Any) -> Any:
    """The optimizer inside wrappers (accelerate's, a learning-rate library's) that keep it in `optimizer`."""
    for _ in range(4):
        inner = getattr(optimizer, "__dict__", {}).get("optimizer")
        if not hasattr(inner, "param_groups"):
            break
        optimizer = inner
    return optimizer


def weight_decay(optimizers: Iterable[Any]) -> float | tuple[float, ...] | None:
    """Weight decay of all groups when they agree, else one per group; None when no group has any notion of it."""
    return _per_group(optimizers, "weight_decay")


def learning_rate(optimizers: Iterable[Any]) -> float | tuple[float, ...] | None:
    """Learning rate now, one per group when they differ; None when no group has one."""
    return _per_group(optimizers, "lr")


def _per_group(optimizers: Iterable[Any], key: str) -> float | tuple[float, ...] | None:
    groups = (group for optimizer in optimizers for group in _bare(optimizer).param_groups)
    values = tuple(float(group[key]) for group in groups if group.get(key) is not None)
    if not values:
        return None
    return values[0] if len(set(values)) == 1 else values


def trainable_parameters(optimizers: Iterable[Any], module: Any = None) -> int | None:
    """Elements that the optimizers train, each tensor once, whole tensors where shards are known; None without any.

    Args:
        module: the model; FSDP1 with `use_orig_params` tells the size of what it has sharded nowhere else.
    """
    whole = {} if module is None else _sharded_sizes(module)
    unique: dict[int, int] = {}
    for optimizer in optimizers:
        for group in _bare(optimizer).param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    unique[id(parameter)] = whole.get(id(parameter), _elements(parameter))
    return sum(unique.values()) if unique else None


def _sharded_sizes(module: Any) -> dict[int, int]:
    """id -> elements of the parameters that FSDP1 shows as views of its shards."""
    flats = [getattr(getattr(part, "_handle", None), "flat_param", None) for part in module.modules()]
    shown = [(flat._params, flat._numels) for flat in flats if flat is not None and flat._params]
    return {id(p): int(n) for parameters, sizes in shown for p, n in zip(parameters, sizes, strict=True)}


def _elements(parameter: Any) -> int:
    """Elements of the whole tensor: a DTensor counts them all; ZeRO-3 and FSDP1's flat shards say it aside."""
    whole = getattr(parameter, "ds_numel", None)
    if whole is None and hasattr(parameter, "_numels"):
        return int(sum(parameter._numels))
    return int(parameter.numel() if whole is None else whole)


def autocast_dtype(device_type: str) -> str | None:
    """dtype that autocast runs matmuls in on a device type now, e.g. "bfloat16"; None when it is off."""
    import torch

    if not torch.is_autocast_enabled(device_type):
        return None
    return str(torch.get_autocast_dtype(device_type)).removeprefix("torch.")


def unwrap_loader(loader: Any) -> Any:
    """The torch DataLoader inside accelerate's, Lightning's and tqdm's wrappers; None when there is none."""
    import torch

    for _ in range(6):
        if loader is None:
            return None
        # accelerate's loaders claim DataLoader as their class, so the inner one is asked for first.
        inner = next((value for name in _INNER_LOADER if (value := _field(loader, name)) is not None), None)
        if inner is None and _field(loader, "_iterables") is not None:  # Lightning's CombinedLoader
            flat = loader.flattened
            inner = flat[0] if len(flat) == 1 else None
        if inner is None:
            return loader if isinstance(loader, torch.utils.data.DataLoader) else None
        loader = inner
    return None


def _field(owner: Any, name: str) -> Any:
    return getattr(owner, "__dict__", {}).get(name)


def loader_facts(loader: Any) -> LoaderFacts:
    """Workers, prefetched batches, batch size and data set size, through the wrappers of accelerate and Lightning."""
    inner = unwrap_loader(loader)
    if inner is None:
        return LoaderFacts()
    sampler = inner.batch_sampler
    batch_size = inner.batch_size or getattr(sampler, "batch_size", None)
    if isinstance(batch_size, int) and getattr(sampler, "split_batches", False):
        batch_size //= sampler.num_processes
    return LoaderFacts(
        workers=inner.num_workers,
        prefetched_batches=inner.num_workers * (inner.prefetch_factor or 0),
        batch_size=batch_size if isinstance(batch_size, int) else None,
        dataset_size=_dataset_size(inner.dataset),
    )


def _dataset_size(dataset: Any) -> int | None:
    for _ in range(4):
        if type(dataset).__name__ != "IterableDatasetShard":  # its length is that of a share
            break
        dataset = dataset.dataset
    if not hasattr(dataset, "__len__"):
        return None
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):  # how torch's and Hugging Face's data sets say "no length"
        return None


def loader_shards(loader: Any) -> int:
    """Processes that the loader's samplers split the data among, 1 when each process reads all of it."""
    inner = unwrap_loader(loader)
    if inner is None:
        return 1
    dispatching = type(loader).__name__ == "DataLoaderDispatcher"
    owners = [loader.state if dispatching else None, inner.batch_sampler, inner.sampler, inner.dataset]
    owners.append(getattr(inner.batch_sampler, "sampler", None))
    counts = (getattr(owner, name, None) for owner in owners for name in ("num_processes", "num_replicas"))
    return next((count for count in counts if isinstance(count, int) and count > 0), 1)
