"""What bareloop's light probes cost a step, in the windows that are timed.

    python benchmarks/probe_overhead.py

One process takes turns with the probes in and with all wrappers put away (only the hooks that end a step stay), so both
halves of a pair come from the same process. The control is the same process against itself. Beside it stands what the
report prints for the same turns: hook calls times the cost of one, measured in that process.
"""

import argparse
import os
import time
from pathlib import Path
from statistics import fmean

from bareloop.benchmark import difference, order
from bareloop.profiler.command import command_from_words
from bareloop.profiler.turns import Participant, TurnKind, time_launch

HERE = Path(__file__).parent / "patients"


def main() -> None:
    """Prints one line per step length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--units", type=int, nargs="+", default=[180, 720], help="180 are a step of about 5 ms")
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    print("| step | probes cost, 95 % interval | control | the report says |")
    print("|---|---|---|---|")
    for units in arguments.units:
        print(line(units, arguments.launches, arguments.rounds))


def line(units: int, launches: int, rounds: int) -> str:
    """A row of the table for one step length."""
    command = command_from_words([str(HERE / "steady.py"), "--units", str(units)])
    away = {"causes": [{"module": "without_probes", "data": {}}]}
    kinds = [
        TurnKind(key=key, participant="a", steps=20, discard=1, ablation=away if key == "away" else None)
        for key in ("with", "again", "away")
    ]
    done = [
        time_launch(
            {"a": Participant(command=command, warmup=4, optimizers=1)},
            kinds,
            order(["with", "again", "away"], rounds, seed),
            deadline_s=time.monotonic() + 300,
        )
        for seed in range(launches)
    ]
    medians = [[{k: t.median_s_per_step for k, t in r.items()} for r in launch.rounds] for launch in done]
    cost = difference([[(r["with"] + r["again"]) / 2 - r["away"] for r in rounds] for rounds in medians], pool=True)
    control = difference([[r["with"] - r["again"] for r in rounds] for rounds in medians], pool=True)
    assert cost is not None and control is not None
    step_s = fmean(r["away"] for rounds in medians for r in rounds)
    printed = fmean(turn["with"].probe_s for launch in done for turn in launch.rounds)
    share = f"{cost.estimate / step_s:.2%} [{cost.low / step_s:.2%}, {cost.high / step_s:.2%}]"
    return (
        f"| {step_s * 1e3:.1f} ms | {cost.estimate * 1e6:.1f} us = {share} "
        f"| {control.estimate * 1e6:.1f} us [{control.low * 1e6:.1f}, {control.high * 1e6:.1f}] | {printed * 1e6:.1f} us |"
    )


if __name__ == "__main__":
    main()
