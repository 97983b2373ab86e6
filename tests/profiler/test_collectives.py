"""Collectives of two gloo processes: numbers and bytes that follow from the model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bareloop.profiler.probes.collectives import collective_name

SCRIPT = """
import contextlib, json, os, sys, warnings
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from bareloop.profiler.probes.ops import OpsWindow

warnings.simplefilter("ignore")
dist.init_process_group("gloo")
found = {}


def model():
    return torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.Linear(10, 10))


def observe(name, body):
    for _ in range(3):
        body()
    window = OpsWindow(lambda: "backward")
    window.start()
    for _ in range(2):
        body()
    window.stop()
    facts = window.result(2)
    found[name] = {
        "collectives": [[c.op, c.per_step, c.bytes_per_step] for c in facts.collectives],
        "reads": [[read.kind, read.per_step] for read in facts.host_reads],
    }


def step(wrapped, micro_steps=1, no_sync=False):
    for index in range(micro_steps):
        last = index == micro_steps - 1
        with wrapped.no_sync() if no_sync and not last else contextlib.nullcontext():
            wrapped(torch.ones(2, 10)).sum().backward()


plain = DistributedDataParallel(model())
observe("ddp", lambda: step(plain))
observe("ddp accumulate", lambda: step(plain, 4))
observe("ddp accumulate no_sync", lambda: step(plain, 4, True))
unused = DistributedDataParallel(model(), find_unused_parameters=True)
observe("ddp unused", lambda: step(unused))
sharded = model()
for layer in (*sharded, sharded):
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
observe("fsdp2", lambda: step(sharded))


def explicit():
    dist.all_reduce(torch.ones(3))
    dist.all_gather([torch.ones(5), torch.ones(5)], torch.ones(5))
    dist.broadcast(torch.ones(7), 0)
    dist.broadcast_object_list([{"a": 1}], 0)
    dist.barrier()


observe("explicit", explicit)
if dist.get_rank() == 0:
    open(sys.argv[1], "w").write(json.dumps(found))
dist.destroy_process_group()
# gloo aborts now and then when the interpreter ends ("terminate called without an active exception"), also without
# a window: what is tested has been written by now.
os._exit(0)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[list[object]]]]:
    folder = tmp_path_factory.mktemp("gloo")
    script, answer = folder / "script.py", folder / "answer.json"
    script.write_text(SCRIPT)
    source = str(Path(__file__).parents[2] / "src")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source}
    # --standalone takes a free port
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, str(script), str(answer)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(answer.read_text())


GRADIENTS = 4 * 2 * (10 * 10 + 10)
"""Bytes of the toy's fp32 gradients: one bucket."""


def test_ddp_reduces_its_bucket_once_per_backward(found: dict[str, dict[str, list[list[object]]]]) -> None:
    assert found["ddp"] == {"collectives": [["all_reduce", 1.0, GRADIENTS]], "reads": []}


def test_accumulation_without_no_sync_reduces_at_every_micro_step(
    found: dict[str, dict[str, list[list[object]]]],
) -> None:
    assert found["ddp accumulate"]["collectives"] == [["all_reduce", 4.0, 4 * GRADIENTS]]
    assert found["ddp accumulate no_sync"]["collectives"] == [["all_reduce", 1.0, GRADIENTS]]


def test_find_unused_parameters_adds_a_bitmap_and_its_reads(found: dict[str, dict[str, list[list[object]]]]) -> None:
    parameters, bytes_of_int32 = 4, 4
    assert found["ddp unused"]["collectives"] == [["all_reduce", 2.0, GRADIENTS + parameters * bytes_of_int32]]
    assert found["ddp unused"]["reads"] == [["reducer", parameters]]


def test_fsdp2_gathers_twice_and_scatters_once_per_layer(found: dict[str, dict[str, list[list[object]]]]) -> None:
    assert found["fsdp2"]["collectives"] == [["all_gather", 4.0, 2 * GRADIENTS], ["reduce_scatter", 2.0, GRADIENTS]]


def test_explicit_collectives_carry_their_bytes(found: dict[str, dict[str, list[list[object]]]]) -> None:
    by_name = {str(op): (calls, size) for op, calls, size in found["explicit"]["collectives"]}
    assert by_name["all_reduce"] == (1.0, 12.0)
    assert by_name["all_gather"] == (1.0, 40.0)
    assert by_name["barrier"] == (1.0, 0.0)
    broadcasts, size = by_name["broadcast"]
    assert broadcasts == 3.0  # ours, then the object's size and its bytes
    assert isinstance(size, float) and size > 28 + 8


@pytest.mark.parametrize(
    ("namespace", "operator", "name"),
    [
        ("c10d", "allreduce_", "all_reduce"),
        ("c10d", "_reduce_scatter_base_", "reduce_scatter"),
        ("c10d", "alltoall_base_", "all_to_all"),
        ("_c10d_functional", "all_gather_into_tensor_coalesced", "all_gather"),
        ("_c10d_functional", "wait_tensor", None),
        ("aten", "scatter_reduce", None),
        ("aten", "gather", None),
    ],
)
def test_collectives_are_named_after_what_they_do(namespace: str, operator: str, name: str | None) -> None:
    assert collective_name(namespace, operator) == name
