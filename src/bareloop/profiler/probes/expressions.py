"""Values of expressions in the user's source, worked out without running any of the user's code.

Names, attributes held in instance dictionaries, subscripts of plain containers, arithmetic and comparison of numbers,
and `len`, `int`, `min`, `max`, `math.ceil` and `math.floor`. Anything else is UNKNOWN: a property or an overloaded
operator may do anything.
"""

import ast
import builtins
import inspect
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

__all__ = ["UNKNOWN", "evaluate", "length"]


class _Unknown:
    """The type of UNKNOWN."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN: Final = _Unknown()

_NUMBERS = (int, float)
_PLAIN = (int, float, str, bool, type(None))
_BINARY: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_ORDER: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_SAME: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_PURE: tuple[Any, ...] = (len, int, min, max, math.ceil, math.floor)


def evaluate(node: ast.AST, scope: Mapping[str, Any]) -> Any:
    """The value of an expression where its names have the values of `scope`, or UNKNOWN."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return scope[node.id] if node.id in scope else getattr(builtins, node.id, UNKNOWN)
    if isinstance(node, ast.Attribute):
        return _attribute(evaluate(node.value, scope), node.attr)
    if isinstance(node, ast.Subscript):
        return _subscript(evaluate(node.value, scope), evaluate(node.slice, scope))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _number(_BINARY[type(node.op)], evaluate(node.left, scope), evaluate(node.right, scope))
    if isinstance(node, ast.UnaryOp):
        return _unary(node, scope)
    if isinstance(node, ast.Compare):
        return _compare(node, scope)
    if isinstance(node, ast.BoolOp):
        return _all_or_any(node, scope)
    if isinstance(node, ast.Call):
        return _call(node, scope)
    if isinstance(node, ast.IfExp):
        test = evaluate(node.test, scope)
        return evaluate(node.body if test else node.orelse, scope) if isinstance(test, _PLAIN) else UNKNOWN
    return UNKNOWN


def length(value: Any) -> int | None:
    """`len(value)`, None when it has none or refuses."""
    if not hasattr(type(value), "__len__"):
        return None
    try:
        return len(value)
    except (TypeError, NotImplementedError, AttributeError, RuntimeError, ValueError):  # how streams say "no length"
        return None


def _attribute(owner: Any, name: str) -> Any:
    if owner is UNKNOWN:
        return UNKNOWN
    held = getattr(owner, "__dict__", {})
    if isinstance(held, Mapping) and name in held:
        return held[name]
    if inspect.ismodule(owner):
        return UNKNOWN
    declared = inspect.getattr_static(owner, name, UNKNOWN)
    if inspect.ismemberdescriptor(declared):  # a slot
        return getattr(owner, name, UNKNOWN)
    if name == "shape" and type(owner).__module__.partition(".")[0] in ("torch", "numpy"):
        return tuple(owner.shape)
    return declared if isinstance(declared, _PLAIN) else UNKNOWN


def _subscript(owner: Any, key: Any) -> Any:
    if owner is UNKNOWN or not isinstance(key, (str, int)):
        return UNKNOWN
    if type(owner) is dict:
        return owner.get(key, UNKNOWN)
    if type(owner) in (list, tuple) and isinstance(key, int) and -len(owner) <= key < len(owner):
        return owner[key]
    return UNKNOWN


def _number(apply: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    if not (type(left) in (int, float, bool) and type(right) in (int, float, bool)):
        return UNKNOWN
    try:
        return apply(left, right)
    except (ZeroDivisionError, OverflowError):
        return UNKNOWN


def _unary(node: ast.UnaryOp, scope: Mapping[str, Any]) -> Any:
    value = evaluate(node.operand, scope)
    if type(value) not in (int, float, bool, str, type(None)):
        return UNKNOWN
    if isinstance(node.op, ast.Not):
        return not value
    return -value if isinstance(node.op, ast.USub) and isinstance(value, _NUMBERS) else UNKNOWN


def _compare(node: ast.Compare, scope: Mapping[str, Any]) -> Any:
    values = [evaluate(part, scope) for part in (node.left, *node.comparators)]
    answer: Any = True
    for left, compare, right in zip(values, node.ops, values[1:], strict=False):
        if left is UNKNOWN or right is UNKNOWN:
            return UNKNOWN
        if type(compare) in _SAME and (isinstance(compare, (ast.Is, ast.IsNot)) or _both_plain(left, right)):
            answer = answer and _SAME[type(compare)](left, right)
        elif type(compare) in _ORDER and type(left) in (int, float) and type(right) in (int, float):
            answer = answer and _ORDER[type(compare)](left, right)
        else:
            return UNKNOWN
    return answer


def _both_plain(left: Any, right: Any) -> bool:
    return isinstance(left, _PLAIN) and isinstance(right, _PLAIN)


def _all_or_any(node: ast.BoolOp, scope: Mapping[str, Any]) -> Any:
    """and / or of plain values; one operand that decides is enough."""
    decides = isinstance(node.op, ast.Or)
    values = [evaluate(part, scope) for part in node.values]
    known = [value for value in values if value is not UNKNOWN and isinstance(value, _PLAIN)]
    if any(bool(value) is decides for value in known):
        return decides
    return (not decides) if len(known) == len(values) else UNKNOWN


def _call(node: ast.Call, scope: Mapping[str, Any]) -> Any:
    function = evaluate(node.func, scope)
    if node.keywords or not any(function is pure for pure in _PURE):
        return UNKNOWN
    arguments = [evaluate(argument, scope) for argument in node.args]
    if function is len:
        size = length(arguments[0]) if len(arguments) == 1 and arguments[0] is not UNKNOWN else None
        return UNKNOWN if size is None else size
    if not arguments or not all(type(argument) in (int, float) for argument in arguments):
        return UNKNOWN
    if len(arguments) < 2 and function in (min, max):
        return UNKNOWN
    try:
        return function(*arguments)
    except (OverflowError, ValueError):  # ceil of an infinity or a NaN
        return UNKNOWN
