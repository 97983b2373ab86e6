"""Measured rounds to Markdown: constants fitted to some of the points, errors at all of them, and an extrapolation.

The constants are fitted to rounds of 2, 4 and 8 peers at the four corners of bandwidth and latency, by non-negative least
squares of the relative error; those of hivemind's gathering to 2 and 4 peers alone. All other points (3 peers with a
gradient of another size, and the link in the middle for any number of peers) are predicted.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from scipy.optimize import nnls

from bareloop.swarm.plan import (
    ENGINE_COSTS,
    EngineCosts,
    Setup,
    average_s,
    first_parts_bytes,
    plan,
    prepare_s,
    sent_share,
)

__all__ = ["fitted", "report"]

Point = dict[str, Any]
Column = Callable[[Point], float]
FIT_PEERS = (2, 4, 8)
FIT_LINKS = ((25, 2), (25, 40), (100, 2), (100, 40))
SCALES = (8, 32, 128, 512, 1000)


def report(points: Sequence[Point]) -> str:
    """The whole page."""
    parts = []
    for engine in ENGINE_COSTS:
        mine = [point for point in points if point["engine"] == engine]
        costs = fitted(engine, mine)
        parts += [f"## {engine}\n", _constants(engine, costs), _errors(mine, costs), _table(mine, costs)]
    return "\n".join([*parts, "## Extrapolated to 1,000 peers\n", _extrapolation()])


def fitted(engine: str, points: Sequence[Point]) -> EngineCosts:
    """Constants of one engine's rounds."""
    fit = [point for point in points if _is_fit(point)]
    ring = engine == "torchft"
    prepare: list[Column] = [
        lambda _: 1.0,
        lambda p: p["rtt_ms"] / 1e3,
        (lambda p: (p["peers"] - 1) * p["rtt_ms"] / 1e3) if ring else (lambda p: float(p["peers"])),
    ]
    # 8 peers of hivemind are 24 processes: how they gather on few cores says nothing of peers with machines of their own
    apart = [p for p in fit if ring or p["peers"] < 8]
    (base, trips, each), _ = _solved(prepare, apart, [p["prepare_s"] for p in apart], "round_s")
    turns = [(trip / 20, share / 20) for trip in range(10, 25) for share in range(21)] if ring else [(0.0, 0.0)]
    average = min((_averaging(fit, *turn) for turn in turns), key=lambda found: found[1])[0]
    return EngineCosts(
        **average,
        prepare_base_s=base,
        prepare_trips=trips,
        prepare_per_peer_s=0.0 if ring else each,
        prepare_trips_per_peer=each if ring else 0.0,
    )


def _averaging(fit: Sequence[Point], turn_trips: float, turn_share: float) -> tuple[dict[str, float], float]:
    """Constants of the all-reduce for given ones of a ring's turn, and the sum of squares that they leave."""

    def turns_s(point: Point) -> float:
        turns = 2 * (point["peers"] - 1)
        piece_s, trip_s = _transfer_s(point) / turns, point["rtt_ms"] / 1e3
        return turns * max(piece_s, turn_trips * trip_s, bool(turn_trips) * trip_s / 2 + turn_share * piece_s)

    overhead = 0.035 if turn_trips else 0.046  # headers: as rounds have it in which nothing else is waited for
    columns: list[Column] = [_gap_s, lambda p: p["rtt_ms"] / 1e3, lambda _: 1.0]
    known = [turns_s({**p, "mbit": p["mbit"] / (1 + overhead)}) for p in fit]
    if turn_trips:  # a ring has no gap
        columns = columns[1:]
    found, left = _solved(columns, fit, [p["average_s"] - k for p, k in zip(fit, known, strict=True)], "average_s")
    found = [overhead, *([0.0] if turn_trips else []), *found]
    names = ("overhead", "gap_parts", "average_trips", "average_base_s")
    return {**dict(zip(names, found, strict=True)), "turn_trips": turn_trips, "turn_share": turn_share}, left


def _solved(
    columns: Sequence[Column], points: Sequence[Point], wanted: Sequence[float], scale: str
) -> tuple[list[float], float]:
    """Non-negative factors of the columns whose sum is nearest to `wanted`, relative to each point's `scale`, and what is left
    of the sum of squares."""
    weights = np.array([1 / point[scale] for point in points])
    matrix = np.array([[column(point) for column in columns] for point in points])
    found, left = nnls(matrix * weights[:, None], np.array(wanted) * weights)
    return [float(value) for value in found], float(left)


def _transfer_s(point: Point) -> float:
    setup = _setup(point)
    return sent_share(setup) * setup.gradient_bytes * 8 / setup.slowest_bits_per_s


def _gap_s(point: Point) -> float:
    setup = _setup(point)
    return first_parts_bytes(setup) * 8 / setup.slowest_bits_per_s * 1.046


def _setup(point: Point) -> Setup:
    return Setup(
        parameters=point["parameters"],
        samples_per_s=(1.0,) * point["peers"],
        bandwidths=((point["mbit"] * 1e6,) * 2,),
        latency_s=point["rtt_ms"] / 1e3,
        target_batch=1,
        engine=point["engine"],
        compression=point["compression"],
    )


def _is_fit(point: Point) -> bool:
    link = (point["mbit"], point["rtt_ms"])
    return point["peers"] in FIT_PEERS and link in FIT_LINKS


def _predicted(point: Point, costs: EngineCosts) -> tuple[float, float]:
    setup = _setup(point)
    return prepare_s(setup, costs), average_s(setup, costs)


def _error(point: Point, costs: EngineCosts) -> float:
    return sum(_predicted(point, costs)) / point["round_s"] - 1


def _constants(engine: str, costs: EngineCosts) -> str:
    shipped = asdict(ENGINE_COSTS[engine])
    lines = ["| constant | fitted here | in plan.py |", "|---|---|---|"]
    for name, value in asdict(costs).items():
        lines.append(f"| {name} | {value:.4f} | {shipped[name]} |")
    return "\n".join(lines) + "\n"


def _errors(points: Sequence[Point], costs: EngineCosts) -> str:
    lines = []
    for name, wanted in (("fitted", True), ("held out", False)):
        errors = [abs(_error(point, ENGINE_COSTS[point["engine"]])) for point in points if _is_fit(point) is wanted]
        if errors:
            lines.append(
                f"Error of the round as plan.py predicts it, {name} points ({len(errors)}): median"
                f" {statistics.median(errors):.1%}, largest {max(errors):.1%}."
            )
    wrong = sum(one.get("wrong", 0) > 0 for point in points for one in point["rounds"])
    total = sum(len(point["rounds"]) for point in points)
    lines.append(f"Rounds that left a peer without the mean: {wrong} of {total} (left out of the times).")
    return "  \n".join(lines) + "\n"


def _table(points: Sequence[Point], costs: EngineCosts) -> str:
    head = "peers | parameters | on the wire | Mbit/s | round trip ms | gather s | average s | round s | predicted s | error | "
    lines = [f"| {head}point |", "|---" * 11 + "|"]
    for point in sorted(points, key=lambda p: (p["peers"], p["parameters"], p["mbit"], p["rtt_ms"])):
        shipped = ENGINE_COSTS[point["engine"]]
        predicted = sum(_predicted(point, shipped))
        cells = [
            *(point["peers"], f"{point['parameters']:,}", point["compression"], point["mbit"], point["rtt_ms"]),
            *(f"{point[name]:.3f}" for name in ("prepare_s", "average_s", "round_s")),
            *(f"{predicted:.3f}", f"{_error(point, shipped):+.1%}", "fitted" if _is_fit(point) else "held out"),
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def _extrapolation() -> str:
    lines = [
        "| engine | on the wire | peers | gather s | average s | efficiency at 64k | speed-up at 64k | batch for 90 % |",
        "|---" * 8 + "|",
    ]
    for engine, compression in (("hivemind", "none"), ("hivemind", "8bit"), ("torchft", "none")):
        for peers in SCALES:
            found = plan(
                Setup(
                    parameters=124e6,
                    samples_per_s=(20.0,) * peers,
                    bandwidths=((100e6, 100e6),),
                    latency_s=0.04,
                    target_batch=65_536,
                    engine=engine,
                    compression=compression,
                )
            )
            cells = [engine, compression, f"{peers:,}", f"{found.prepare_s:.1f}", f"{found.average_s:.1f}"]
            cells += [f"{found.efficiency:.0%}", f"{found.speed_up:.1f}", f"{found.target_batch_for_efficiency:,.0f}"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
