"""What the lean loop takes for granted of transformers, accelerate and torch, and whether it still holds.

The lean loop does the work of the functions below without calling them. It is right as long as they do what they did
in the versions it was tested with, so each is named here with a fingerprint of its source; docstrings and comments do
not count. A part whose functions are not the tested ones is left to the library: for `LOOP` that is the stock loop.
"""

import functools
import hashlib
import importlib
import inspect
import linecache
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import accelerate
import torch
import transformers

from bareloop.trainer.report import LOOP, FallBack

__all__ = [
    "CLIP",
    "EVENTS",
    "MODULE_WALK",
    "OPTIMIZER_STEP",
    "TESTED_FUNCTIONS",
    "TESTED_VERSIONS",
    "ZERO_GRAD",
    "fingerprint",
    "function_at",
    "is_tested",
    "mismatches",
    "versions",
]

CLIP = "clip"
EVENTS = "events"
MODULE_WALK = "module walk"
OPTIMIZER_STEP = "optimizer step"
ZERO_GRAD = "zero_grad"

TESTED_VERSIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"transformers": ("5.24.0",), "accelerate": ("1.15.0",), "torch": ("2.13.0",)}
)

_TRAINER = "transformers.trainer:Trainer."
_HANDLER = "transformers.trainer_callback:CallbackHandler."
_FLOW = "transformers.trainer_callback:DefaultFlowCallback."
_ACCELERATOR = "accelerate.accelerator:Accelerator."

TESTED_FUNCTIONS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        LOOP: {
            _TRAINER + "_run_epoch": "18900b5c6a80",
            _TRAINER + "_inner_training_loop": "91c1d10d11c2",
            _TRAINER + "_finalize_training": "88e185b22196",
            _TRAINER + "training_step": "45bbd339b753",
            _TRAINER + "compute_loss": "1b4042b1ae64",
            _TRAINER + "compute_loss_context_manager": "2f2504eaa12b",
            _TRAINER + "autocast_smart_context_manager": "377d033a7524",
            _TRAINER + "get_batch_samples": "65fe983a5316",
            _TRAINER + "_get_num_items_in_batch": "bd60705153f5",
            _TRAINER + "_prepare_inputs": "170af7a8f8bb",
            _TRAINER + "_prepare_input": "4f6167e15875",
            _TRAINER + "_prepare_context_parallel_inputs": "ab6657256df9",
            _TRAINER + "floating_point_ops": "deacad1a134b",
            _TRAINER + "_track_num_input_tokens": "d89e09d4b6ed",
            _TRAINER + "_get_learning_rate": "af4b07a67375",
            _TRAINER + "_maybe_log_save_evaluate": "1a527d62ee57",
            _TRAINER + "get_tp_size": "b729ada27dba",
            _TRAINER + "get_cp_size": "a4ceeaaba61f",
            _TRAINER + "get_sp_size": "9b99ffc485d0",
            "accelerate.state:GradientState._set_sync_gradients": "3fa625ceb556",
            _ACCELERATOR + "backward": "f7fb64dad91e",
            _ACCELERATOR + "no_sync": "70dfbdaa6869",
            _ACCELERATOR + "gather": "a7d820d5d6b8",
        },
        CLIP: {
            _TRAINER + "_clip_grad_norm": "d22c80c34bf1",
            _TRAINER + "_get_grad_norm": "879dcba334e7",
            _TRAINER + "_has_mixed_mesh_grads": "c44bb5be6b2c",
            _ACCELERATOR + "clip_grad_norm_": "1132548cb379",
            _ACCELERATOR + "_clip_grad_norm_dtensor_aware": "03357841f33d",
            _ACCELERATOR + "unscale_gradients": "57c3952b16a3",
            "torch.nn.utils.clip_grad:clip_grad_norm_": "3276d6206b9f",
            "torch.nn.utils.clip_grad:_get_total_norm": "b1f7f7bc104e",
            "torch.nn.utils.clip_grad:_clip_grads_with_norm_": "09f328675d17",
        },
        EVENTS: {
            _HANDLER + "call_event": "45e38902ce0a",
            _HANDLER + "on_step_begin": "df340b269616",
            _HANDLER + "on_pre_optimizer_step": "a2daa824ec29",
            _HANDLER + "on_optimizer_step": "2fa03b9311fb",
            _HANDLER + "on_substep_end": "4f249241533f",
            _HANDLER + "on_step_end": "5e8419e257c5",
            _FLOW + "on_step_end": "b326a60f4dc1",
            _FLOW + "on_epoch_end": "4fcb486fbf7e",
        },
        MODULE_WALK: {
            "torch.nn.modules.module:Module.train": "4ab31621aaf1",
            "torch.nn.parallel.distributed:DistributedDataParallel.train": "181dea0eb792",
            "transformers.modeling_utils:PreTrainedModel.train": "586a4781ab51",
        },
        OPTIMIZER_STEP: {
            "accelerate.optimizer:AcceleratedOptimizer.step": "e41bfd5dcab7",
            "accelerate.optimizer:patch_optimizer_step": "ed3bb2c155f0",
            _ACCELERATOR + "optimizer_step_was_skipped": "2e51a9cc4bd4",
        },
        ZERO_GRAD: {
            "torch.nn.modules.module:Module.zero_grad": "c63bbfa6aaf3",
        },
    }
)
"""Part of the loop -> function -> fingerprint of its source in `TESTED_VERSIONS`."""


def versions() -> dict[str, str]:
    """Installed version of each library of `TESTED_VERSIONS`, without a local label such as "+cpu"."""
    installed = {"transformers": transformers, "accelerate": accelerate, "torch": torch}
    return {name: str(module.__version__).split("+")[0] for name, module in installed.items()}


def function_at(where: str) -> Callable[..., Any]:
    """The function at "module:Class.name" as it is now, a property's getter included.

    Raises:
        KeyError, ImportError: there is none.
    """
    module, _, path = where.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = vars(found)[name]
    if isinstance(found, property):
        found = found.fget
    return getattr(found, "__func__", found)


def fingerprint(function: Callable[..., Any]) -> str:
    """Twelve hex digits of the source of `function` without docstring, comments and blank lines; "" without source."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return ""
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    if not lines:
        return ""
    text = "".join(inspect.getblock(lines))
    kept = (line.strip() for line in _without_docstring(text, code.co_consts).splitlines())
    return hashlib.sha256("\n".join(line for line in kept if line and line[0] != "#").encode()).hexdigest()[:12]


def _without_docstring(text: str, constants: tuple[Any, ...]) -> str:
    """`text` of a function less its docstring, which is the first of its constants where there is one."""
    for quote in ('"""', "'''"):
        before, found, rest = text.partition(quote)
        inside, closed, after = rest.partition(quote)
        if found and closed and constants and isinstance(constants[0], str) and before.rstrip().endswith((":", "r")):
            first = constants[0].strip().splitlines()[:1]
            if first and first[0].strip() in inside:
                return before + after
    return text


@functools.cache
def _at_import() -> dict[str, Callable[..., Any] | None]:
    """The tested functions as they were when this was first called; None for one that is not the tested one."""
    found: dict[str, Callable[..., Any] | None] = {}
    for functions in TESTED_FUNCTIONS.values():
        for where, expected in functions.items():
            try:
                function = function_at(where)
            except (KeyError, ImportError):
                found[where] = None
            else:
                found[where] = function if fingerprint(function) == expected else None
    return found


def is_tested(where: str) -> bool:
    """Whether the function at `where` is the tested one: by its source at import, and not replaced since."""
    function = _at_import().get(where)
    return function is not None and function_at(where) is function


def mismatches() -> tuple[FallBack, ...]:
    """Parts whose functions are not the tested ones now, each with the reason."""
    found: list[FallBack] = []
    for part, functions in TESTED_FUNCTIONS.items():
        changed = [where for where in functions if not is_tested(where)]
        if changed:
            found.append(FallBack(part=part, reason=_why_changed(changed)))
    return tuple(found)


def _why_changed(changed: list[str]) -> str:
    installed = versions()
    library = changed[0].partition(".")[0].partition(":")[0]
    tested = ", ".join(TESTED_VERSIONS[library])
    names = ", ".join(where.partition(":")[2] for where in changed[:3]) + (", ..." if len(changed) > 3 else "")
    return (
        f"{names} is not what {library} {tested} has, which this was tested with: {library} {installed[library]} is "
        "installed, or somebody replaced it"
    )


_at_import()
