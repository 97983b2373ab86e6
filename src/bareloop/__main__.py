"""The command: parse, call, render, exit code.

Exit codes: 0 a report was made; 1 a --fail-on condition is shown, or `swarm watch --once` saw no peer; 2 usage; 3 bareloop
failed; 4 the script failed by itself; 5 a --fail-on condition could not be decided; 130 interrupted.
"""

import dataclasses
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from json import dumps
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


swarm = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Training with other machines: meet, watch a run, plan one."
)
app.add_typer(swarm, name="swarm", short_help="Training with other machines: serve, watch, plan.")


EngineName = StrEnum("EngineName", {"hivemind": "hivemind", "torchft": "torchft"})
CompressionName = StrEnum("CompressionName", {"none": "none", "fp16": "fp16", "eight_bit": "8bit"})

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


EngineOption = Annotated[EngineName, typer.Option(help="Over the internet, or in a cluster.")]
ADDRESS = "Address as `swarm serve` prints it; may be repeated, or several with commas between."
RATES = "Samples (or labels) a second of each peer: 20,20,5 or 20x8."
BANDWIDTH = "Of each peer's link: 100Mbit, or 200Mbit/20Mbit for down/up; one for all or one a peer."


@swarm.command(short_help="Run the address that peers start from.")
def serve(
    engine: EngineOption = EngineName.hivemind,
    host: Annotated[str, typer.Option(help="Address to listen at; the default is this machine only.")] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(metavar="N", help="0: any free one [default: 31337; torchft 29510, and the next].")
    ] = None,
    announce: Annotated[str | None, typer.Option(metavar="HOST", help="What others reach --host by.")] = None,
    identity: Annotated[
        Path | None, typer.Option(metavar="FILE", help="hivemind: keep the key here, so that the address stays.")
    ] = None,
    peers: Annotated[
        list[str] | None, typer.Option(metavar="ADDRESS", help="hivemind: a DHT to become a part of.")
    ] = None,
) -> None:
    """Runs a node of hivemind's DHT, or torchft's lighthouse, until Ctrl-C; prints the address to give to others."""
    with _swarm_errors():
        from bareloop.swarm.serve import ServeOptions, ended_by_signal, serving
        from bareloop.swarm.tables import served_text

        options = ServeOptions(
            engine=engine.value,
            host=host,
            port=port,
            announce=announce,
            identity=identity,
            peers=_addresses(peers),
        )
        with ended_by_signal() as ended, serving(options) as served:
            print(served_text(served), flush=True)
            ended.wait()


@swarm.command(short_help="Who is in a run, and how it goes.")
def watch(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="The name that its peers gave to swarm.join.")],
    peers: Annotated[list[str], typer.Option(metavar="ADDRESS", help=ADDRESS)],
    engine: EngineOption = EngineName.hivemind,
    every: Annotated[float, typer.Option(metavar="SECONDS", help="Between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="One look; exit with 1 when no peer is seen.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a look, on a line.")] = False,
) -> None:
    """A live table of a run's peers: samples towards the target, throughput, rounds, failures. Ends with Ctrl-C."""
    with _swarm_errors():
        from bareloop.swarm.serve import ended_by_signal
        from bareloop.swarm.tables import follow, text_of, watch_table
        from bareloop.swarm.watch import WatchOptions, views, watching

        options = WatchOptions(run_id=run_id, peers=_addresses(peers), engine=engine.value, every_s=every)
        with ended_by_signal() as ended, watching(options) as source:
            looks = views(options, source, ended)
            if once:
                view = next(looks)
                print(dumps(dataclasses.asdict(view)) if json else text_of(watch_table(view)), end="\n" if json else "")
                raise typer.Exit(0 if view.live else 1)
            if json:
                for view in looks:
                    print(dumps(dataclasses.asdict(view)), flush=True)
            else:
                follow(looks)


@swarm.command(short_help="What a round would cost.")
def plan(
    parameters: Annotated[str, typer.Option(metavar="N", help="Trained parameters: 124M.")],
    samples_per_s: Annotated[str, typer.Option(metavar="RATES", help=RATES)],
    bandwidth: Annotated[str, typer.Option(metavar="BANDWIDTHS", help=BANDWIDTH)],
    target_batch: Annotated[str, typer.Option(metavar="N", help="Samples of all peers that make a round.")],
    latency: Annotated[str, typer.Option(metavar="TIME", help="Round trip between peers, as ping shows it.")] = "20ms",
    compression: Annotated[CompressionName, typer.Option(help="Of gradients on the wire.")] = CompressionName.none,
    efficiency: Annotated[float, typer.Option(metavar="SHARE", help="Of the time, to be spent computing.")] = 0.9,
    engine: EngineOption = EngineName.hivemind,
    json: Annotated[bool, typer.Option("--json", help="The record as JSON.")] = False,
) -> None:
    """Time of a round, efficiency and speed-up of a swarm, and the target batch that keeps a wanted efficiency."""
    with _swarm_errors():
        from bareloop.swarm import quantities
        from bareloop.swarm.plan import Setup
        from bareloop.swarm.plan import plan as planned
        from bareloop.swarm.tables import plan_table, text_of

        setup = Setup(
            parameters=quantities.count(parameters, name="parameters"),
            samples_per_s=quantities.rates(samples_per_s, name="samples-per-s"),
            bandwidths=quantities.bandwidths(bandwidth, name="bandwidth"),
            latency_s=quantities.seconds(latency, name="latency"),
            target_batch=quantities.count(target_batch, name="target-batch"),
            engine=engine.value,
            compression=compression.value,
            efficiency=efficiency,
        )
        record = planned(setup)
        print(dumps(dataclasses.asdict(record)) if json else text_of(plan_table(record)), end="\n" if json else "")


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


@contextmanager
def _swarm_errors() -> Iterator[None]:
    """Turns what a command of the swarm may raise into a sentence and an exit code.

    Raises:
        typer.Exit: for anything that was raised.
    """
    from bareloop.swarm.serve import ServeFailed
    from bareloop.swarm.watch import Unreachable

    try:
        yield
    except typer.Exit:
        raise
    except ValueError as error:
        code = _fail(2, f"bareloop: {error}")
    except (ServeFailed, Unreachable, ImportError) as error:
        code = _fail(3, f"bareloop: {error}")
    except KeyboardInterrupt:
        code = _fail(130, "bareloop: interrupted")
    except Exception as error:
        code = _fail(3, _unexpected(error))
    else:
        return
    raise typer.Exit(code)


def _addresses(words: Sequence[str] | None) -> tuple[str, ...]:
    """Addresses from options that may hold several, with commas or spaces between."""
    return tuple(part for word in words or () for part in word.replace(",", " ").split())


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
