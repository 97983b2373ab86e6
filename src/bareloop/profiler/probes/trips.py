"""How many optimizer steps, and passes over the data, the enclosing loops of the source add up to.

A loop goes round once per micro-step when the step is made on a condition (`if (i + 1) % accumulate == 0`) or by
accelerate's gated optimizer, else once per step. A condition on a loop's own counter is counted by evaluating it.
"""

import ast
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bareloop.profiler.probes.expressions import UNKNOWN, evaluate
from bareloop.profiler.probes.loops import Loop, Place, enclosing
from bareloop.profiler.probes.surroundings import unwrap_loader

__all__ = ["Condition", "LoopPlan", "counts_steps", "plan_of_loops", "step_conditions"]

_MOST_EVALUATED = 1024
_FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE}
_LEAVES_AT: dict[type[ast.cmpop], int] = {ast.GtE: 0, ast.Gt: 1, ast.Eq: 0}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopPlan:
    """What the loops around the step plan; None where they do not tell."""

    steps: float | None = None
    passes: float | None = None
    """Passes over `data` when the loops say so by themselves."""
    source: str = ""
    data: Any = None
    data_size: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """A test that must come out as `truth` for the step to be made in this trip."""

    test: ast.expr
    truth: bool
    place: Place
    holder: ast.stmt


@dataclass(frozen=True, kw_only=True, slots=True)
class _Limit:
    """A bound on the trips of one loop, or of all of them together when `loop` is None."""

    count: float
    steps: bool
    """True when it counts optimizer steps, False when trips."""
    text: str
    loop: Loop | None = None


def plan_of_loops(places: list[Place], micro_steps_per_step: float, gated: bool) -> LoopPlan:
    """The plan of the loops around the step made at `places`.

    Args:
        gated: the step went through accelerate's optimizer, which makes it only where gradients are synchronised.
    """
    loops = enclosing(places)
    if not loops:
        return LoopPlan()
    innermost = loops[-1]
    conditions = step_conditions(places, innermost)
    per_step = micro_steps_per_step if _trips_are_micro_steps(innermost, conditions, gated) else 1.0
    limits = [limit for loop in loops for limit in _limits(loop, loops, conditions, gated)]
    for limit in limits:
        if limit.loop is not None:
            limit.loop.trips = limit.count if limit.loop.trips is None else min(limit.loop.trips, limit.count)
    overall = [limit for limit in limits if limit.loop is None]
    steps = _steps(loops, conditions, per_step, gated)
    bounds = [limit.count if limit.steps else limit.count // per_step for limit in overall]
    limited = min(bounds, default=math.inf)
    cut = steps is None or limited < steps
    if cut and not math.isinf(limited):
        steps = limited
    source = loop_over_data(loops)
    return LoopPlan(
        steps=steps,
        passes=None if cut and steps is not None else _passes(loops),
        source=_source(loops, overall, per_step),
        data=None if source is None else source.data,
        data_size=None if source is None else source.data_size,
    )


def _product(loops: list[Loop]) -> float | None:
    counts = [loop.trips for loop in loops]
    if any(count is None for count in counts):
        return None
    product = math.prod(count for count in counts if count is not None)
    return None if math.isinf(product) or math.isnan(product) else product


def _source(loops: list[Loop], overall: list[_Limit], per_step: float) -> str:
    text = " x ".join(loop.label for loop in loops)
    accumulated = f", {per_step:g} micro-steps a step" if per_step != 1 else ""
    return "; ".join([f"{text}{accumulated} at {loops[0].location}", *(limit.text for limit in overall)])


def _passes(loops: list[Loop]) -> float | None:
    """Passes over the data: trips around the loop over it, times the share of it that is gone through."""
    loop = loop_over_data(loops)
    if loop is None:
        return None
    repeats = _product([other for other in loops if other is not loop])
    if repeats is None or (loop.trips is not None and math.isinf(loop.trips)):
        return None
    share = 1.0 if not loop.whole or loop.trips is None else loop.trips / loop.whole
    return repeats * share


def loop_over_data(loops: list[Loop]) -> Loop | None:
    """The loop that feeds the step: over a torch loader anywhere, over another sized object when innermost."""
    over_loader = next((loop for loop in reversed(loops) if unwrap_loader(loop.data) is not None), None)
    return over_loader or (loops[-1] if loops[-1].data is not None else None)


def step_conditions(places: list[Place], innermost: Loop) -> list[Condition]:
    """What must hold within one trip of the innermost loop for the step to be made, guards before it included."""
    found: list[Condition] = []
    start = next(i for i, place in enumerate(places) if place is innermost.place)
    for place in places[start:]:
        path = place.path
        if place is innermost.place:
            path = path[next(i for i, (node, _) in enumerate(path) if node is innermost.node) :]
            guards = _guards(
                [node.body for node, _ in path[:1] if isinstance(node, (ast.For, ast.While))], place, False
            )
        else:
            guards = _guards([place.body], place, True)
        found.extend(guards)
        for node, block in path:
            if isinstance(node, ast.If) and block in ("body", "orelse"):
                found.append(Condition(test=node.test, truth=block == "body", place=place, holder=node))
                found.extend(_guards([getattr(node, block)], place, place is not innermost.place))
    return [condition for condition in found if _varies(condition, innermost)]


def _guards(blocks: list[list[ast.stmt]], place: Place, called: bool) -> Iterator[Condition]:
    """`if ...: continue` before the step, and `if ...: return` in a function that the loop calls."""
    kinds = (ast.Continue, ast.Return) if called else (ast.Continue,)
    for node in (statement for block in blocks for statement in block):
        if isinstance(node, ast.If) and node.lineno < place.line and isinstance(node.body[-1], kinds):
            yield Condition(test=node.test, truth=False, place=place, holder=node)


def _varies(condition: Condition, innermost: Loop) -> bool:
    """False for tests that come out alike in every trip, as `if scaler is not None` does."""
    if any(isinstance(part, ast.Mod) for part in ast.walk(condition.test)):
        return True
    stored = {
        ast.unparse(part)
        for part in ast.walk(innermost.node)
        if isinstance(part, (ast.Name, ast.Attribute)) and isinstance(part.ctx, ast.Store)
    }
    used = {ast.unparse(part) for part in ast.walk(condition.test) if isinstance(part, (ast.Name, ast.Attribute))}
    return bool(stored & used) or evaluate(condition.test, condition.place.scope) is UNKNOWN


def _trips_are_micro_steps(innermost: Loop, conditions: list[Condition], gated: bool) -> bool:
    """False when every trip makes a step, or the window is a loop of its own inside the trip."""
    if not (conditions or gated):
        return False
    for node in innermost.node.body:
        for inner in ast.walk(node):
            if isinstance(inner, (ast.For, ast.While)) and inner not in innermost.inner and _calls_backward(inner):
                return False
    return True


def _calls_backward(node: ast.AST) -> bool:
    calls = (part for part in ast.walk(node) if isinstance(part, ast.Call))
    return any(isinstance(call.func, ast.Attribute) and call.func.attr == "backward" for call in calls)


def _steps(loops: list[Loop], conditions: list[Condition], per_step: float, gated: bool) -> float | None:
    innermost, outer = loops[-1], _product(loops[:-1])
    total = _product(loops)
    if total is None or outer is None or innermost.trips is None:
        return None
    counted = _count_true(innermost, [c for c in conditions if c.place is innermost.place], per_step)
    if counted is not None:
        return outer * counted
    if per_step == 1:
        return total
    if per_step != int(per_step):
        return total / per_step
    if gated:  # accelerate makes a step of what is left at the end of its loader
        return outer * math.ceil(innermost.trips / per_step)
    return total // per_step


def _count_true(loop: Loop, conditions: list[Condition], per_step: float) -> int | None:
    """Trips of the loop in which all conditions hold; None when none of them is about its counter."""
    trips = loop.trips
    about = [condition for condition in conditions if loop.index in _names(condition.test)]
    if loop.index is None or not about or trips is None or math.isinf(trips):
        return None
    # A long loop repeats itself every window: only what is left after whole windows is evaluated.
    windows = 0 if trips <= _MOST_EVALUATED else int(trips // per_step)
    count, scope = windows, dict(loop.place.scope)
    for trip in range(int(windows * per_step), int(trips)):
        scope[loop.index] = loop.start + trip * loop.stride
        answers = [evaluate(condition.test, scope) for condition in about]
        if any(answer is UNKNOWN for answer in answers):
            return None
        count += all(bool(answer) is condition.truth for answer, condition in zip(answers, about, strict=True))
    return count


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _limits(loop: Loop, loops: list[Loop], conditions: list[Condition], gated: bool) -> Iterator[_Limit]:
    """Bounds from `while step < n` and from `if step >= n: break`."""
    if isinstance(loop.node, ast.While):
        for test in _parts(loop.node.test, ast.And):
            yield from _counter_limit(test, loop, loops, conditions, gated, staying=True)
    for holder in _leaving(loop.node.body):
        for disjunct in _parts(holder.test, ast.Or):
            tests = _parts(disjunct, ast.And)
            if loop.index in _names(disjunct):
                yield from _index_limit(disjunct, holder, loop)
                continue
            for test in tests:
                others = [evaluate(other, loop.place.scope) for other in tests if other is not test]
                if all(other is not UNKNOWN and other for other in others):
                    yield from _counter_limit(test, loop, loops, conditions, gated, staying=False)


def _parts(test: ast.expr, kind: type[ast.boolop]) -> list[ast.expr]:
    return test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, kind) else [test]


def _leaving(body: list[ast.stmt]) -> Iterator[ast.If]:
    """`if` statements of a loop's body that leave it; those of loops inside it leave those."""
    for node in body:
        if isinstance(node, ast.If):
            if any(isinstance(statement, (ast.Break, ast.Return)) for statement in node.body):
                yield node
            yield from _leaving(node.body)
            yield from _leaving(node.orelse)
        elif isinstance(node, (ast.With, ast.Try)):
            yield from _leaving(node.body)


def _index_limit(test: ast.expr, holder: ast.If, loop: Loop) -> Iterator[_Limit]:
    """Trips until a test on the loop's own counter leaves it."""
    trip = _first_true(test, loop)
    if trip is not None and (loop.trips is None or trip < loop.trips):
        count = trip if holder.lineno < loop.place.line else trip + 1
        if count >= 1:
            yield _Limit(count=count, steps=False, text=f"break at {loop.place.name}:{holder.lineno}", loop=loop)


def _first_true(test: ast.expr, loop: Loop) -> int | None:
    scope = dict(loop.place.scope)
    if isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == loop.index:
        bound = evaluate(test.comparators[0], scope)
        if len(test.ops) == 1 and type(bound) is int and type(test.ops[0]) in _LEAVES_AT:
            trip = math.ceil((bound + _LEAVES_AT[type(test.ops[0])] - loop.start) / loop.stride)
            # `step == -1` never comes true, and what was true before the first trip did not keep the step from being made.
            return trip if trip >= 0 else None
    most = _MOST_EVALUATED if loop.trips is None else min(_MOST_EVALUATED, loop.trips)
    for trip in range(int(most)):
        scope[str(loop.index)] = loop.start + trip * loop.stride
        answer = evaluate(test, scope)
        if answer is UNKNOWN:
            return None
        if answer:
            return trip
    return None


def _counter_limit(
    test: ast.expr, loop: Loop, loops: list[Loop], conditions: list[Condition], gated: bool, staying: bool
) -> Iterator[_Limit]:
    """The bound that comparing a hand-kept counter sets: on its own loop's trips, or on all steps together."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return
    sides = [(test.left, type(test.ops[0]), test.comparators[0])]
    sides.append((test.comparators[0], _FLIPPED.get(type(test.ops[0]), type(test.ops[0])), test.left))
    for counter, order, limit in sides:
        bound = evaluate(limit, loop.place.scope)
        increment = _increment(counter, loop.place.tree)
        if type(bound) not in (int, float) or increment is None:
            continue
        # Staying while `step <= n` is leaving at `step > n`.
        order = {ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.NotEq: ast.Eq}.get(order, ast.Pass) if staying else order  # type: ignore[arg-type]
        if order not in _LEAVES_AT:
            continue
        count = math.ceil(bound - _first_value(counter, loop.place.tree)) + _LEAVES_AT[order]
        count += 0 if staying else _late(test.lineno, getattr(increment, "lineno", 0), loop.place.line)
        if count < 1:
            continue  # `if step == limit` with a limit of -1 for none: a step was made, so it does not bound anything
        holders = [other for other in loops if other.place.file == loop.place.file and _holds(other.node, increment)]
        own = holders[-1] if holders else loops[-1]
        where = f"{'while' if staying else 'break'} {ast.unparse(test)} at {loop.place.name}:{test.lineno}"
        if own is not loops[-1] and own is loop:
            yield _Limit(count=count, steps=False, text=where, loop=own)
        elif own is loops[-1]:
            yield _Limit(count=count, steps=counts_steps(increment, own, conditions, gated), text=where)
        return


def _late(test: int, increment: int, step: int) -> int:
    """Steps that a break after the step but before the count lets through, or that one before the step takes away."""
    if step < test < increment:
        return 1
    return -1 if increment < test < step else 0


def _holds(node: ast.AST, part: ast.AST) -> bool:
    return any(inner is part for inner in ast.walk(node))


def _increment(counter: ast.expr, tree: ast.Module) -> ast.AST | None:
    """The statement that adds 1 to the counter, None without one: then it counts something else."""
    text = ast.unparse(counter)
    if not isinstance(counter, (ast.Name, ast.Attribute, ast.Subscript)):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            by_one = isinstance(node.value, ast.Constant) and node.value.value == 1
            if by_one and ast.unparse(node.target) == text:
                return node
        if isinstance(node, ast.Assign) and ast.unparse(node.value) in (f"{text} + 1", f"1 + {text}"):
            return node
    return None


def _first_value(counter: ast.expr, tree: ast.Module) -> int:
    """The constant that the counter is set to at first in its file, else 0."""
    text = ast.unparse(counter)
    for node in ast.walk(tree):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        value = getattr(getattr(node, "value", None), "value", None)
        if type(value) is int and any(ast.unparse(target) == text for target in targets):
            return value
    return 0


def counts_steps(increment: ast.AST, loop: Loop, conditions: list[Condition], gated: bool) -> bool:
    """True when the counter grows once per step: beside the step, after its guard, or every trip makes a step."""
    if not conditions and not gated:
        return True
    for condition in conditions:
        if _holds(condition.holder, increment):
            return True
        if isinstance(condition.holder, ast.If) and isinstance(condition.holder.body[-1], ast.Continue):
            return getattr(increment, "lineno", 0) > condition.holder.lineno
    return gated and any(isinstance(node, ast.If) and _holds(node, increment) for node in ast.walk(loop.node))
