"""Putting something else in the place of a function, and the very same thing back afterwards."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from bareloop.diagnosis.call_sites import same_file

__all__ = ["NothingToReplace", "Place", "places", "replaced"]

Place = tuple[Any, str]
"""An object (module, class or instance) and the name of its attribute."""

_ABSENT = object()
_FOUND: dict[tuple[str, str], tuple[Place, ...]] = {}


class NothingToReplace(LookupError):
    """What a cause wanted to take away is not where it looked: the ablation can't be made, and proves nothing."""


@contextmanager
def replaced(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Sets each `owner.name = value` inside; after it every name holds what stood there, or is gone if nothing did.

    An attribute that a class inherits is not in its own dictionary before, and is not after.
    """
    undo: list[tuple[Any, str, Any]] = []
    try:
        for owner, name, value in changes:
            before = vars(owner).get(name, _ABSENT)
            setattr(owner, name, value)
            undo.append((owner, name, before))
        yield
    finally:
        for owner, name, before in reversed(undo):
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


def places(file: str, qualified_name: str) -> tuple[Place, ...]:
    """Every module and class of this process where the function `qualified_name` of `file` is looked up.

    A module that wrote `from it import function` is among them. Empty for a function inside a function: its only
    reference is a local variable, which nobody else can change.
    """
    key = (file, qualified_name)
    if key not in _FOUND:
        found = tuple(_search(file, qualified_name))
        if not found:
            return ()
        _FOUND[key] = found
    return _FOUND[key]


def _search(file: str, qualified_name: str) -> Iterator[Place]:
    *path, name = qualified_name.split(".")
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    for module in modules:
        source = module.__dict__.get("__file__")
        if not source or not same_file(source, file):
            continue
        owner: Any = module
        for part in path:
            owner = vars(owner).get(part) if isinstance(owner, (ModuleType, type)) else None
        if not isinstance(owner, (ModuleType, type)) or name not in vars(owner):
            continue
        yield owner, name
        if owner is module:
            yield from _aliases(modules, module, vars(module)[name])


def _aliases(modules: list[ModuleType], home: ModuleType, function: Any) -> Iterator[Place]:
    for module in modules:
        if module is not home:
            yield from ((module, alias) for alias, value in list(module.__dict__.items()) if value is function)
