"""bareloop: where a PyTorch training script's time goes, and a trainer at the cost of a bare loop.

    import bareloop

    diagnosis = bareloop.explain("train.py", ["--lr", "3e-4"])
    comparison = bareloop.compare("trainer.py", "loop.py")

    from bareloop import Trainer, lean, steps

    Trainer(model=model, args=args, train_dataset=rows).train()
    LeanSFTTrainer = lean(trl.SFTTrainer)
    for step in steps(model, optimizer, batches, loss_fn, accumulate=8, max_norm=1.0): ...

    from bareloop import swarm

    with swarm.join("my-run", target_batch=4096, engine="hivemind", peers=["/ip4/..."]) as run:
        for step in steps(model, optimizer, batches, loss_fn, accumulate=run): ...

Importing this loads neither torch nor anything else beyond the standard library: bareloop's probes import it in the
process of the user's script. The loop's names load what they need when they are first used.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from bareloop.extras import needs

if TYPE_CHECKING:
    from bareloop.diagnosis.evidence import Comparison, Diagnosis
    from bareloop.trainer.hf import Trainer, lean
    from bareloop.trainer.loop import steps
    from bareloop.trainer.options import LeanOptions

__all__ = ["LeanOptions", "Trainer", "__version__", "compare", "explain", "lean", "steps", "swarm"]  # pyright: ignore[reportUnsupportedDunderAll]

__version__ = "0.1.0"

_LAZY = {
    "LeanOptions": "bareloop.trainer.options",
    "Trainer": "bareloop.trainer.hf",
    "lean": "bareloop.trainer.hf",
    "steps": "bareloop.trainer.loop",
}
"""Name -> module: what needs torch, loaded when it is first asked for. `swarm` is a module, and loads its own names so."""


def __getattr__(name: str) -> Any:
    """Loads one of the loop's names.

    Raises:
        AttributeError: no such name.
        ImportError: what it needs is not installed.
    """
    if name == "swarm":
        return importlib.import_module("bareloop.swarm")
    if name not in _LAZY:
        raise AttributeError(f"module 'bareloop' has no attribute {name!r}")
    with needs(f"bareloop.{name}", "hf"):
        found = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def explain(
    script: str | Sequence[str],
    argv: Sequence[str] = (),
    *,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> "Diagnosis":
    """Where a step of `script` spends its time, what causes it, and what turning each cause off saves.

    Args:
        script: path of a Python file, or the words of a whole command: ["torchrun", "--nproc-per-node", "2",
            "train.py"] or ["-m", "package.module"].
        argv: arguments of the script.
        progress: called with a sentence whenever something new starts.
        options: fields of `bareloop.profiler.options.Options`, e.g. budget_s=60.

    Raises:
        bareloop.profiler.failures.UsageError: no such script, or an option out of range.
        bareloop.profiler.failures.RunFailed: no report could be made.
        bareloop.profiler.failures.ScriptFailed: the script ended by its own fault; its output is in `.output`.
    """
    from bareloop.diagnosis.explain import explain as run
    from bareloop.profiler.command import command_from_words
    from bareloop.profiler.options import Options

    words = (script,) if isinstance(script, str) else tuple(script)
    return run(command_from_words((*words, *argv)), Options(**options), progress=progress or _silent)


def compare(
    a: str | Sequence[str],
    b: str | Sequence[str],
    *,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> "Comparison":
    """Whether two scripts do equal work and equal math, how long b takes against a, and what causes the difference.

    Args:
        a: a command line as in a shell ("trainer.py --lr 3e-4"), or its words in a list.
        b: the same for the other script.
        progress: called with a sentence whenever something new starts.
        options: fields of `bareloop.profiler.options.Options`, e.g. budget_s=60.

    Raises:
        as `explain`.
    """
    from bareloop.diagnosis.compare import compare as run
    from bareloop.profiler.command import command_from_side, command_from_words
    from bareloop.profiler.options import Options

    sides = [command_from_side(side) if isinstance(side, str) else command_from_words(side) for side in (a, b)]
    return run(sides[0], sides[1], Options(**options), progress=progress or _silent)


def _silent(sentence: str) -> None:
    """The progress of a caller who did not ask for any."""
