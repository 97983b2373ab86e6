"""`problems(setting, ...)`: stock and lean run under a setting, and where they part."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from matrix.journal import Journal, first_difference
from matrix.recorder import EVENTS, Run, Watch, record
from matrix.settings import Setting
from matrix.subclasses import nothing

__all__ = ["ALL_EVENTS", "NO_EVENTS", "Side", "lean_sides", "problems", "stock"]

Side = Callable[[Setting, Journal], type]
"""The class that a run trains with."""

ALL_EVENTS: Watch = EVENTS
NO_EVENTS: Watch = ()


def stock(setting: Setting, journal: Journal) -> type:
    return setting.subclass(setting.trainer(), journal)


def lean_inside(setting: Setting, journal: Journal) -> type:
    """`class Mine(lean(Trainer))`."""
    from bareloop.trainer.hf import lean

    return setting.subclass(lean(setting.trainer()), journal)


def lean_outside(setting: Setting, journal: Journal) -> type:
    """`lean(Mine)`."""
    from bareloop.trainer.hf import lean

    return lean(setting.subclass(setting.trainer(), journal))


def lean_sides(setting: Setting, watch: Watch) -> Mapping[str, Side]:
    """The ways of putting a subclass and lean together; one where there is no subclass, or the events are watched."""
    if setting.subclass is nothing or watch:
        return {"lean(Mine)": lean_outside}
    return {"lean(Mine)": lean_outside, "Mine(lean)": lean_inside}


def problems(setting: Setting, folder: Path, watch: Watch, sides: Mapping[str, Side] | None = None) -> list[str]:
    """What is wrong with each of `sides` (lean ones without it), against stock; empty when nothing is.

    Args:
        setting: what to run.
        folder: empty; each run gets a folder of its own in it.
        watch: events that a recording callback overrides.
        sides: the classes to judge, by name.
    """
    expected, _ = record(setting, stock, folder / "stock" / "run", watch)
    found = []
    for index, (name, side) in enumerate((lean_sides(setting, watch) if sides is None else sides).items()):
        journal, run = record(setting, side, folder / f"side_{index}" / "run", watch)
        difference = first_difference(expected.written, journal.written)
        found.extend([f"{name}, {len(watch)} events watched:\n{difference}"] if difference else [])
        found.extend(f"{name}: {problem}" for problem in undeclared(setting, run))
    return found


def undeclared(setting: Setting, run: Run) -> list[str]:
    """Where the report of a lean trainer is not what the setting declares; nothing for other trainers."""
    found = []
    for trainer in run.trainers:
        report = getattr(trainer, "lean_report", None)
        if report is None:
            continue
        parts = {each.part for each in report.fallen_back if not is_of_the_test(each)}
        reasons = "; ".join(str(each) for each in report.fallen_back)
        if report.loop_is_lean != (setting.runs_stock is None) or (setting.runs_stock or "") not in reasons:
            found.append(f"declared runs_stock={setting.runs_stock!r}, reported {reasons!r}")
        elif setting.runs_stock is None and parts != set(setting.falls_back):
            found.append(f"declared falls_back={sorted(setting.falls_back)}, reported {reasons!r}")
        kind = type(trainer.model_wrapped).__name__
        if trainer.args.world_size > 1 and kind != (setting.wrapped or "DistributedDataParallel"):
            found.append(f"declared wrapped={setting.wrapped}, trained {kind}")
        if report.non_finite_losses != setting.nan_steps:
            found.append(f"declared nan_steps={setting.nan_steps}, reported {report.non_finite_losses}")
    return found


def is_of_the_test(fall_back: Any) -> bool:
    """Events that the stock handler delivers because a callback of the matrix takes them."""
    return fall_back.part == "events" and any(name in fall_back.reason for name in ("Acting", "Late", "Recording"))
