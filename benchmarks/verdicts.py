"""How often is bareloop's verdict on speed right? False alarms on A/A, and the power to see a known slowdown.

    python benchmarks/verdicts.py --condition 5ms-idle --launches 156 --slowdowns 5 20

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
    steps = max(3, min(400, round(0.25 / step_s)))
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


def main() -> None:
    """Measures one condition and prints its tables; the raw rounds go to --raw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--condition", choices=[f"{s}-{n}" for s in UNITS for n in ("idle", "busy")], required=True)
    parser.add_argument("--launches", type=int, default=156)
    parser.add_argument("--slowdowns", type=int, nargs="+", default=[1, 2, 5, 10, 20])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--draws", type=int, default=0, help="0 deals the launches out; else draws with replacement")
    parser.add_argument("--raw", type=Path, help="JSON of every round")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop launching after this long")
    arguments = parser.parse_args()
    size, busy = arguments.condition.split("-")
    pool: list[list[Round]] = []
    started_s = time.monotonic()
    with neighbour(busy == "busy"):
        step_s = launch_once(UNITS[size], [], 0.01, 2, 0)[-1]["base"]
        while len(pool) < arguments.launches and time.monotonic() - started_s < 60 * arguments.minutes:
            pool.append(launch_once(UNITS[size], arguments.slowdowns, step_s, arguments.rounds, len(pool)))
            if arguments.raw:
                arguments.raw.write_text(json.dumps(pool))
            print(f"\rlaunch {len(pool)}", end="", file=sys.stderr)
    took_s = time.monotonic() - started_s
    wall = plan(budget_s=120, spent_s=6, startup_s=4.0, step_s={"a": step_s, "b": step_s, "control": step_s})
    sizes = {
        "half (60 s)": max(2, wall.launches // 2),
        "default (120 s)": wall.launches,
        "4x (480 s)": 4 * wall.launches,
    }
    print(f"\n{arguments.condition}: base step {1000 * step_s:.2f} ms, {len(pool)} launches in {took_s / 60:.1f} min\n")
    print("\n".join(table(pool, ["control", *map(str, arguments.slowdowns)], sizes, arguments.draws)))


if __name__ == "__main__":
    main()
