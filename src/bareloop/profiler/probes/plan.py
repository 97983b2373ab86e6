"""How many steps the run plans, and how many passes over the data, each with where it was seen.

Sources, best first: the state of a trainer on the stack, the loops of the user's source, schedulers, progress bars.
Costs a few milliseconds (files are parsed): for the first steps only.
"""

import ast
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from types import FrameType
from typing import Any

from bareloop.profiler.probes.expressions import length
from bareloop.profiler.probes.loops import Loop, Place, enclosing, user_places
from bareloop.profiler.probes.surroundings import loader_facts, loader_shards, trainer_on_stack, unwrap_loader
from bareloop.profiler.probes.trips import counts_steps, plan_of_loops, step_conditions
from bareloop.trace import Planned

__all__ = ["PlanFacts", "observe_plan"]

_SCHEDULE_LENGTHS = {
    "OneCycleLR": "total_steps",
    "CosineAnnealingLR": "T_max",
    "LinearLR": "total_iters",
    "PolynomialLR": "total_iters",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFacts:
    """What the run plans; None where nothing tells."""

    planned_steps: float | None = None
    planned_passes: float | None = None
    plans: tuple[Planned, ...] = ()
    """Everything that was seen, best source first; the first one of steps is `planned_steps`."""
    dataset_size: int | None = None
    """Samples in the data set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """One source's word. `steps` or `passes` may be missing."""

    text: str
    steps: float | None = None
    passes: float | None = None
    """Times that the loader is gone through."""
    loader: Any = None
    windows_end_with_loader: bool = False
    """True when the last window of a pass may be short, so that none spans two passes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Feed:
    """The loader in figures."""

    length: int | None
    """Batches of this process in one pass."""
    size: int | None
    batch_size: int | None
    batches_per_step: float
    shards: int
    world: int

    @property
    def covered(self) -> float:
        """Passes over the data set, by all processes together, that one pass of the loader is.

        1 but for a ragged end; a sampler may draw less than the whole; processes that all read everything read it
        `world` times.
        """
        copies = self.world if self.shards == 1 else 1
        if not (self.length and self.size and self.batch_size):
            return float(copies)
        reached = self.length * self.batch_size * self.shards
        ragged = abs(reached - self.size) < self.batch_size * self.shards
        return float(copies) if ragged else copies * reached / self.size


def observe_plan(
    frame: FrameType | None, loader: Any, micro_steps_per_step: float, samples_per_step_global: float | None
) -> PlanFacts:
    """The plan of the run whose optimizer is stepping at `frame`.

    Args:
        frame: the frame of the step, or of anything it called.
        loader: the loader that fed the training steps, None without one.
        samples_per_step_global: samples per step of all processes together, None when not known.
    """
    places = user_places(frame)
    gated = _gated(frame)
    trainer = trainer_on_stack(frame, "transformers")
    lightning = trainer_on_stack(frame, "lightning")
    owned = (
        _of_transformers(trainer)
        if trainer is not None
        else _of_lightning(lightning)
        if lightning is not None
        else None
    )
    feed = _feed(loader, micro_steps_per_step, samples_per_step_global)
    sources = [owned] if owned is not None else []
    size = None
    if owned is None:
        looped = plan_of_loops(places, feed.batches_per_step, gated)
        size = looped.data_size
        fed_by = looped.data if unwrap_loader(looped.data) is not None else None
        sources.append(
            _Source(
                text=looped.source,
                steps=None if looped.steps is None else float(looped.steps),
                passes=looped.passes,
                loader=fed_by,
                windows_end_with_loader=gated,
            )
        )
    own_loader = next((source.loader for source in sources if source.loader is not None), None)
    if own_loader is not None:
        feed = _feed(own_loader, micro_steps_per_step, samples_per_step_global)
    asides = _asides(places, feed.batches_per_step, gated)
    return _facts(sources, asides, feed, samples_per_step_global, size)


def _facts(
    sources: list[_Source], asides: list[Planned], feed: _Feed, samples: float | None, counted_size: int | None
) -> PlanFacts:
    plans: list[Planned] = []
    for source in sources:
        if source.steps is not None:
            plans.append(Planned(quantity="steps", value=source.steps, source=source.text))
        if source.passes is not None:
            plans.append(Planned(quantity="passes", value=source.passes * feed.covered, source=source.text))
    plans.extend(asides)
    steps = next((plan.value for plan in plans if plan.quantity == "steps"), None)
    passes = next((plan.value for plan in plans if plan.quantity == "passes"), None)
    size = feed.size if feed.size is not None else counted_size
    if passes is None and steps is not None:
        ends = any(source.windows_end_with_loader for source in sources)
        passes = _passes_of_steps(steps, feed, samples, size, ends)
    return PlanFacts(planned_steps=steps, planned_passes=passes, plans=tuple(plans), dataset_size=size)


def _passes_of_steps(
    steps: float, feed: _Feed, samples: float | None, size: int | None, windows_end_with_loader: bool
) -> float | None:
    """Passes over the data that so many steps are: whole ones by the loader's length, the rest by samples."""
    per_step = Fraction(feed.batches_per_step).limit_denominator(1000)
    if feed.length and samples and per_step:
        per_pass = Fraction(feed.length) / per_step
        if windows_end_with_loader:
            per_pass = Fraction(math.ceil(per_pass))
        whole = math.floor(Fraction(steps) / per_pass)
        rest = Fraction(steps) - whole * per_pass
        share = rest * Fraction(samples) / size if size else rest / per_pass
        # The rest is less than a pass, even where samples are padded to make the last batch full.
        return float(whole * Fraction(feed.covered) + min(share, Fraction(feed.covered)))
    if size and samples:
        return float(Fraction(steps) * Fraction(samples) / size)
    return None


def _feed(loader: Any, micro_steps_per_step: float, samples_per_step_global: float | None) -> _Feed:
    """Batches per step are told by samples where they come out whole: a step may make several backwards of a batch."""
    facts, shards, world = loader_facts(loader), loader_shards(loader), _world()
    batches = micro_steps_per_step
    if facts.batch_size and samples_per_step_global:
        ratio = samples_per_step_global / (facts.batch_size * max(world, shards))
        if ratio >= 1 and ratio == int(ratio):
            batches = ratio
    return _Feed(
        length=None if loader is None else length(loader),
        size=facts.dataset_size,
        batch_size=facts.batch_size,
        batches_per_step=batches,
        shards=shards,
        world=world,
    )


def _world() -> int:
    distributed = sys.modules.get("torch.distributed")
    ready = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if distributed is not None and ready else 1


def _gated(frame: FrameType | None) -> bool:
    """True when the step goes through accelerate's optimizer, called by the user's own loop."""
    while frame is not None:
        if frame.f_globals.get("__name__") == "accelerate.optimizer":
            return True
        frame = frame.f_back
    return False


def _of_transformers(trainer: Any) -> _Source:
    arguments, planned = trainer.args, int(trainer.state.max_steps)
    by_epochs = arguments.max_steps <= 0
    epochs = f", args.num_train_epochs={arguments.num_train_epochs:g}" if by_epochs else ", args.max_steps"
    return _Source(
        text=f"transformers.Trainer state.max_steps{epochs}",
        steps=float(planned) if planned > 0 else None,
        passes=float(arguments.num_train_epochs) if by_epochs else None,
        loader=trainer.callback_handler.train_dataloader,
        windows_end_with_loader=True,
    )


def _of_lightning(trainer: Any) -> _Source:
    """A Lightning trainer ends by epochs or by steps, whichever is first."""
    planned, epochs, batches = (
        float(trainer.estimated_stepping_batches),
        trainer.max_epochs,
        trainer.num_training_batches,
    )
    loader, passes = trainer.train_dataloader, None
    known = not math.isinf(planned) and planned > 0
    per_epoch = math.ceil(batches / trainer.accumulate_grad_batches) if not math.isinf(batches) else None
    if epochs is not None and epochs > 0 and (per_epoch is None or planned >= per_epoch * epochs):
        whole = length(loader)
        passes = None if per_epoch is None and known else epochs * (batches / whole if whole and per_epoch else 1.0)
    return _Source(
        text=f"lightning Trainer estimated_stepping_batches, max_epochs={epochs}, max_steps={trainer.max_steps}",
        steps=planned if known else None,
        passes=passes,
        loader=loader,
        windows_end_with_loader=True,
    )


def _asides(places: list[Place], per_step: float, gated: bool) -> list[Planned]:
    """Schedulers, then progress bars, that the user's frames hold."""
    loops = enclosing(places)
    held = list(_held(places))
    found = [plan for name, value in held for plan in _of_scheduler(name, value, places, loops, per_step, gated)]
    found += [plan for name, value in held for plan in _of_bar(name, value, places, loops, per_step, gated)]
    return found


def _held(places: list[Place]) -> Iterator[tuple[str, Any]]:
    """(expression, object) of what the user's frames can name, innermost frame first, each object once."""
    seen: set[int] = set()
    for place in reversed(places):
        values = list(place.scope.items())
        values += [(f"self.{name}", value) for name, value in getattr(place.scope.get("self"), "__dict__", {}).items()]
        for name, value in values:
            if id(value) not in seen:
                seen.add(id(value))
                yield name, value


def _of_scheduler(
    name: str, value: Any, places: list[Place], loops: list[Loop], per_step: float, gated: bool
) -> Iterator[Planned]:
    """The length of a learning-rate schedule, in what its `step` is called per."""
    inner, stepped = value, 1
    if type(value).__module__ == "accelerate.scheduler":
        inner = value.scheduler
        if value.step_with_optimizer and not value.split_batches:
            stepped = _accelerate_processes()
    kind = next((base.__name__ for base in type(inner).__mro__ if base.__module__ == "torch.optim.lr_scheduler"), None)
    total = getattr(inner, _SCHEDULE_LENGTHS.get(str(kind), ""), None)
    source = f"{type(inner).__name__}.{_SCHEDULE_LENGTHS.get(str(kind), '')} of {name}"
    if kind == "LambdaLR":
        keywords = (getattr(function, "keywords", {}) for function in inner.lr_lambdas)
        total = next((words["num_training_steps"] for words in keywords if "num_training_steps" in words), None)
        source = f"num_training_steps of {name}"
    if not isinstance(total, (int, float)) or total <= 0:
        return
    unit = "steps" if inner is not value else _unit(name, "step", places, loops, gated)
    if unit is None and kind in ("LambdaLR", "OneCycleLR"):
        unit = "steps"
    if unit == "micro_steps" and per_step == 1:
        unit = "steps"
    if unit is not None:
        shared = f" / {stepped} processes" if stepped > 1 else ""
        yield Planned(quantity=unit, value=total / stepped, source=source + shared)


def _accelerate_processes() -> int:
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    return int(state().num_processes) if state is not None and state._shared_state else 1


def _of_bar(
    name: str, value: Any, places: list[Place], loops: list[Loop], per_step: float, gated: bool
) -> Iterator[Planned]:
    """The total of a progress bar that is moved by hand; one that is looped over is in the loops already."""
    if not any(base.__name__ == "tqdm" for base in type(value).__mro__) or not isinstance(value.total, (int, float)):
        return
    unit = _unit(name, "update", places, loops, gated)
    if unit == "micro_steps" and per_step == 1:
        unit = "steps"
    if unit in ("steps", "micro_steps") and value.total > 0:
        yield Planned(quantity=str(unit), value=float(value.total), source=f"total of progress bar {name}")


def _unit(name: str, method: str, places: list[Place], loops: list[Loop], gated: bool) -> str | None:
    """What `name.method()` is called once per: "steps", "micro_steps" or "passes"; None when no call is found."""
    text = f"{name}.{method}"
    calls = [
        node
        for tree in {id(place.tree): place.tree for place in places}.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and ast.unparse(node.func) == text
    ]
    for call in calls:
        around = [loop for loop in loops if any(inner is call for inner in ast.walk(loop.node))]
        if not around:
            continue
        if around[-1] is not loops[-1]:
            return "passes" if loops[-1].data is not None and around[-1] is loops[-2] else None
        per_step = counts_steps(call, loops[-1], step_conditions(places, loops[-1]), gated)
        return "steps" if per_step else "micro_steps"
    return None
