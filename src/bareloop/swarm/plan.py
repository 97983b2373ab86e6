"""What a round of a swarm will cost, before anybody rents a machine: a formula with constants fitted to measured rounds.

    round = compute + prepare + average
    compute = target_batch / sum of samples_per_s
    average = 2 (n - 1) / n * bytes * 8 / bandwidth * (1 + overhead) + waits for round trips

Each of n peers sends and receives 2 (n - 1) / n of the gradient, in a butterfly (hivemind) and in a ring (gloo, for
torchft) alike, and the slowest link holds up all. The constants were fitted to rounds of 2 to 8
peers at 25 to 100 Mbit/s and 2 to 40 ms; `docs/swarm-plan.md` has the errors, point by point. Beyond that it extrapolates,
and a `Plan` says so. It assumes that peers compute at a steady rate and do not compute while they average.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

__all__ = [
    "COMPRESSIONS",
    "ENGINE_COSTS",
    "EngineCosts",
    "Plan",
    "Setup",
    "average_s",
    "first_parts_bytes",
    "plan",
    "prepare_s",
    "sent_share",
]

COMPRESSIONS = MappingProxyType({"none": 4.0, "fp16": 2.0, "8bit": 1.0})
"""Name -> bytes on the wire for each float32 of the gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCosts:
    """Constants of one engine, fitted by `benchmarks/swarm_plan.py`. A trip is one round trip between two peers."""

    overhead: float
    """Share by which headers lengthen the transfer."""
    gap_parts: float
    """A butterfly's reducer has to hear the first part from all others before it can answer: so many of those times."""
    turn_trips: float
    """A ring: the least that each of its 2 (n - 1) turns takes, in round trips. 0 for a butterfly, which has no turns."""
    turn_share: float
    """A ring: the share of a piece's time on the wire that is not hidden behind half a round trip."""
    average_base_s: float
    """Seconds of an all-reduce that depend on nothing."""
    average_trips: float
    """Round trips of an all-reduce."""
    prepare_base_s: float
    """Seconds to gather the peers: matchmaking, or a quorum and a sum of two numbers."""
    prepare_trips: float
    """Round trips of the same."""
    prepare_per_peer_s: float
    """Seconds of the same for each peer."""
    prepare_trips_per_peer: float
    """Round trips of the same for each peer but one."""


ENGINE_COSTS = MappingProxyType(
    {
        "hivemind": EngineCosts(
            overhead=0.046,
            gap_parts=0.794,
            turn_trips=0.0,
            turn_share=0.0,
            average_base_s=0.0241,
            average_trips=2.84,
            prepare_base_s=0.0,
            prepare_trips=4.37,
            prepare_per_peer_s=0.0259,
            prepare_trips_per_peer=0.0,
        ),
        "torchft": EngineCosts(
            overhead=0.035,
            gap_parts=0.0,
            turn_trips=0.9,
            turn_share=0.8,
            average_base_s=0.0,
            average_trips=1.84,
            prepare_base_s=0.0103,
            prepare_trips=0.795,
            prepare_per_peer_s=0.0,
            prepare_trips_per_peer=1.12,
        ),
    }
)
PART_BYTES = 2**19
"""hivemind cuts a gradient into parts of this size, after compression."""
MEASURED_PEERS = 8
MEASURED_BITS_PER_S = (25e6, 100e6)
MEASURED_TRIP_S = (0.002, 0.040)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """A swarm that is to be planned.

    Raises:
        ValueError: a field out of range.
    """

    parameters: float
    """Trained parameters, which the gradient has too."""
    samples_per_s: tuple[float, ...]
    """What each peer computes in a second by itself, in the unit of `target_batch`."""
    bandwidths: tuple[tuple[float, float], ...]
    """Bit/s down and up; one pair for all peers, or one for each."""
    latency_s: float
    """Round trip between two peers, as ping shows it."""
    target_batch: float
    """Samples of all peers that make a round."""
    engine: str = "hivemind"
    """ "hivemind" or "torchft"."""
    compression: str = "none"
    """ "none", "fp16" or "8bit"; of hivemind."""
    efficiency: float = 0.9
    """Share of the time that is to go into computing, 0 to 1, for `Plan.target_batch_for_efficiency`."""

    def __post_init__(self) -> None:
        if self.engine not in ENGINE_COSTS:
            raise ValueError(f"engine={self.engine!r}: must be one of {', '.join(map(repr, ENGINE_COSTS))}")
        if self.compression not in COMPRESSIONS:
            raise ValueError(f"compression={self.compression!r}: must be one of {', '.join(map(repr, COMPRESSIONS))}")
        if self.engine == "torchft" and self.compression != "none":
            raise ValueError(
                f"compression={self.compression!r}: the torchft engine sends gradients as they are; use compression='none',"
                " or engine='hivemind'"
            )
        for name in ("parameters", "target_batch"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "a finite number above 0")
        _require(bool(self.samples_per_s), "samples_per_s", self.samples_per_s, "one number a peer")
        _require(
            all(0 < rate < math.inf for rate in self.samples_per_s),
            "samples_per_s",
            self.samples_per_s,
            "above 0 for each peer",
        )
        if len(self.bandwidths) not in (1, len(self.samples_per_s)):
            raise ValueError(
                f"bandwidths has {len(self.bandwidths)} values for {len(self.samples_per_s)} peers in samples_per_s: give one"
                " for all, or one a peer"
            )
        _require(
            all(0 < speed < math.inf for pair in self.bandwidths for speed in pair),
            "bandwidths",
            self.bandwidths,
            "above 0 bit/s",
        )
        _require(self.latency_s >= 0, "latency_s", self.latency_s, "0 or more seconds")
        _require(0 < self.efficiency < 1, "efficiency", self.efficiency, "a share above 0 and below 1, such as 0.9")

    @property
    def peers(self) -> int:
        """How many they are."""
        return len(self.samples_per_s)

    @property
    def slowest_bits_per_s(self) -> float:
        """The slower direction of the slowest link: every peer sends and receives as much as every other."""
        return min(min(pair) for pair in self.bandwidths)

    @property
    def gradient_bytes(self) -> float:
        """The gradient on the wire, once."""
        return self.parameters * COMPRESSIONS[self.compression]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a round of `setup` takes. Times are seconds."""

    setup: Setup
    peers: int
    sent_bytes_per_peer: float
    """What the busiest peer sends in a round, and receives."""
    compute_s: float
    """Until the target is reached."""
    prepare_s: float
    """Until the peers have found each other. hivemind can do this while peers compute: counted in full, the worst case."""
    average_s: float
    round_s: float
    compute_to_communication: float | None
    """compute_s over the rest of the round; None for a single peer, which has no rest."""
    efficiency: float
    """Share of the round that computes; also the share of all peers' speed that is left."""
    samples_per_s: float
    """Of the whole swarm, communication included."""
    speed_up: float
    """Over the fastest peer training alone."""
    target_batch_for_efficiency: float
    """Smallest target batch that has the efficiency that was asked for."""
    extrapolated: tuple[str, ...]
    """What lies outside of the measured rounds that the constants were fitted to."""


def plan(setup: Setup) -> Plan:
    """What a round of `setup` takes."""
    total = sum(setup.samples_per_s)
    compute = setup.target_batch / total
    prepare, average = prepare_s(setup), average_s(setup)
    round_s = compute + prepare + average
    return Plan(
        setup=setup,
        peers=setup.peers,
        sent_bytes_per_peer=sent_share(setup) * setup.gradient_bytes,
        compute_s=compute,
        prepare_s=prepare,
        average_s=average,
        round_s=round_s,
        compute_to_communication=compute / (prepare + average) if prepare + average > 0 else None,
        efficiency=compute / round_s,
        samples_per_s=setup.target_batch / round_s,
        speed_up=setup.target_batch / round_s / max(setup.samples_per_s),
        target_batch_for_efficiency=float(
            math.ceil(total * (prepare + average) * setup.efficiency / (1 - setup.efficiency))
        ),
        extrapolated=_extrapolated(setup),
    )


def average_s(setup: Setup, costs: EngineCosts | None = None) -> float:
    """Seconds of the all-reduce; 0 for a single peer."""
    costs = costs or ENGINE_COSTS[setup.engine]
    if setup.peers == 1:
        return 0.0
    byte_s = 8 * (1 + costs.overhead) / setup.slowest_bits_per_s
    fixed_s = costs.average_trips * setup.latency_s + costs.average_base_s
    transfer_s = sent_share(setup) * setup.gradient_bytes * byte_s
    if not costs.turn_trips:
        return transfer_s + costs.gap_parts * first_parts_bytes(setup) * byte_s + fixed_s
    turns, trip_s = 2 * (setup.peers - 1), setup.latency_s
    piece_s = transfer_s / turns
    return turns * max(piece_s, costs.turn_trips * trip_s, trip_s / 2 + costs.turn_share * piece_s) + fixed_s


def prepare_s(setup: Setup, costs: EngineCosts | None = None) -> float:
    """Seconds until the peers have found each other, and agree afterwards that they have the mean; 0 for a single peer."""
    costs = costs or ENGINE_COSTS[setup.engine]
    if setup.peers == 1:
        return 0.0
    trips = costs.prepare_trips + costs.prepare_trips_per_peer * (setup.peers - 1)
    return costs.prepare_base_s + costs.prepare_per_peer_s * setup.peers + trips * setup.latency_s


def sent_share(setup: Setup) -> float:
    """Of the gradient, what the busiest peer sends, and receives: 2 (n - 1) / n where it can be divided evenly.

    hivemind gives whole parts to reducers. A reducer of the share s sends the rest of its own gradient away, 1 - s, and the
    mean of its share to n - 1 peers. A gradient of one part has one reducer, who sends n - 1 gradients.
    """
    n = setup.peers
    if n == 1 or setup.engine != "hivemind":
        return 2 * (n - 1) / n
    parts = math.ceil(setup.gradient_bytes / PART_BYTES)
    share = min(1.0, math.ceil(parts / n) * PART_BYTES / setup.gradient_bytes)
    return 1 + (n - 2) * share


def first_parts_bytes(setup: Setup) -> float:
    """What a reducer of hivemind has to hear before it can send the first mean: a part from each of the others."""
    return (setup.peers - 1) * min(PART_BYTES, setup.gradient_bytes)


def _extrapolated(setup: Setup) -> tuple[str, ...]:
    found = []
    if setup.peers > MEASURED_PEERS:
        found.append(f"{setup.peers:,} peers (measured: 2 to {MEASURED_PEERS})")
    low, high = MEASURED_BITS_PER_S
    if setup.peers > 1 and not low <= setup.slowest_bits_per_s <= high:
        found.append(f"{setup.slowest_bits_per_s / 1e6:,g} Mbit/s (measured: {low / 1e6:g} to {high / 1e6:g})")
    low, high = MEASURED_TRIP_S
    if setup.peers > 1 and setup.latency_s > high:
        found.append(f"{setup.latency_s * 1e3:g} ms (measured: {low * 1e3:g} to {high * 1e3:g})")
    return tuple(found)


def _require(holds: bool, name: str, value: float | Sequence[object], wanted: str) -> None:
    if not holds or value == math.inf:
        raise ValueError(f"{name}={value!r}: must be {wanted}")
