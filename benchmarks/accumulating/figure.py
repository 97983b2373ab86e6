"""The figure of `docs/`: throughput, time of step() and bytes against the size of the model, as in hivemind's issue 566."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accumulating.report import AT_LEAST, label, throughput
from accumulating.timed import AGAIN

__all__ = ["draw"]

_STYLES = {
    "native": ("black", "s"),
    "told": ("#8c564b", "x"),
    "default": ("#d62728", "o"),
    "zeroing": ("#ff9896", "v"),
    "reuse": ("#9467bd", "^"),
    "compat": ("#17becf", "D"),
    "ours": ("#1f77b4", "o"),
    "averager": ("#2ca02c", "P"),
    "hivemind": ("#e377c2", "*"),
    "torchft": ("#bcbd22", "*"),
    AGAIN: ("gray", "x"),
}
_SHOWN = (0.8, 1.06)
"""Of native throughput."""
_WIDEST = 0.15
"""A point with a wider interval, of a way with few launches on this model, says nothing and is left out."""
_APART = 1.02
"""Factor between the places of two ways of one model, so that their intervals do not hide each other."""


def draw(records: Mapping[str, Any], path: Path) -> None:
    """Draws the records to `path`, an SVG.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no model has both counts and a launch.
    """
    import matplotlib

    matplotlib.use("svg")
    # Text stays text, and the same records give the same file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "bareloop", "font.size": 9})
    from matplotlib import pyplot

    rows = [
        (found["parameters"] / 1e6, found, [each for each in records["launches"] if each["model"] == name])
        for name, found in records["counts"].items()
    ]
    rows = sorted(rows, key=lambda row: row[0])
    if not any(launches for _, _, launches in rows):
        raise ValueError(
            "records hold no model with counts and launches: run the benchmark with --counts and with --time"
        )
    figure, (speed, step, moved) = pyplot.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    _speed(speed, rows)
    _step(step, rows)
    _moved(moved, rows)
    for axes in (speed, step, moved):
        axes.set_xscale("log")
        axes.set_xlabel("parameters, million")
        axes.set_xticks([row[0] for row in rows], [f"{row[0]:.0f}" for row in rows])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    handles: dict[str, Any] = {}
    for axes in (step, speed):
        found, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, found, strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, metadata={"Date": None, "Creator": "benchmarks/accumulation.py"})
    pyplot.close(figure)
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def _names(rows: list[tuple[float, Any, Any]]) -> list[str]:
    timed = {name for _, _, launches in rows for launch in launches for name in launch["rounds"][0]}
    return [name for name in _STYLES if name in timed]


def _speed(axes: Any, rows: list[tuple[float, Any, Any]]) -> None:
    names = [name for name in _names(rows) if name != "native"]
    axes.axhline(1, color="black", linewidth=0.8)
    axes.axhline(AT_LEAST, color="black", linewidth=0.8, linestyle=":")
    for place, name in enumerate(names):
        color, marker = _STYLES[name]
        points = [(size, throughput(launches, name)) for size, _, launches in rows]
        known = [(size * _APART ** (place - len(names) / 2), each) for size, each in points if each]
        known = [(size, each) for size, each in known if each.high - each.low <= _WIDEST]
        if known:
            ratios = [each.ratio for _, each in known]
            errors = [[each.ratio - each.low for _, each in known], [each.high - each.ratio for _, each in known]]
            sizes = [size for size, _ in known]
            axes.errorbar(
                sizes, ratios, errors, color=color, marker=marker, ms=4, lw=0, elinewidth=1, label=label(name)
            )
    axes.set_ylim(*_SHOWN)
    axes.set_title(f"Throughput, native = 1 (95 % intervals up to {_WIDEST})")


def _step(axes: Any, rows: list[tuple[float, Any, Any]]) -> None:
    for name in _names(rows):
        if name in ("native", AGAIN):
            continue
        color, marker = _STYLES[name]
        points = [(size, throughput(launches, name)) for size, _, launches in rows]
        known = [(size, 1e3 * each.step_s) for size, each in points if each]
        sizes, milliseconds = [size for size, _ in known], [each for _, each in known]
        axes.plot(sizes, milliseconds, color=color, marker=marker, ms=4, lw=1, label=label(name))
    axes.axhline(0.5, color="black", linewidth=0.8, linestyle=":")
    axes.set_yscale("log")
    axes.set_title("zero_grad() and step() between rounds, ms")


def _moved(axes: Any, rows: list[tuple[float, Any, Any]]) -> None:
    for name in _names(rows):
        if name == AGAIN:
            continue
        color, marker = _STYLES[name]
        points = [
            (size, (found["ways"][name]["bytes"] - found["ways"]["alone"]["bytes"]) / found["parameters"])
            for size, found, _ in rows
            if name in found["ways"]
        ]
        axes.plot([size for size, _ in points], [each for _, each in points], color=color, marker=marker, ms=4, lw=1)
    axes.set_ylim(bottom=0)
    axes.set_title("Bytes moved to accumulate, per parameter")
