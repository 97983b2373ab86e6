"""Who owns the loop of a run, and in which version: what a cause asks before it names a setting."""

from bareloop.trace import Trace

__all__ = ["framework", "major", "versioned"]

_PACKAGES = {"lightning": ("lightning", "pytorch_lightning", "pytorch-lightning")}


def framework(trace: Trace) -> str:
    """ "transformers", "lightning", "accelerate", or "plain" for a loop that the script wrote itself."""
    return trace.first.environment.framework or "plain"


def major(trace: Trace, package: str) -> int | None:
    """Major version of `package` in the run; None when the process had not imported it or its version is no number."""
    version = _version(trace, package)
    head = (version or "").split(".")[0]
    return int(head) if head.isdigit() else None


def versioned(trace: Trace) -> str:
    """The framework with its version for a sentence, e.g. "transformers 5.24.0"."""
    name = framework(trace)
    if name == "plain":
        return "a plain loop"
    version = _version(trace, name)
    return f"{name} {version}" if version else name


def _version(trace: Trace, package: str) -> str | None:
    packages = trace.first.environment.packages
    return next((packages[name] for name in _PACKAGES.get(package, (package,)) if name in packages), None)
