"""What it costs to accumulate gradients: hivemind's ways and ours against PyTorch's own, counted, then timed.

    python benchmarks/accumulation.py --counts --records counts.json
    python benchmarks/accumulation.py --time --minutes 20 --records times.json    # again: adds launches to those there
    python benchmarks/accumulation.py --report --records times.json --figure docs/accumulation.svg

The models are those of hivemind's issue 566 at their published sizes, on the CPU, with inputs as small as they take.
Counts are exact, see `accumulating/counted.py` for how. Times: in each launch all ways live in one process and take
turns on the same parameters (`accumulating/timed.py`); a way's time is divided by native accumulation's of the same
round. The control is native against native. Only ratios are results.

glibc is told to keep freed memory (MALLOC_MMAP_MAX_=0, MALLOC_TRIM_THRESHOLD_ out of reach), as the caching allocators
of accelerators do. By default it returns large blocks at once, and each fresh gradient then costs page faults: a price
of this host's malloc that would be charged to whoever allocates more.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accumulating.counted import count
from accumulating.figure import draw
from accumulating.models import MODELS
from accumulating.report import count_table, time_table
from accumulating.timed import AGAIN, in_turns
from accumulating.ways import JOINED, WAYS, way
from contestants.launch import in_child, launch

from bareloop.benchmark import order

KEPT_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}


def main() -> None:
    """Counts, times, prints the tables, draws; numbers go to --records as soon as they are there."""
    arguments = parsed()
    if arguments.child:
        in_child(arguments.child, lambda job: counts(job) if job["kind"] == "counts" else times(job))
    os.environ.update({**KEPT_MEMORY, "HIVEMIND_LOGLEVEL": "ERROR"})
    records = {"counts": {}, "launches": []}
    if arguments.records and arguments.records.exists():
        records = json.loads(arguments.records.read_text())
    everything = not (arguments.counts or arguments.time or arguments.report)
    if everything or arguments.counts:
        counted = [name for name in arguments.ways if name not in JOINED]
        for name in arguments.models:
            job = {"kind": "counts", "model": name, "ways": ["alone", *counted]}
            records["counts"][name] = launch(__file__, job, 1, timeout_s=900.0)
            kept(arguments, records)
    if everything or arguments.time:
        timed(arguments, records)
    print(report(records))
    if arguments.figure:
        draw(records, arguments.figure)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", action="store_true", help="only count (default: count and time)")
    parser.add_argument("--time", action="store_true", help="only time")
    parser.add_argument("--report", action="store_true", help="only print what --records holds, and draw")
    parser.add_argument("--models", choices=MODELS, nargs="+", default=list(MODELS))
    ways = [name for name in WAYS if name != "alone"]
    parser.add_argument("--ways", choices=ways, nargs="+", default=ways)
    parser.add_argument("--minutes", type=float, default=20.0, help="no launch begins after that")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each way in a launch")
    parser.add_argument("--records", type=Path, help="file of all numbers; launches are added to those in it")
    parser.add_argument("--figure", type=Path, help="draw it here (SVG, needs matplotlib)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rounds < 4:
        parser.error(f"--rounds must be at least 4 for an interval, got {arguments.rounds}")
    if arguments.figure and find_spec("matplotlib") is None:
        parser.error("--figure needs matplotlib: pip install matplotlib")
    arguments.ways = [name for name in ways if name in ("native", *arguments.ways)]
    return arguments


def kept(arguments: argparse.Namespace, records: Mapping[str, Any]) -> None:
    """Writes the records, in one move so that an interrupt leaves the old ones."""
    if arguments.records:
        whole = arguments.records.with_suffix(".part")
        whole.write_text(json.dumps(rounded(records), indent=None, separators=(",", ":")) + "\n")
        whole.replace(arguments.records)


def rounded(value: Any) -> Any:
    """Records with seconds to five digits."""
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [rounded(entry) for entry in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def counts(job: Mapping[str, Any]) -> dict[str, Any]:
    """In the child: counts of each way on a fresh model."""
    model = MODELS[job["model"]]
    found: dict[str, Any] = {"ways": {}}
    for name in job["ways"]:
        torch.manual_seed(0)
        network, batch = model.build().train(), model.batch(model.samples)
        parameters = list(network.parameters())
        with way(name, parameters, model.samples) as opened:
            found["ways"][name] = asdict(count(opened, network, batch))
    return {**found, "parameters": sum(p.numel() for p in parameters), "tensors": len(parameters)}


def timed(arguments: argparse.Namespace, records: dict[str, Any]) -> None:
    """Launches until the time is up, always of the model that has fewest."""
    deadline_s = time.monotonic() + 60 * arguments.minutes
    names = [*arguments.ways, AGAIN]
    while time.monotonic() < deadline_s:
        done = Counter(each["model"] for each in records["launches"])
        model = min(arguments.models, key=lambda name: done[name])
        seed = done[model]
        job = {"kind": "times", "model": model, "orders": order(names, arguments.rounds, seed), "seed": seed}
        print(f"{model}: launch {seed + 1}", file=sys.stderr, flush=True)
        rounds = launch(__file__, job, 1, timeout_s=1800.0)
        records["launches"].append({"model": model, "seed": seed, "machine": machine(), "rounds": rounds})
        kept(arguments, records)


def times(job: Mapping[str, Any]) -> list[dict[str, dict[str, float]]]:
    """In the child: one launch."""
    return in_turns(job["model"], job["orders"], job["seed"])


def machine() -> str:
    """What the launch ran on."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    processor = names[0] if names else platform.processor()
    return f"{os.cpu_count()} cores of {processor}, torch {torch.__version__}, hivemind {version('hivemind')}"


def report(records: Mapping[str, Any]) -> str:
    """All tables."""
    lines = ["## Counts per micro-step, more than forward and backward alone"] if records["counts"] else []
    for name, found in records["counts"].items():
        lines += count_table(MODELS[name].label, found)
    if records["launches"]:
        lines += ["\n## Throughput against native accumulation"]
    for name in MODELS:
        launches = [each for each in records["launches"] if each["model"] == name]
        lines += time_table(MODELS[name].label, launches) if launches else []
    if len({each["model"] for each in records["launches"]}) > 1:
        lines += time_table("All models together", records["launches"])
    return "\n".join(lines)


if __name__ == "__main__":
    main()
