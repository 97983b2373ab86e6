"""The loops of the user's source that enclose the optimizer step, and how often each goes round.

The stack says which lines are being run, the syntax tree of their files says which `for` and `while` statements enclose
them, and live objects say how long those are. No code of the user is run for it but `len` of what is looped over.
"""

import ast
import linecache
import math
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from bareloop.profiler.probes.expressions import UNKNOWN, evaluate, length
from bareloop.profiler.probes.surroundings import frame_locals, unwrap_loader

__all__ = ["Loop", "Place", "enclosing", "iteration", "source_tree", "user_places"]

_LIBRARIES = {
    "torch", "transformers", "accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "trl", "deepspeed"
}  # fmt: skip
_SAME_LENGTH = {"tqdm", "tqdm_notebook", "track", "iter", "list", "tuple", "sorted", "reversed", "auto_tqdm"}


@dataclass(kw_only=True, slots=True)
class Place:
    """One frame of user code on the way to the optimizer step."""

    file: str
    name: str
    """File name as reports show it."""
    line: int
    scope: Mapping[str, Any]
    body: list[ast.stmt]
    """Body of the function, or of the module."""
    path: list[tuple[ast.stmt, str]]
    """Statements that enclose the line, outermost first, each with the name of its block that does."""
    tree: ast.Module


@dataclass(kw_only=True, slots=True)
class Loop:
    """One enclosing loop. `trips` is how often it goes round: None when unknown, infinity for `while True`."""

    node: ast.For | ast.While
    place: Place
    trips: float | None
    label: str
    data: Any = None
    """The loader, or the sized object, that is looped over; None for counting loops."""
    data_size: int | None = None
    """Samples, for `range(0, len(x), size)`."""
    whole: float | None = None
    """Trips of one whole pass over `data`, before any limit."""
    index: str | None = None
    """Name that counts the trips."""
    start: int = 0
    stride: int = 1
    inner: list[ast.stmt] = field(default_factory=list)

    @property
    def location(self) -> str:
        """file:line of the loop."""
        return f"{self.place.name}:{self.node.lineno}"


@dataclass(kw_only=True, slots=True)
class Iteration:
    """What an expression after `in` yields, as far as can be told."""

    trips: float | None = None
    data: Any = None
    data_size: int | None = None
    whole: float | None = None
    start: int | None = None
    """First number of a range; None when the items are not numbers."""
    stride: int = 1


def user_places(frame: FrameType | None) -> list[Place]:
    """The frames of user code with their source at hand, outermost first."""
    trees: dict[str, ast.Module | None] = {}
    own_package = _main_package()
    places = []
    while frame is not None:
        file = frame.f_code.co_filename
        if _is_user_code(file, str(frame.f_globals.get("__name__", "")), own_package):
            if file not in trees:
                trees[file] = source_tree(file, frame.f_globals)
            tree = trees[file]
            if tree is not None:
                places.append(_place(frame, tree))
        frame = frame.f_back
    return places[::-1]


def source_tree(file: str, module_globals: dict[str, Any]) -> ast.Module | None:
    """The syntax tree of a file; None for code without source, or whose source has changed into no Python."""
    try:
        return ast.parse("".join(linecache.getlines(file, module_globals)))
    except SyntaxError:
        return None


def _main_package() -> str | None:
    """Folder of the package that was started with -m, which may be an installed one."""
    main = sys.modules.get("__main__")
    package = str(getattr(main, "__package__", None) or "").partition(".")[0]
    root = getattr(sys.modules.get(package), "__file__", None) if package else None
    return os.path.dirname(root) if root else None


def _is_user_code(file: str, module: str, own_package: str | None) -> bool:
    if own_package and file.startswith(own_package + os.sep):
        return True
    installed = f"{os.sep}site-packages{os.sep}" in file or f"{os.sep}dist-packages{os.sep}" in file
    ours = file.startswith(os.path.dirname(os.path.dirname(__file__)) + os.sep)
    standard = file.startswith(sysconfig.get_paths()["stdlib"] + os.sep)
    return not (installed or ours or standard or file.startswith("<") or module.partition(".")[0] in _LIBRARIES)


def _place(frame: FrameType, tree: ast.Module) -> Place:
    local = frame_locals(frame)
    body: list[ast.stmt] = tree.body
    if frame.f_code.co_name != "<module>":
        body = next((node.body for node in _functions(tree) if _first_line(node) == frame.f_code.co_firstlineno), [])
    return Place(
        file=frame.f_code.co_filename,
        name=os.path.basename(frame.f_code.co_filename),
        line=frame.f_lineno,
        scope={**frame.f_globals, **local},
        body=body,
        path=_path(body, frame.f_lineno),
        tree=tree,
    )


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def _first_line(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _path(body: list[ast.stmt], line: int) -> list[tuple[ast.stmt, str]]:
    found: list[tuple[ast.stmt, str]] = []
    while True:
        holder = next((node for node in body if node.lineno <= line <= (node.end_lineno or node.lineno)), None)
        if holder is None:
            return found
        for name, block in _blocks(holder):
            if block and block[0].lineno <= line <= (block[-1].end_lineno or block[-1].lineno):
                found.append((holder, name))
                body = block
                break
        else:
            found.append((holder, ""))
            return found


def _blocks(node: ast.stmt) -> Iterator[tuple[str, list[ast.stmt]]]:
    for name in ("body", "orelse", "finalbody"):
        yield name, getattr(node, name, [])
    for part in (*getattr(node, "handlers", []), *getattr(node, "cases", [])):
        yield "body", part.body


def enclosing(places: list[Place]) -> list[Loop]:
    """The loops around the optimizer step, outermost first; loops over a list of optimizers left out."""
    loops = []
    for place in places:
        for position, (node, block) in enumerate(place.path):
            if block == "body" and isinstance(node, (ast.For, ast.While)):
                loop = _loop(node, place)
                loop.inner = [statement for statement, _ in place.path[position + 1 :]]
                if not _over_optimizers(loop.data):
                    loops.append(loop)
    return loops


def _over_optimizers(data: Any) -> bool:
    return type(data) in (list, tuple) and bool(data) and all(hasattr(item, "param_groups") for item in data)


def _loop(node: ast.For | ast.While, place: Place) -> Loop:
    if isinstance(node, ast.While):
        endless = evaluate(node.test, place.scope) if isinstance(node.test, ast.Constant) else UNKNOWN
        text = f"while {ast.unparse(node.test)}"
        return Loop(node=node, place=place, trips=math.inf if endless is not UNKNOWN else None, label=text)
    found = iteration(node.iter, place.scope)
    target, start, stride = _counter(node, place.scope, found)
    size = "?" if found.trips is None else f"{found.trips:g}"
    return Loop(
        node=node,
        place=place,
        trips=found.trips,
        label=f"{ast.unparse(node.iter)} [{size}]",
        data=found.data,
        data_size=found.data_size,
        whole=found.whole,
        index=target,
        start=start,
        stride=stride,
    )


def _counter(node: ast.For, scope: Mapping[str, Any], found: Iteration) -> tuple[str | None, int, int]:
    """(name, first value, stride) of the loop target that counts: a range's own, or enumerate's first."""
    target: ast.expr | None = node.target
    call = node.iter
    while isinstance(call, ast.Call) and _called(call) in _SAME_LENGTH and call.args:
        call = call.args[0]
    start, stride = found.start, found.stride
    if isinstance(call, ast.Call) and _called(call) == "enumerate":
        target = node.target.elts[0] if isinstance(node.target, ast.Tuple) else None
        given = [keyword.value for keyword in call.keywords if keyword.arg == "start"] or call.args[1:2]
        first = evaluate(given[0], scope) if given else 0
        start, stride = (first if isinstance(first, int) else None), 1
    if not isinstance(target, ast.Name) or start is None:
        return None, 0, 1
    return target.id, start, stride


def _called(call: ast.Call) -> str:
    function = call.func
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def iteration(node: ast.expr, scope: Mapping[str, Any]) -> Iteration:
    """What looping over the expression `node` goes through, known wrappers taken off."""
    if isinstance(node, ast.IfExp):  # tqdm(loader) if rank == 0 else loader
        first, second = iteration(node.body, scope), iteration(node.orelse, scope)
        test = evaluate(node.test, scope)
        if isinstance(test, (bool, int, type(None))):
            return first if test else second
        return first if first.trips == second.trips else Iteration()
    if isinstance(node, (ast.List, ast.Tuple)) and not any(isinstance(item, ast.Starred) for item in node.elts):
        return Iteration(trips=len(node.elts))
    if not isinstance(node, ast.Call):
        value = evaluate(node, scope)
        return Iteration() if value is UNKNOWN else _over(value)
    name, arguments = _called(node), node.args
    if any(isinstance(argument, ast.Starred) for argument in arguments):
        return Iteration()
    if name in ("range", "trange"):
        return _over_range(arguments, scope)
    if name == "count":
        return Iteration(trips=math.inf)
    if name == "zip":
        return _over_zip([iteration(argument, scope) for argument in arguments])
    if not arguments:
        return Iteration()
    if name in _SAME_LENGTH or name == "enumerate":
        return iteration(arguments[0], scope)
    if name == "cycle":
        inner = iteration(arguments[0], scope)
        return Iteration(trips=math.inf, data=inner.data, whole=inner.whole)
    if name == "islice":
        return _over_slice(iteration(arguments[0], scope), [evaluate(bound, scope) for bound in arguments[1:]])
    return Iteration()


def _over(value: Any) -> Iteration:
    """Looping over an object itself."""
    if isinstance(value, range):
        return Iteration(trips=len(value), start=value.start, stride=value.step)
    if any(base.__name__ == "tqdm" for base in type(value).__mro__):
        if value.iterable is not None:
            return _over(value.iterable)
        return Iteration(trips=value.total)
    if isinstance(value, (str, bytes)) or not hasattr(type(value), "__iter__"):
        return Iteration()
    size = length(value)
    if size is None and unwrap_loader(value) is None:
        return Iteration()
    return Iteration(trips=size, data=value, whole=size)


def _over_range(arguments: list[ast.expr], scope: Mapping[str, Any]) -> Iteration:
    values = [evaluate(argument, scope) for argument in arguments]
    if not values or not all(type(value) is int for value in values) or (len(values) == 3 and values[2] == 0):
        return Iteration()
    numbers = range(*values)
    found = Iteration(trips=len(numbers), start=numbers.start, stride=numbers.step)
    if numbers.step > 1 and numbers.start == 0:
        # The usual way to cut tensors into batches: range(0, len(x), batch_size).
        found.data, found.data_size, found.whole = numbers, numbers.stop, len(numbers)
    return found


def _over_zip(parts: list[Iteration]) -> Iteration:
    if not parts or any(part.trips is None for part in parts):
        return Iteration()
    shortest = min(part.trips for part in parts if part.trips is not None)
    data = next((part for part in parts if part.data is not None), Iteration())
    return Iteration(trips=shortest, data=data.data, data_size=data.data_size, whole=data.whole)


def _over_slice(inner: Iteration, bounds: list[Any]) -> Iteration:
    """islice(x, stop) or islice(x, start, stop[, step]); a stop of None is the end."""
    if not 1 <= len(bounds) <= 3 or not all(bound is None or type(bound) is int for bound in bounds):
        return Iteration()
    chosen = slice(*bounds)
    if inner.trips is not None and not math.isinf(inner.trips):
        trips: float | None = len(range(int(inner.trips))[chosen])
    elif chosen.stop is None:
        trips = inner.trips
    else:  # of a stream, taken to be long enough
        trips = len(range(chosen.start or 0, chosen.stop, chosen.step or 1))
    return Iteration(trips=trips, data=inner.data, data_size=inner.data_size, whole=inner.whole)
