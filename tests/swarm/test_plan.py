"""The planner's arithmetic, and its predictions against rounds that were measured on shaped links."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

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

ROUNDS = Path(__file__).parents[2] / "benchmarks" / "results" / "2026-11-30_swarm_plan.json"
SETUP = Setup(
    parameters=124e6,
    samples_per_s=(20.0, 20.0, 5.0),
    bandwidths=((100e6, 100e6),),
    latency_s=0.02,
    target_batch=4096,
)
FREE = EngineCosts(
    overhead=0, gap_parts=0, average_base_s=0, average_trips=0, prepare_base_s=0, prepare_trips=0, prepare_per_peer_s=0,
    prepare_trips_per_peer=0, turn_trips=0, turn_share=0,
)  # fmt: skip


def test_without_overhead_each_peer_sends_and_receives_its_share_of_the_gradient() -> None:
    assert average_s(replace(SETUP, engine="torchft"), FREE) == pytest.approx(2 * (2 / 3) * 124e6 * 4 * 8 / 100e6)
    assert average_s(SETUP, FREE) == pytest.approx(2 * (2 / 3) * 124e6 * 4 * 8 / 100e6, rel=0.003)  # whole parts
    assert prepare_s(SETUP, FREE) == 0
    assert plan(SETUP).sent_bytes_per_peer == pytest.approx(2 * (2 / 3) * 124e6 * 4, rel=0.003)
    for compression, share in (("fp16", 0.5), ("8bit", 0.25)):
        assert average_s(replace(SETUP, compression=compression), FREE) == pytest.approx(
            share * average_s(SETUP, FREE), rel=0.02
        )


def test_a_gradient_of_one_part_has_one_reducer_who_serves_all() -> None:
    small = replace(SETUP, parameters=100_000, samples_per_s=(1.0,) * 8)
    assert sent_share(small) == pytest.approx(7)
    assert sent_share(replace(small, engine="torchft")) == pytest.approx(2 * 7 / 8)
    assert first_parts_bytes(small) == 7 * 400_000


def test_a_ring_of_small_pieces_takes_a_trip_a_turn() -> None:
    ring, large = replace(FREE, turn_trips=1.0, turn_share=0.5), replace(SETUP, engine="torchft")
    assert average_s(large, ring) == pytest.approx(average_s(large, FREE))
    small = replace(large, parameters=1, samples_per_s=(1.0,) * 100)
    assert average_s(small, ring) == pytest.approx(2 * 99 * 0.02)


def test_the_slower_direction_of_the_slowest_link_holds_up_all() -> None:
    links = ((1e9, 1e9), (200e6, 20e6), (1e9, 1e9))
    assert (
        plan(replace(SETUP, bandwidths=links)).average_s == plan(replace(SETUP, bandwidths=((20e6, 20e6),))).average_s
    )


def test_a_single_peer_has_no_communication() -> None:
    alone = plan(replace(SETUP, samples_per_s=(20.0,)))
    assert (alone.prepare_s, alone.average_s, alone.efficiency, alone.speed_up) == (0, 0, 1, 1)
    assert (alone.compute_to_communication, alone.extrapolated) == (None, ())


@pytest.mark.parametrize("engine", ["hivemind", "torchft"])
def test_the_parts_of_a_plan_belong_together(engine: str) -> None:
    found = plan(replace(SETUP, engine=engine))
    communication = found.prepare_s + found.average_s
    assert found.round_s == pytest.approx(found.compute_s + communication)
    assert found.compute_s == pytest.approx(4096 / 45)
    assert found.compute_to_communication == pytest.approx(found.compute_s / communication)
    assert found.efficiency == pytest.approx(found.samples_per_s / 45)
    assert found.speed_up == pytest.approx(found.samples_per_s / 20)


@pytest.mark.parametrize("wanted", [0.5, 0.9, 0.99])
def test_the_target_batch_keeps_the_wanted_efficiency_and_a_smaller_one_does_not(wanted: float) -> None:
    needed = plan(replace(SETUP, efficiency=wanted)).target_batch_for_efficiency
    assert plan(replace(SETUP, target_batch=needed)).efficiency >= wanted - 1e-12
    assert plan(replace(SETUP, target_batch=needed - 2)).efficiency < wanted


def test_what_was_not_measured_is_named() -> None:
    assert plan(SETUP).extrapolated == ()
    far = replace(SETUP, samples_per_s=(1.0,) * 1000, bandwidths=((1e9, 1e9),), latency_s=0.2)
    assert [text.split(" ")[:2] for text in plan(far).extrapolated] == [
        ["1,000", "peers"],
        ["1,000", "Mbit/s"],
        ["200", "ms"],
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parameters": 0}, "parameters=0"),
        ({"parameters": math.inf}, "parameters=inf"),
        ({"parameters": math.nan}, "parameters=nan"),
        ({"samples_per_s": ()}, "samples_per_s"),
        ({"samples_per_s": (20.0, 0.0)}, "samples_per_s"),
        ({"samples_per_s": (20.0, math.inf)}, "samples_per_s"),
        ({"bandwidths": ((1e6, 1e6),) * 2}, "bandwidths has 2 values for 3 peers"),
        ({"bandwidths": ((1e6, 0.0),)}, "bandwidths"),
        ({"latency_s": -1}, "latency_s=-1"),
        ({"target_batch": 0}, "target_batch=0"),
        ({"efficiency": 1.0}, "efficiency=1.0"),
        ({"engine": "mpi"}, "engine='mpi'"),
        ({"compression": "zip"}, "compression='zip'"),
        ({"compression": "fp16", "engine": "torchft"}, "torchft engine sends gradients as they are"),
    ],
)
def test_what_can_not_be_planned_is_refused(changes: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(SETUP, **changes)


def test_predictions_are_near_the_measured_rounds() -> None:
    """Every point of the results file, those that the constants were fitted to and those that they were not."""
    points = json.loads(ROUNDS.read_text())
    assert {point["engine"] for point in points} == set(ENGINE_COSTS)
    assert {point["peers"] for point in points} >= {2, 4, 8}
    errors = []
    for point in points:
        setup = Setup(
            parameters=point["parameters"],
            samples_per_s=(1.0,) * point["peers"],
            bandwidths=((point["mbit"] * 1e6,) * 2,),
            latency_s=point["rtt_ms"] / 1e3,
            target_batch=1,
            engine=point["engine"],
            compression=point["compression"],
        )
        errors.append(abs((prepare_s(setup) + average_s(setup)) / point["round_s"] - 1))
    assert sorted(errors)[len(errors) // 2] < 0.08
    assert max(errors) < 0.4  # 8 hivemind peers on two cores
