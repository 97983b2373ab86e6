"""Records of `benchmarks/accumulation.py` to ratios, verdicts and markdown tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import median
from typing import Any

from accumulating.timed import AGAIN
from bareloop.benchmark import Difference, difference, resolution, speed_verdict

__all__ = ["AT_LEAST", "Throughput", "at_least", "count_table", "label", "throughput", "time_table"]

AT_LEAST = 0.99
"""Of native throughput: what is claimed."""
LABELS = {
    "alone": "no accumulation",
    "native": "native (PyTorch)",
    "told": "native, and hivemind's tracker told of each step",
    "default": "hivemind 1.1.12, default",
    "reuse": "hivemind 1.1.12, reuse_grad_buffers",
    "zeroing": "hivemind as in 1.1.6 (zeroing, then adding)",
    "ours": "bareloop, FlatAccumulator",
    "compat": "bareloop, FlatAccumulator(compat=True)",
    "averager": "hivemind with bareloop's native_averager()",
    "hivemind": 'bareloop, join(engine="hivemind")',
    "torchft": 'bareloop, join(engine="torchft")',
    AGAIN: "control: native again",
}
_ROWS = (*((name, "native") for name in LABELS if name != AGAIN), ("averager", "told"), (AGAIN, "native"))
"""Of the table of times: (a way, what its time is divided by)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """Of one way on one model, relative to native accumulation or to another way."""

    ratio: float
    low: float
    high: float
    control: tuple[float, float, float]
    """(ratio, low, high) of native against native."""
    verdict: str
    """Whether it is at least `AT_LEAST`: "yes", "no" or "undecided"."""
    resolution: float
    """Share of a micro-step below which a difference can't be seen."""
    step_s: float
    """The calls around forward and backward, in the middle of a round; median of launches."""
    launches: int


def label(name: str) -> str:
    """What a way is called in tables and figures."""
    return LABELS[name]


def throughput(
    launches: Sequence[Mapping[str, Any]], name: str, clock: str = "wall_s", base: str = "native"
) -> Throughput | None:
    """`name` against `base` over the launches that have both; None when there are too few.

    Args:
        clock: "wall_s", or "cpu_s" for the CPU time of the training thread: without what other programs take from it, and
            without what a way leaves to other threads.
    """
    rounds = [launch["rounds"] for launch in launches if {name, base} <= launch["rounds"][0].keys()]
    if not rounds:
        return None

    def of(over: str, under: str) -> Difference | None:
        logs = [[log(each[over][clock] / each[under][clock]) for each in launch] for launch in rounds]
        return difference(logs, pool=True)  # both halves of a pair come from one process and one model

    slower, control = of(name, base), of(AGAIN, "native")
    if slower is None or control is None:
        return None
    return Throughput(
        ratio=exp(-slower.estimate),
        low=exp(-slower.high),
        high=exp(-slower.low),
        control=(exp(-control.estimate), exp(-control.high), exp(-control.low)),
        verdict=at_least(AT_LEAST, slower, control),
        resolution=resolution(slower, control),
        step_s=median(median(each[name]["step_s"] for each in launch) for launch in rounds),
        launches=len(rounds),
    )


def at_least(share: float, slower: Difference, control: Difference) -> str:
    """Whether throughput is at least `share` of native: "yes", "no" or "undecided".

    Yes when the whole interval is above `share` and the control, native against native, stays within that of 1: else
    this machine can't tell. No when it is slower by more than the control explains, and the whole interval is below.

    Args:
        share: below 1.
        slower: log(time / native time).
        control: log(native time / native time).
    """
    limit = -log(share)
    if slower.high <= limit and max(abs(control.low), abs(control.high)) <= limit:
        return "yes"
    if slower.low > limit and speed_verdict(slower, control) == "slower":
        return "no"
    return "undecided"


def count_table(model: str, found: Mapping[str, Any]) -> list[str]:
    """Rows of a markdown table: what each way does more than forward and backward alone, per micro-step."""
    size, alone = 4 * found["parameters"], found["ways"]["alone"]
    lines = [
        f"\n{model}: {found['parameters'] / 1e6:.1f}M parameters in {found['tensors']} tensors;"
        f" forward and backward alone: {alone['ops']} ops, {alone['bytes'] / 1e9:.3f} GB\n",
        "| | ops | GB | bytes per parameter | host reads | Python calls | gradient memory | shared host memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, way in found["ways"].items():
        if name == "alone":
            continue
        moved = way["bytes"] - alone["bytes"]
        lines.append(
            f"| {label(name)} | {way['ops'] - alone['ops']:+d} | {moved / 1e9:+.3f} | {moved / found['parameters']:.1f}"
            f" | {way['host_reads'] - alone['host_reads']:+d} | {way['python_calls'] - alone['python_calls']:+d}"
            f" | {way['gradient_bytes'] / size:.2f}x | {way['host_bytes'] / size:.2f}x |"
        )
    return lines


def time_table(model: str, launches: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows of a markdown table: throughput of each way relative to native, and the calls around a micro-step.

    Args:
        launches: of one model or of several: ratios are of pairs within a launch.
    """
    timed = {name for launch in launches for name in launch["rounds"][0]} - {"native"}
    medians_s = sorted(
        median(each["native"]["wall_s"] for launch in launches if launch["model"] == name for each in launch["rounds"])
        for name in {launch["model"] for launch in launches}
    )
    native_ms = " to ".join(f"{1e3 * seconds:.0f}" for seconds in dict.fromkeys((medians_s[0], medians_s[-1])))
    rounds = sum(len(launch["rounds"]) for launch in launches)
    lines = [
        f"\n{model}: a micro-step of {native_ms} ms; {len(launches)} launches, {rounds} rounds\n",
        f"| | throughput of native's, 95 % interval | at least {AT_LEAST}? | can't see under"
        f" | by CPU time | at least {AT_LEAST}? | can't see under | zero_grad() and step() |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, base in [row for row in _ROWS if row[0] in timed and row[1] in timed | {"native"}]:
        cells: list[str] = []
        for clock in ("wall_s", "cpu_s"):
            each = throughput(launches, name, clock, base)
            verdict = "" if name == AGAIN else each.verdict if each else "undecided"
            cells += (
                [f"{each.ratio:.3f} [{each.low:.3f}, {each.high:.3f}]", verdict, f"{each.resolution:.1%}"]
                if each
                else ["too few launches", verdict, ""]
            )
        against = "" if base == "native" else ", against the tracker's cost alone"
        lines.append(f"| {label(name)}{against} | {' | '.join(cells)} | {_step_cell(launches, name)} |")
    return lines


def _step_cell(launches: Sequence[Mapping[str, Any]], name: str) -> str:
    if name == AGAIN:
        return ""
    of = [
        median(each[name]["step_s"] for each in launch["rounds"]) for launch in launches if name in launch["rounds"][0]
    ]
    return f"{1e3 * median(of):.2f} ms"
