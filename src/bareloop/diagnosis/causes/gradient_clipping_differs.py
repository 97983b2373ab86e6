"""One script clips its gradients and the other does not, or to another norm.

What it is
----------
This script calls `clip_grad_norm_` and the other one does not, or both do with different `max_norm`. A call with an
infinite norm counts as a call: it computes the norm of all gradients and changes none of them. transformers.Trainer
clips at 1.0 unless told otherwise, a hand-written loop usually not at all.

Why it costs
------------
The norm is a pass over all gradients plus Python per parameter: 0.4 ms a step for a 2-layer GPT-2 on a CPU, 3.2 ms for
24 layers, growing with parameter tensors. And where it clips, the two scripts compute different numbers from the first
step whose norm exceeds the limit. With several devices a clip may seem expensive because it is the first to wait for
the gradients' reduction (C22): that wait only moves when the clip goes.

How it is counted
-----------------
`max_norm` of the clip calls in fact made in the first steps. compare: reported on the side that clips, or clips to the
smaller norm. explain: reported when every call has an infinite norm.

How it is ablated
-----------------
`clip_grad_norm_` (torch's and accelerate's) returns a zero at once. That changes the math of steps that clip.

What to change
--------------
- transformers 5: no setting. `max_grad_norm=0` stops the clipping, but the Trainer then calls clip with an infinite
  norm to log it, at the same cost. Override `_get_grad_norm` in a subclass to return None.
- transformers 4: `max_grad_norm=0`.
- lightning: `Trainer(gradient_clip_val=None)`.
- accelerate, plain loop: remove the call, or clip in both.

Example
-------
Sick: `clip_grad_norm_(model.parameters(), 1.0)` before each optimizer step. Healthy: no such call.
`tests/scripts/gradient_clipping_differs_sick.py`, `gradient_clipping_differs_twin.py`.

Source
------
C22 https://github.com/pytorch/pytorch/issues/13666
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from bareloop.diagnosis.call_sites import is_installed, split_location
from bareloop.diagnosis.evidence import Cause, Evidence
from bareloop.diagnosis.settings import framework, major
from bareloop.diagnosis.substitution import replaced
from bareloop.trace import Trace

__all__ = ["CAUSE"]

_PATCHES = "bareloop.profiler.probes.patches"
_CLIPS = ("clip_grad_norm_", "clip_grads_with_norm_")


def detect(trace: Trace) -> Evidence | None:
    """Evidence when clip is called with an infinite norm: a norm is computed and nothing is clipped."""
    limit = trace.work.max_grad_norm
    if limit is None or not math.isinf(limit):
        return None
    return _evidence(trace, "clip_grad_norm_ is called with an infinite norm: it computes a norm and clips nothing", {})


def contrast(trace: Trace, other: Trace) -> Evidence | None:
    """Evidence when this run clips and the other one does not, or clips to a smaller norm."""
    limit, other_limit = trace.work.max_grad_norm, other.work.max_grad_norm
    if limit is None or (other_limit is not None and limit >= other_limit):
        return None
    mine = f"clips gradients with max_norm {limit:g}"
    share = trace.work.clipped_share
    if share is not None and math.isfinite(limit):
        mine += f" (it changed the gradients in {share:.0%} of the first steps)"
    theirs = "the other does not clip" if other_limit is None else f"the other with {other_limit:g}"
    return _evidence(trace, f"{mine}, {theirs}", {"other_max_grad_norm": other_limit})


def _evidence(trace: Trace, text: str, counts: Mapping[str, Any]) -> Evidence:
    functions = trace.counts.functions if trace.counts is not None else ()
    callers = [call.caller for call in functions if call.function.split(".")[-1] in _CLIPS and call.caller]
    callers.sort(key=lambda caller: is_installed(split_location(caller)[0]))
    return Evidence(
        text=text,
        counts={"max_grad_norm": trace.work.max_grad_norm, **counts, "clipped_share": trace.work.clipped_share},
        location=callers[0] if callers else None,
        data={"device": trace.first.environment.device},
    )


@contextmanager
def ablate(data: Mapping[str, Any]) -> Iterator[None]:
    """Clipping to a norm does nothing; what returns the norm returns zero on `data["device"]`."""
    import torch

    zero = torch.zeros((), device=data.get("device", "cpu"))

    def no_clip(*args: Any, **kwargs: Any) -> Any:
        return zero

    with replaced([*_torch_changes(torch, no_clip), *_accelerate_changes(zero)]):
        yield


def _torch_changes(torch: Any, no_clip: Callable[..., Any]) -> list[tuple[Any, str, Any]]:
    """The profiler's wrapper stands where scripts have imported it from by name, so it is asked to stand aside."""
    wrapper = torch.nn.utils.clip_grad_norm_
    if getattr(wrapper, "__globals__", {}).get("__name__") == _PATCHES:
        return [(sys.modules[_PATCHES], "clip_override", no_clip)]
    places = [(torch.nn.utils, "clip_grad_norm_"), (torch.nn.utils.clip_grad, "clip_grad_norm_")]
    places += [(torch.nn.utils, name) for name in _CLIPS[1:] if hasattr(torch.nn.utils, name)]
    return [(owner, name, no_clip) for owner, name in places]


def _accelerate_changes(zero: Any) -> list[tuple[Any, str, Any]]:
    """accelerate lists the parameters and sorts them by mesh before it calls torch: that goes too."""
    module = sys.modules.get("accelerate.accelerator")
    if module is None:
        return []
    kind = module.Accelerator
    original = kind.clip_grad_norm_

    def clip_grad_norm_(self: Any, *args: Any, **kwargs: Any) -> Any:
        # DeepSpeed clips inside its own step and is only asked for the norm here.
        if str(self.distributed_type).endswith("DEEPSPEED"):
            return original(self, *args, **kwargs)
        return zero

    return [(kind, "clip_grad_norm_", clip_grad_norm_)]


def setting(trace: Trace) -> str | None:
    """None in transformers 5, where no argument stops the call."""
    name = framework(trace)
    if name == "transformers":
        return "max_grad_norm=0" if (major(trace, "transformers") or 5) < 5 else None
    return "gradient_clip_val=None" if name == "lightning" else None


def fix(trace: Trace, evidence: Evidence) -> str:
    """What stops the call, and for transformers 5 why no argument does."""
    name = setting(trace)
    if name is not None:
        return f"Set {name}, or clip to the same norm in both scripts."
    if framework(trace) == "transformers":
        return (
            "Clip to the same norm in both scripts: no setting of transformers 5 stops the call (max_grad_norm=0 still "
            "calls clip with an infinite norm, to log it; overriding Trainer._get_grad_norm does)."
        )
    return "Remove the call of clip_grad_norm_, or clip to the same norm in both scripts."


CAUSE = Cause(
    code="gradient_clipping_differs",
    title="Gradient clipping",
    detect=detect,
    contrast=contrast,
    ablate=ablate,
    setting=setting,
    fix=fix,
    changes_math=True,
)
