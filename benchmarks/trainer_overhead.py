"""What each way to train costs beyond the bare loop that does the same work: counted, then timed.

    python benchmarks/trainer_overhead.py --counts
    python benchmarks/trainer_overhead.py --time --sizes 2ms 10ms --launches 10 --json times.json

Counts are exact, see `contestants/counted.py` for how. Times: in each of several launches all contestants live in one
process and take turns (`contestants/turns.py`); a contestant's time is divided by its bare loop's of the same round,
and the interval is over launches. The control is a second copy of that bare loop. Only ratios are results.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import log
from pathlib import Path
from statistics import median
from typing import Any

from contestants import CONTESTANTS, CONTROLS, train
from contestants.launch import in_child, launch
from contestants.task import Setting

from bareloop.benchmark import as_ratio, difference, order, resolution, speed_verdict

SIZES: Mapping[str, tuple[float, dict[str, int]]] = {
    "2ms": (0.002, {"layers": 1, "width": 32, "block": 16, "batch": 1}),
    "10ms": (0.010, {"layers": 2, "width": 128, "block": 48, "batch": 2}),
    "100ms": (0.100, {"layers": 4, "width": 256, "block": 128, "batch": 2}),
}
"""Name -> seconds of a step of one micro-batch on one core of the 2020s, and sizes."""
TURN_S = 0.1
FEWEST_STEPS = 3
EQUAL_WITHIN = 0.01
COUNTS = ("ops", "all_ops", "host_reads", "collectives", "copies", "python_calls")


def main() -> None:
    """Prints the tables; all numbers go to --json."""
    arguments = parsed()
    if arguments.child:
        in_child(arguments.child, lambda job: counts(job) if job["kind"] == "counts" else times(job))
    both = not (arguments.counts or arguments.time)
    results: dict[str, list[dict[str, Any]]] = {"counts": [], "times": []}
    for processes in arguments.processes:
        if both or arguments.counts:
            results["counts"] += counted(arguments, processes)
        if both or arguments.time:
            for accumulate in arguments.accumulate:
                for size in arguments.sizes:
                    results["times"].append(timed(arguments, processes, accumulate, size))
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1))


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", action="store_true", help="only count (default: count and time)")
    parser.add_argument("--time", action="store_true", help="only time")
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 12, 24], help="of the counted models")
    parser.add_argument("--accumulate", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--max-norm", type=float, default=1.0, help="clip of all contestants; 0 for none")
    parser.add_argument("--sizes", choices=SIZES, nargs="+", default=list(SIZES), help="of the timed steps")
    parser.add_argument("--launches", type=int, default=8, help="at least 2")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each contestant in a launch")
    parser.add_argument("--only", choices=CONTESTANTS, nargs="+", default=list(CONTESTANTS))
    parser.add_argument("--json", type=Path, help="write every number here")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.launches < 2:
        parser.error(f"--launches must be at least 2 for an interval, got {arguments.launches}")
    bare_too = {CONTESTANTS[name].against for name in arguments.only} | {"bare"}
    arguments.only = [name for name in CONTESTANTS if name in bare_too or name in arguments.only]
    return arguments


def counted(arguments: argparse.Namespace, processes: int) -> list[dict[str, Any]]:
    """Counts of all settings, in one launch; prints a table of each."""
    settings = [
        asdict(Setting(layers=layers, accumulate=accumulate, processes=processes, max_norm=arguments.max_norm))
        for accumulate in arguments.accumulate
        for layers in arguments.layers
    ]
    job = {"kind": "counts", "settings": settings, "names": arguments.only}
    found = launch(__file__, job, processes, timeout_s=600.0 * len(settings))
    for setting, results in zip(settings, found, strict=True):
        print("\n".join(count_table(setting, results)), flush=True)
    return [{"setting": setting, "results": results} for setting, results in zip(settings, found, strict=True)]


def counts(job: Mapping[str, Any]) -> list[dict[str, dict[str, float]]]:
    """In the child: [setting][contestant][count], and how far its weights ended from the bare loop's."""
    from accelerate.state import GradientState
    from contestants.counted import count

    results = []
    for fields in job["settings"]:
        setting, of_setting, weights = Setting(**fields), {}, {}
        for name in job["names"]:
            GradientState._reset_state()
            found, weights[name] = count(train(name), setting)
            pairs = zip(weights[name], weights["bare"], strict=True)
            apart = max(float((own - bare).abs().max()) for own, bare in pairs)
            of_setting[name] = {**asdict(found), "weights_apart": apart}
        results.append(of_setting)
    return results


def count_table(setting: Mapping[str, Any], results: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Rows of a markdown table; in brackets, the difference to the bare loop that does the same work."""
    micro_steps = setting["accumulate"]
    lines = [
        f"\nCounts per step and process: {setting['layers']} layers, {micro_steps} micro-steps per step, "
        f"{setting['processes']} process(es)\n",
        "| | ops | ops, inner ones too | host reads | collectives | copies | Python calls | more per micro-step | weights |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, found in results.items():
        bare = results[CONTESTANTS[name].against]
        cells = [cell(found[key], found[key] - bare[key]) for key in COUNTS]
        more = (found["python_calls"] - bare["python_calls"]) / micro_steps
        apart = found["weights_apart"]
        cells += [f"{more:+.1f}", "same bits" if apart == 0 else f"{apart:.0e} apart"]
        lines.append(f"| {CONTESTANTS[name].label} | {' | '.join(cells)} |")
    return lines


def cell(value: float, more: float) -> str:
    """A count and its difference."""
    return f"{value:g}" if more == 0 else f"{value:g} ({more:+g})"


def timed(arguments: argparse.Namespace, processes: int, accumulate: int, size: str) -> dict[str, Any]:
    """Several launches of one setting; prints its table."""
    step_s, sizes = SIZES[size]
    setting = Setting(**sizes, accumulate=accumulate, processes=processes, max_norm=arguments.max_norm)
    names = [*arguments.only, *(again for bare, again in CONTROLS.items() if bare in arguments.only)]
    steps = max(FEWEST_STEPS, round(TURN_S / step_s / accumulate))
    launches = []
    for seed in range(arguments.launches):
        turns = order(names, arguments.rounds, seed)
        job = {"kind": "times", "setting": asdict(setting), "order": turns, "steps": steps}
        launches.append(launch(__file__, job, processes, timeout_s=3600.0))
        print(f"\r{size}: launch {seed + 1} of {arguments.launches}", end="", file=sys.stderr)
    print("", file=sys.stderr)
    results = {name: compared(launches, name, CONTESTANTS[name].against) for name in arguments.only}
    results = {name: result for name, result in results.items() if name != CONTESTANTS[name].against}
    if {"lean", "stock"} <= results.keys():
        results["lean against stock"] = compared(launches, "lean", "stock", CONTESTANTS["lean"].against)
    base_s = median(one["bare"] for rounds in launches for one in rounds)
    print("\n".join(time_table(setting, base_s, len(launches), arguments.rounds, results)), flush=True)
    return {"setting": asdict(setting), "size": size, "launches": launches, "results": results}


def times(job: Mapping[str, Any]) -> list[dict[str, float]]:
    """In the child: seconds per step, [round][contestant]."""
    from contestants.turns import time_in_turns

    contestants = {name: train(name) for name in sorted(job["order"][0])}
    return time_in_turns(contestants, Setting(**job["setting"]), job["order"], job["steps"])


def compared(
    launches: Sequence[Sequence[Mapping[str, float]]], name: str, against: str, bare: str | None = None
) -> dict[str, Any]:
    """Ratio of one contestant's time to another's and of the control's, each with its 95 % interval, and the verdict."""
    bare = bare or against

    def of(over: str, under: str):
        found = difference([[log(one[over] / one[under]) for one in rounds] for rounds in launches])
        assert found is not None, "an interval needs two launches"
        return found

    ratio, control = of(name, against), of(CONTROLS[bare], bare)
    return {
        "ratio": as_ratio(ratio),
        "control": as_ratio(control),
        "verdict": speed_verdict(ratio, control, equal_within=EQUAL_WITHIN),
        "resolution": resolution(ratio, control),
    }


def time_table(
    setting: Setting, base_s: float, launches: int, rounds: int, results: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Rows of a markdown table."""
    lines = [
        f"\nTime against the bare loop of the same work: a step of {1e3 * base_s:.1f} ms (bare loop), "
        f"{setting.accumulate} micro-steps per step, {setting.processes} process(es), "
        f"{launches} launches of {rounds} rounds\n",
        f"| | ratio, 95 % interval | control | verdict (equal: within {EQUAL_WITHIN:.0%}) | can't see under |",
        "|---|---|---|---|---|",
    ]
    for name, found in results.items():
        label = CONTESTANTS[name].label if name in CONTESTANTS else name
        ratio, control = (
            f"{centre:.3f} [{low:.3f}, {high:.3f}]" for centre, low, high in (found["ratio"], found["control"])
        )
        lines.append(f"| {label} | {ratio} | {control} | {found['verdict']} | {found['resolution']:.1%} |")
    return lines


if __name__ == "__main__":
    main()
