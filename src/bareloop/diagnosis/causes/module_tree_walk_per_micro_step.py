"""model.train() walks the whole tree of modules again in every step or micro-step.

What it is
----------
`Module.train` sets an attribute on a module and calls itself for every child. transformers.Trainer calls it at the top
of each micro-step; many hand-written loops do at the top of each step. The mode is almost always right already.

Why it costs
------------
One Python call per module, with torch's slow attribute setter in each: 0.13 ms for the 34 modules of a 2-layer GPT-2,
1 ms for 320 modules, each micro-step. It is host time, so it hurts where the device waits for the host: a 9B LoRA run
gained from its removal (C41, together with a second change).

How it is counted
-----------------
Calls of Module.train per step, recursion counted, against the number of modules: at least 0.9 whole walks per step, in
a model of at least 2 modules. An evaluation now and then stays under that.

How it is ablated
-----------------
Module.train returns at once when the module is already in the mode asked for. A submodule that was put into eval mode
by hand, and that the walk would have put back, stays in eval mode meanwhile.

What to change
--------------
- transformers: no setting. `bareloop.Trainer` walks only after a mode was changed; or override `training_step` in a subclass
  so that `train()` is called only after an evaluation.
- lightning: it walks once per epoch and after evaluations; the call is then in your own hooks.
- accelerate, plain loop: call `model.train()` once before the loop, and again after each `model.eval()`.

Example
-------
Sick: `model.train()` as first line of the batch loop. Healthy: the same line before the loop.
`tests/scripts/module_tree_walk_per_micro_step_sick.py`, `module_tree_walk_per_micro_step_twin.py`.

Source
------
C41 https://github.com/unslothai/unsloth/pull/11238
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from bareloop.diagnosis.call_sites import EVERY_STEP, is_installed, split_location
from bareloop.diagnosis.evidence import Cause, Evidence
from bareloop.diagnosis.settings import framework, versioned
from bareloop.diagnosis.substitution import replaced
from bareloop.diagnosis.wording import counted, times
from bareloop.trace import Counts, Trace

__all__ = ["CAUSE"]

_FEWEST_MODULES = 2


def detect(trace: Trace) -> Evidence | None:
    """Evidence when the tree is walked in every step."""
    counts = trace.counts
    if counts is None or counts.modules < _FEWEST_MODULES:
        return None
    calls = counts.module_train_calls_per_step
    walks = calls / counts.modules
    if walks < EVERY_STEP or not counts.module_train_in_every_step:
        return None
    micro_steps = max(counts.micro_steps_per_step, 1.0)
    return Evidence(
        text=(
            f"Module.train is called {times(calls)} per step: {counted(walks / micro_steps, 'walk')} per micro-step "
            f"over a tree of {counts.modules} modules"
        ),
        counts={
            "module_train_calls_per_step": calls,
            "modules": counts.modules,
            "walks_per_micro_step": walks / micro_steps,
        },
        location=_caller(counts),
    )


def _caller(counts: Counts) -> str | None:
    """Who started the walk: the user's line if there is one, else the outermost `train` (models override it)."""
    calls = [call for call in counts.functions if call.function.split(".")[-1] == "train" and call.caller]
    calls.sort(key=lambda call: (is_installed(split_location(call.caller)[0]), call.per_step))
    return calls[0].caller if calls else None


@contextmanager
def ablate(data: Mapping[str, Any]) -> Iterator[None]:
    """Module.train does nothing for a module that is in the mode asked for."""
    import torch

    walk = torch.nn.Module.train

    def train(self: Any, mode: bool = True) -> Any:
        return self if self.training is mode else walk(self, mode)

    with replaced([(torch.nn.Module, "train", train)]):
        yield


def fix(trace: Trace, evidence: Evidence) -> str:
    """The pattern for a loop; for transformers that no setting exists."""
    if framework(trace) == "transformers":
        return (
            f"Use bareloop.Trainer, or override training_step in a subclass and call train() only after an evaluation: "
            f"no setting of {versioned(trace)} exists."
        )
    return "Call model.train() once before the loop, and again after each model.eval()."


CAUSE = Cause(
    code="module_tree_walk_per_micro_step",
    title="model.train() walks all modules in every step",
    detect=detect,
    ablate=ablate,
    status="not_examined",
    fix=fix,
)
