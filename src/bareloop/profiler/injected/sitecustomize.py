"""Wakes bareloop's probes in a Python process that `bareloop` started, once torch is imported.

Python imports this file at start-up because its folder stands first on PYTHONPATH; a `sitecustomize` that was there
already is run right after. It must stand alone: bareloop need not be installed in the script's environment.
"""

import importlib.util
import os
import sys


class _TorchLoader:
    """Torch's own loader; wakes the probes after it has run."""

    def __init__(self, loader):
        self._loader = loader

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _TorchFinder)]
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _wake()


class _TorchFinder:
    """Stands first on the meta path until torch is imported. To be looked for is not enough: transformers and others
    ask whether there is a torch, and import it later or never."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None else None
            if spec is not None and spec.loader is not None:
                spec.loader = _TorchLoader(spec.loader)  # type: ignore[assignment]
            if spec is not None:
                return spec
        return None


def _wake():
    """Loads the bareloop that started us, by path, so that no folder of ours stands on the script's sys.path."""
    source = os.environ["BARELOOP_SOURCE"]
    if "bareloop" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "bareloop", os.path.join(source, "__init__.py"), submodule_search_locations=[source]
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["bareloop"] = module
        spec.loader.exec_module(module)
    from bareloop.profiler.probes import agent

    agent.wake(os.environ["BARELOOP_SESSION"])


def _chain():
    """Runs the sitecustomize that ours stands in front of, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != here]
    ours = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        if ours is not None:
            sys.modules.setdefault("sitecustomize", ours)


if os.environ.get("BARELOOP_SESSION") and os.environ.get("BARELOOP_DISABLE") != "1":
    sys.meta_path.insert(0, _TorchFinder())
_chain()
