"""The outermost module calls of a training loop: which modules they are, and when they run.

While looking (the first steps) `Module.__call__` itself is watched, which costs a Python call per module. Once the
outermost modules are known only their classes' `__call__` is, so that nothing is stored on a user's module: it pickles
and copies as before.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

from bareloop.profiler.probes.phase_clock import PhaseClock, phase_index

__all__ = ["RootCalls"]


class RootCalls:
    """Reports the outermost calls of modules that own parameters."""

    def __init__(self, clock: PhaseClock, called: Callable[[Any, tuple[Any, ...], dict[str, Any], bool], None]) -> None:
        """`called(module, args, kwargs, training)` is told of each outermost call before it runs."""
        self.clock = clock
        self.called = called
        self.roots: dict[int, Any] = {}
        """id -> module whose outermost calls trained."""
        self.inner_calls: dict[int, list[int]] = {}
        """id(module) -> [calls outside backward, calls inside backward], while looking."""
        self.autocast: str | None = None
        """dtype of autocast inside the outermost modules, while looking: some frameworks enter it within forward."""
        self._trained: set[int] = set()
        self._depth = threading.local()
        self._undo: list[Callable[[], None]] = []
        self._forward = phase_index("forward")
        self._backward = phase_index("backward")

    def look(self) -> None:
        """Watches every module call."""
        import torch

        module = torch.nn.Module
        original = module.__call__
        module.__call__ = self._wrap(original, every=True)  # type: ignore[method-assign]
        self._undo.append(lambda: setattr(module, "__call__", original))

    def settle(self) -> None:
        """Watches the outermost modules only, by their class."""
        self.stop()
        for kind in {type(root) for root in self.roots.values()}:
            inherited = "__call__" not in kind.__dict__
            original = kind.__call__
            kind.__call__ = self._wrap(original, every=False)
            undo = (
                functools.partial(delattr, kind, "__call__")
                if inherited
                else functools.partial(setattr, kind, "__call__", original)
            )
            self._undo.append(undo)

    def stop(self) -> None:
        """Puts every `__call__` back."""
        while self._undo:
            self._undo.pop()()

    def _wrap(self, original: Callable[..., Any], *, every: bool) -> Callable[..., Any]:
        import torch

        depth, clock = self._depth, self.clock
        compiling = torch.compiler.is_compiling

        @functools.wraps(original)
        def __call__(module: Any, *args: Any, **kwargs: Any) -> Any:
            if compiling() or threading.get_ident() != clock.thread:
                return original(module, *args, **kwargs)
            outer = getattr(depth, "value", 0)
            if every:
                self._count(module)
            watched = outer == 0 and clock.stack[-1] != self._backward and self._owns(module, every)
            if watched:
                self._outermost(module, args, kwargs, torch.is_grad_enabled())
                clock.push(self._forward)
            depth.value = outer + 1
            try:
                return original(module, *args, **kwargs)
            finally:
                depth.value = outer
                if watched:
                    clock.pop()

        return __call__

    def _owns(self, module: Any, every: bool) -> bool:
        if id(module) in self.roots:
            return True
        return every and next(module.parameters(), None) is not None

    def _count(self, module: Any) -> None:
        calls = self.inner_calls.setdefault(id(module), [0, 0])
        calls[self.clock.stack[-1] == self._backward] += 1
        if self.autocast is None:
            self.autocast = _autocast_dtype()

    def _outermost(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], with_gradient: bool) -> None:
        """A forward trains when autograd records it and the module is not in the evaluation mode it was seen out of."""
        if with_gradient and module.training:
            self._trained.add(id(module))
        training = with_gradient and (module.training or id(module) not in self._trained)
        if training:
            self.roots[id(module)] = module
        self.called(module, args, kwargs, training)


def _autocast_dtype() -> str | None:
    import torch

    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    return None
