"""What transformers' own trainer tests check and a CPU can show, in our own words and code: `CATALOGUE`.

Left out: what needs an accelerator, the hub, several processes, or a package that is not installed (bitsandbytes, GaLore,
Apollo, LOMO, optuna, ray, wandb), and what never touches a trainer (collators, argument parsing, pure functions).
"""

from dataclasses import replace

from behaviours import (
    arguments,
    callbacks,
    counts,
    data,
    evaluation,
    extensions,
    habits,
    losses,
    optimizers,
    records,
    reproducibility,
    resuming,
    saving,
)
from behaviours.behaviour import Behaviour

__all__ = ["CATALOGUE"]

FALLS_BACK = {"emptying_the_cache_does_not_disturb": "torch_empty_cache_steps"}
"""Behaviours for which lean declares that it runs the stock loop: words of its reason."""

CATALOGUE: tuple[Behaviour, ...] = tuple(
    replace(behaviour, falls_back=FALLS_BACK.get(behaviour.name))
    for module in (
        arguments,
        reproducibility,
        data,
        counts,
        optimizers,
        losses,
        evaluation,
        records,
        callbacks,
        saving,
        resuming,
        extensions,
        habits,
    )
    for behaviour in module.BEHAVIOURS
)
