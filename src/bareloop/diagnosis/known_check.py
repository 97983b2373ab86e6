"""A test for NaN or infinity whose answer is taken as known: "all is finite", without asking the device."""

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["KnownCheck"]


class KnownCheck:
    """Stands for the tensor that isnan, isinf (answer False) or isfinite (answer True) returns.

    As a truth value, through any / all / item / | / & / ~ and torch's functions of these names, it never touches the
    device. Whatever else is asked of it is asked of the real tensor, computed at that moment.
    """

    __slots__ = ("_answer", "_compute", "_elements")

    def __init__(self, answer: bool, elements: int, compute: Callable[[], Any]) -> None:
        self._answer = answer
        self._elements = elements
        self._compute = compute

    def __bool__(self) -> bool:
        return self._answer

    def __int__(self) -> int:
        return int(self._answer)

    def __float__(self) -> float:
        return float(self._answer)

    def item(self) -> bool:
        """The answer as Python's bool."""
        return self._answer

    def any(self, *args: Any, **kwargs: Any) -> Any:
        """Known as well over all elements; along a dimension it is the real tensor's."""
        if args or kwargs:
            return self._compute().any(*args, **kwargs)
        return KnownCheck(self._answer, 1, lambda: self._compute().any())

    def all(self, *args: Any, **kwargs: Any) -> Any:
        """Known as well over all elements; along a dimension it is the real tensor's."""
        if args or kwargs:
            return self._compute().all(*args, **kwargs)
        return KnownCheck(self._answer, 1, lambda: self._compute().all())

    def sum(self, *args: Any, **kwargs: Any) -> Any:
        """How many elements are so; known without arguments."""
        if args or kwargs:
            return self._compute().sum(*args, **kwargs)
        return KnownCount(self._elements if self._answer else 0)

    def __invert__(self) -> "KnownCheck":
        return KnownCheck(not self._answer, self._elements, lambda: ~self._compute())

    def __or__(self, other: Any) -> Any:
        if isinstance(other, KnownCheck):
            elements = max(self._elements, other._elements)
            return KnownCheck(self._answer or other._answer, elements, lambda: self._compute() | other._compute())
        return self._compute() | other

    def __and__(self, other: Any) -> Any:
        if isinstance(other, KnownCheck):
            elements = max(self._elements, other._elements)
            return KnownCheck(self._answer and other._answer, elements, lambda: self._compute() & other._compute())
        return self._compute() & other

    def __ror__(self, other: Any) -> Any:
        return other | self._compute()

    def __rand__(self, other: Any) -> Any:
        return other & self._compute()

    def __eq__(self, other: object) -> Any:
        return self._compute() == _real(other)

    def __ne__(self, other: object) -> Any:
        return self._compute() != _real(other)

    __hash__ = object.__hash__

    def __len__(self) -> int:
        return len(self._compute())

    def __getitem__(self, index: Any) -> Any:
        return self._compute()[index]

    def __getattr__(self, name: str) -> Any:
        if name in _CHANGES_NOTHING:
            return lambda *args, **kwargs: self
        return getattr(self._compute(), name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """torch.any(check), torch.logical_or(check, check), ...: known where the method of that name is."""
        method = _FUNCTIONS.get(getattr(func, "__name__", ""))
        if method is not None and not kwargs and all(isinstance(value, KnownCheck) for value in args):
            return method(*args)
        return func(*(_real(value) for value in args), **{key: _real(value) for key, value in (kwargs or {}).items()})


class KnownCount(int):
    """A known number of elements; `.item()` as on a tensor."""

    def item(self) -> int:
        """Itself."""
        return int(self)

    def cpu(self) -> "KnownCount":
        """Itself."""
        return self


def _real(value: Any) -> Any:
    return value._compute() if isinstance(value, KnownCheck) else value


_CHANGES_NOTHING = frozenset({"bool", "contiguous", "cpu", "cuda", "detach"})
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "any": KnownCheck.any,
    "all": KnownCheck.all,
    "sum": KnownCheck.sum,
    "logical_or": KnownCheck.__or__,
    "logical_and": KnownCheck.__and__,
    "logical_not": KnownCheck.__invert__,
    "bitwise_or": KnownCheck.__or__,
    "bitwise_and": KnownCheck.__and__,
    "bitwise_not": KnownCheck.__invert__,
}
