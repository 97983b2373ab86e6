"""Frozen dataclasses to plain JSON values and back, driven by their type hints.

Infinity and NaN are written as the strings "Infinity", "-Infinity" and "NaN": a strict JSON reader
(a browser, jq) then opens our files too.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

__all__ = ["decode", "encode"]

_SPECIAL = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def encode(value: Any) -> Any:
    """The JSON form of a record: dataclasses become dicts, tuples lists, non-finite floats strings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in typing.cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in typing.cast("list[Any]", value)]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return value


def decode(kind: Any, value: Any) -> Any:
    """The record of type `kind` that `encode` wrote as `value`.

    Unknown keys are skipped, so an older bareloop opens a newer file of the same schema number.

    Raises:
        TypeError: a key without a default is missing.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(arguments, value)
    if isinstance(value, Mapping):
        return _decode_mapping(kind, typing.cast("Mapping[str, Any]", value))
    if origin is tuple:
        inner = arguments[0] if arguments else Any
        return tuple(decode(inner, item) for item in value)
    if isinstance(value, str) and value in _SPECIAL and kind is not str:
        return _SPECIAL[value]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def _decode_mapping(kind: Any, value: Mapping[str, Any]) -> Any:
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        known = {field.name for field in dataclasses.fields(kind)}
        build = typing.cast("type[Any]", kind)
        return build(**{key: decode(hints[key], item) for key, item in value.items() if key in known})
    arguments = typing.get_args(kind)
    inner = arguments[1] if len(arguments) > 1 else Any
    return {key: decode(inner, item) for key, item in value.items()}


def _decode_union(arguments: tuple[Any, ...], value: Any) -> Any:
    if value is None:
        return None
    inner = [argument for argument in arguments if argument is not types.NoneType]
    if len(inner) == 1:
        return decode(inner[0], value)
    if isinstance(value, list):
        fitting = [argument for argument in inner if typing.get_origin(argument) is tuple]
    elif isinstance(value, str) and str in inner:
        return value
    else:
        fitting = [argument for argument in inner if typing.get_origin(argument) is None]
    return decode(fitting[0], value) if fitting else typing.cast("Any", value)
