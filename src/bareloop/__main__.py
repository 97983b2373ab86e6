"""The command: parse, call, render, exit code.

Exit codes: 0 a report was made; 1 a --fail-on condition is shown; 2 usage; 3 bareloop failed; 4 the script failed by
itself; 5 a --fail-on condition could not be decided; 130 interrupted.
"""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bareloop import __version__
from bareloop.profiler.command import command_from_side, command_from_words
from bareloop.profiler.failures import RunFailed, ScriptFailed, UsageError
from bareloop.profiler.options import Options

if TYPE_CHECKING:
    from bareloop.diagnosis.evidence import Comparison, Diagnosis

__all__ = ["app", "main"]

# Both spellings of a flag name it: --fail-on and --fail_on.
NAMES = {"token_normalize_func": lambda name: name.replace("_", "-"), "help_option_names": ["-h", "--help"]}
# The first word that is no option of ours ends our options: the rest is the script's, whatever it looks like.
SCRIPT_WORDS = {**NAMES, "allow_interspersed_args": False}

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings=NAMES,
    help="Where the time of a PyTorch training script goes, for any script, unmodified.",
)


class Condition(StrEnum):
    """What --fail-on can ask of a comparison."""

    slower = "slower"
    unequal_work = "unequal-work"
    unequal_math = "unequal-math"
    finding = "finding"


class FindingCondition(StrEnum):
    """What --fail-on can ask of a diagnosis of one script."""

    finding = "finding"


DEFAULTS = Options()
FAIL_ON = "Exit with 1 when this is shown, with 5 when it can't be decided; may be repeated"
WHAT = "slower (b against a), unequal-work, unequal-math or finding"
STEPS = "Timed steps in a turn [default: as many as take 0.25 s]."
STDIN = "Standard input of the script [default: empty]."

Steps = Annotated[int | None, typer.Option(metavar="N", help=STEPS)]
Warmup = Annotated[int, typer.Option(metavar="N", help="Steps of each launch that are never timed.")]
Budget = Annotated[float, typer.Option(metavar="SECONDS", help="Seconds for everything.")]
Launches = Annotated[int | None, typer.Option(metavar="N", help="Fresh launches of each script [default: what fits].")]
NoAblate = Annotated[bool, typer.Option("--no-ablate", help="Count causes, but do not try taking them away.")]
Stdin = Annotated[Path | None, typer.Option(metavar="FILE", exists=True, dir_okay=False, resolve_path=True, help=STDIN)]
Seed = Annotated[int, typer.Option(metavar="N", help="Seed of the order of turns.")]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the record to FILE as JSON too.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress line.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"bareloop {__version__}")
        raise typer.Exit()


@app.callback()
def _bareloop(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version.")
    ] = False,
) -> None:
    """Where the time of a PyTorch training script goes, for any script, unmodified."""


@app.command(context_settings=SCRIPT_WORDS, short_help="Where the time of one script goes.")
def explain(
    words: Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGS]", show_default=False)],
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as in python -m.")] = False,
    steps: Steps = DEFAULTS.steps,
    warmup: Warmup = DEFAULTS.warmup,
    budget: Budget = DEFAULTS.budget_s,
    launches: Launches = DEFAULTS.launches,
    no_ablate: NoAblate = not DEFAULTS.ablate,
    stdin: Stdin = None,
    seed: Seed = DEFAULTS.seed,
    json: Json = None,
    fail_on: Annotated[list[FindingCondition] | None, typer.Option(metavar="finding", help=f"{FAIL_ON}.")] = None,
    quiet: Quiet = False,
) -> None:
    """Where the time of one script goes, what causes it, and what turning each cause off saves.

    Everything after SCRIPT is the script's. A launcher's whole command goes after --, as in:
    bareloop explain -- torchrun --nproc-per-node 2 train.py
    """

    def run(progress: Callable[[str], None]) -> "Diagnosis":
        options = Options(
            steps=steps,
            warmup=warmup,
            budget_s=budget,
            launches=launches,
            ablate=not no_ablate,
            stdin=_text(stdin),
            seed=seed,
        )
        command = command_from_words(("-m", *words) if module else words)
        from bareloop.diagnosis.explain import explain as diagnose

        return diagnose(command, options, progress=progress)

    _answer(run, json=json, conditions=fail_on or (), quiet=quiet)


@app.command(short_help="Whether two scripts do the same, and why one is slower.")
def compare(
    a: Annotated[str, typer.Argument(help='A script or a whole command in one word: "a.py --lr 3e-4".')],
    b: Annotated[str, typer.Argument(help="The other one.")],
    steps: Steps = DEFAULTS.steps,
    warmup: Warmup = DEFAULTS.warmup,
    budget: Budget = DEFAULTS.budget_s,
    launches: Launches = DEFAULTS.launches,
    no_ablate: NoAblate = not DEFAULTS.ablate,
    stdin: Stdin = None,
    seed: Seed = DEFAULTS.seed,
    json: Json = None,
    fail_on: Annotated[list[Condition] | None, typer.Option(metavar="WHAT", help=f"{FAIL_ON}: {WHAT}.")] = None,
    quiet: Quiet = False,
) -> None:
    """Whether two scripts do equal work and equal math, how their speed compares, and what causes the difference."""

    def run(progress: Callable[[str], None]) -> "Comparison":
        options = Options(
            steps=steps,
            warmup=warmup,
            budget_s=budget,
            launches=launches,
            ablate=not no_ablate,
            stdin=_text(stdin),
            seed=seed,
        )
        commands = command_from_side(a), command_from_side(b)
        from bareloop.diagnosis.compare import compare as judge

        return judge(*commands, options, progress=progress)

    _answer(run, json=json, conditions=fail_on or (), quiet=quiet)


@app.command(short_help="The report of a stored record.")
def show(file: Annotated[Path, typer.Argument(help="A file that --json wrote.")]) -> None:
    """The report of a stored record again; needs no torch."""

    def run(progress: Callable[[str], None]) -> "Comparison | Diagnosis":
        from bareloop.renderers.json import read

        return read(file)

    _answer(run, json=None, conditions=(), quiet=True)


def main() -> None:
    """The console script `bareloop`."""
    app(prog_name="bareloop")


def _answer(
    run: Callable[[Callable[[str], None]], "Comparison | Diagnosis"],
    *,
    json: Path | None,
    conditions: Sequence[StrEnum],
    quiet: bool,
) -> None:
    """Runs, reports and ends with the exit code.

    Raises:
        typer.Exit: always.
    """
    from bareloop.renderers.json import require_writable
    from bareloop.renderers.progress import progress_line

    try:
        if json is not None:
            require_writable(json)
        with progress_line(quiet=quiet) as progress:
            record = run(progress)
        code = _report(record, json, conditions)
    except UsageError as error:
        code = _fail(2, f"bareloop: {error}")
    except ScriptFailed as error:
        code = _fail(4, f"bareloop: {error}", output=error.output)
    except RunFailed as error:
        code = _fail(3, f"bareloop: {error}")
    except KeyboardInterrupt:
        code = _fail(130, "bareloop: interrupted; what was started is stopped, no report was made")
    except Exception as error:
        code = _fail(3, _unexpected(error))
    raise typer.Exit(code)


def _report(record: "Comparison | Diagnosis", json: Path | None, conditions: Sequence[StrEnum]) -> int:
    from bareloop.renderers.exit_code import exit_code
    from bareloop.renderers.json import write
    from bareloop.renderers.terminal import print_report

    try:
        print_report(record)
    finally:  # minutes of measuring are in the record: a report that can't be printed must not lose it
        if json is not None:
            write(record, json)
    return exit_code(record, [condition.value for condition in conditions])


def _fail(code: int, sentence: str, *, output: str = "") -> int:
    if output:
        print(output.rstrip("\n"), file=sys.stderr)
    print(sentence, file=sys.stderr)
    return code


def _unexpected(error: Exception) -> str:
    if os.environ.get("BARELOOP_DEBUG") == "1":
        traceback.print_exc()
    what = f"{type(error).__name__}: {error}".rstrip(": ")
    return f"bareloop failed: {what} (this says nothing about the script); please report with BARELOOP_DEBUG=1"


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


if __name__ == "__main__":
    main()
