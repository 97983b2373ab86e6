"""How often is bareloop's verdict on speed right? False alarms on A/A, and the power to see a known slowdown.

    python benchmarks/verdicts.py --condition 5ms-idle --slowdowns 5 20

Launches are made exactly as `bareloop compare` makes them, except that all slowed scripts take turns in the same ones.
They are then dealt, without replacement, into comparisons of as many launches as a budget pays for; each is judged by the
code that the command uses. Timings mean something only when nothing else runs on the machine; `busy` conditions keep
one core busy on purpose.
"""

import argparse
import json
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from math import log
from pathlib import Path
from statistics import median

from bareloop.benchmark import as_ratio, difference, order, plan, resolution, speed_verdict
from bareloop.profiler.command import Command, command_from_words
from bareloop.profiler.turns import Participant, TurnKind, time_launch

PATIENT = str(Path(__file__).parent / "patients" / "steady.py")
UNITS = {"5ms": 180, "50ms": 1980}
Round = Mapping[str, float]


def spin() -> None:
    """Keeps one core busy."""
    while True:
        sum(range(10_000))


@contextmanager
def neighbour(busy: bool):
    """One busy core beside the measurement, or none."""
    process = multiprocessing.Process(target=spin, daemon=True) if busy else None
    if process is not None:
        process.start()
    try:
        yield
    finally:
        if process is not None:
            process.kill()


def command(units: int, slower: float) -> Command:
    """The patient, slowed by a share."""
    return command_from_words([PATIENT, "--units", str(units), "--slower", str(slower)])


def launch_once(units: int, slowdowns: Sequence[int], step_s: float, rounds: int, seed: int) -> list[Round]:
    """One launch: base, control and each slowed script, turn and turn about; key -> seconds per step, by round."""
    shares = {"base": 0.0, "control": 0.0, **{str(percent): percent / 100 for percent in slowdowns}}
    people = {
        name: Participant(command=command(units, share), warmup=4, optimizers=1) for name, share in shares.items()
    }
    steps = max(3, min(400, round(0.1 / step_s)))
    kinds = [TurnKind(key=name, participant=name, steps=steps, discard=1) for name in people]
    done = time_launch(people, kinds, order(list(people), rounds, seed), deadline_s=time.monotonic() + 120)
    return [{key: turn.s_per_step for key, turn in one.items()} for one in done.rounds]


def judged(launches: Sequence[Sequence[Round]], b: str) -> tuple[str, tuple[float, float, float], float]:
    """(verdict, ratio with interval, resolution) of a comparison made of these launches, as the command would give it."""
    ratio = difference([[log(r[b] / r["base"]) for r in rounds] for rounds in launches])
    control = difference([[log(r["control"] / r["base"]) for r in rounds] for rounds in launches])
    assert ratio is not None and control is not None
    return speed_verdict(ratio, control), as_ratio(ratio), resolution(ratio, control)


def dealt(pool: Sequence[Sequence[Round]], size: int, seed: int) -> list[list[Sequence[Round]]]:
    """The pool in disjoint comparisons of `size` launches, in random order."""
    shuffled = list(pool)
    random.Random(seed).shuffle(shuffled)
    return [shuffled[start : start + size] for start in range(0, len(shuffled) - size + 1, size)]


def drawn(pool: Sequence[Sequence[Round]], size: int, count: int, seed: int) -> list[list[Sequence[Round]]]:
    """`count` comparisons of `size` launches drawn with replacement: for the power curve where the pool is small."""
    chance = random.Random(seed)
    return [chance.choices(pool, k=size) for _ in range(count)]


def table(pool: Sequence[Sequence[Round]], keys: Sequence[str], sizes: Mapping[str, int], draws: int) -> list[str]:
    """Rows of a markdown table: comparison, budget, verdicts."""
    lines = [
        "| b against a | budget | launches | runs | slower | faster | equal | undecided | median ratio | can't see under |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, size in sizes.items():
        for key in keys:
            groups = drawn(pool, size, draws, 1) if draws else dealt(pool, size, 1)
            results = [judged(group, key) for group in groups]
            if not results:
                continue
            count = Counter(verdict for verdict, _, _ in results)
            ratio = sorted(ratio for _, (ratio, _, _), _ in results)[len(results) // 2]
            blind = sorted(share for _, _, share in results)[len(results) // 2]
            what = "A/A" if key == "control" else f"+{key} %"
            cells = [count[v] for v in ("slower", "faster", "equal", "undecided")]
            lines.append(
                f"| {what} | {name} | {size} | {len(results)}{' drawn' if draws else ''} | "
                + " | ".join(map(str, cells))
                + f" | {ratio:.3f} | {blind:.1%} |"
            )
    return lines


def collect(arguments: argparse.Namespace) -> list[list[Round]]:
    """Launches until there are enough of them or the time is up; written to --raw as they come."""
    size, busy = arguments.condition.split("-")
    pool: list[list[Round]] = []
    started_s = time.monotonic()
    with neighbour(busy == "busy"):
        step_s = launch_once(UNITS[size], [], 0.01, 2, 0)[-1]["base"]
        while len(pool) < arguments.launches and time.monotonic() - started_s < 60 * arguments.minutes:
            pool.append(launch_once(UNITS[size], arguments.slowdowns, step_s, arguments.rounds, len(pool)))
            if arguments.raw:
                arguments.raw.write_text(json.dumps(rounded(pool)))
            print(f"\rlaunch {len(pool)}", end="", file=sys.stderr)
    took_min = (time.monotonic() - started_s) / 60
    print(f"\n{arguments.condition}: {len(pool)} launches in {took_min:.1f} min", file=sys.stderr)
    return pool


def rounded(pool: Sequence[Sequence[Round]]) -> list[list[dict[str, float]]]:
    """The pool to the tenth of a microsecond, for a file of a reasonable size."""
    return [[{key: round(value, 7) for key, value in one.items()} for one in rounds] for rounds in pool]


def sizes(pool: Sequence[Sequence[Round]], startup_s: float) -> dict[str, int]:
    """Launches that `bareloop compare` would make of this script with half of, with, and with 4 times its budget."""
    step_s = median(one["base"] for rounds in pool for one in rounds)
    people = {"a": step_s, "b": step_s, "control": step_s}
    budgets = {"half (60 s)": 60, "default (120 s)": 120, "4x (480 s)": 480}
    return {
        name: plan(
            budget_s=budget, spent_s=5, startup_s=startup_s, step_s=people, discard=dict.fromkeys(people, 1)
        ).launches
        for name, budget in budgets.items()
    }


def main() -> None:
    """Measures one condition (or reads it from --read) and prints its table; the raw rounds go to --raw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--condition", choices=[f"{s}-{n}" for s in UNITS for n in ("idle", "busy")], required=True)
    parser.add_argument("--launches", type=int, default=320)
    parser.add_argument("--slowdowns", type=int, nargs="+", default=[1, 2, 5, 10, 20])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--draws", type=int, default=0, help="0 deals the launches out; else draws with replacement")
    parser.add_argument(
        "--startup", type=float, default=5.0, help="seconds that a launch of three takes to start and end"
    )
    parser.add_argument("--minutes", type=float, default=1e9, help="stop launching after this long")
    parser.add_argument("--raw", type=Path, help="write every round here, as JSON")
    parser.add_argument("--read", type=Path, help="judge the rounds of this file instead of measuring")
    arguments = parser.parse_args()
    pool = json.loads(arguments.read.read_text()) if arguments.read else collect(arguments)
    step_s = median(one["base"] for rounds in pool for one in rounds)
    keys = sorted((key for key in pool[0][0] if key != "base"), key=lambda key: (key != "control", key.zfill(3)))
    print(f"{arguments.condition}: base step {1000 * step_s:.2f} ms, {len(pool)} launches of {len(pool[0])} rounds\n")
    print("\n".join(table(pool, keys, sizes(pool, arguments.startup), arguments.draws)))


if __name__ == "__main__":
    main()
