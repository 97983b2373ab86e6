"""The accumulating step against PyTorch's own accumulation, operator by operator and shape by shape.

The oracles are PyTorch and hivemind themselves, run here; `benchmarks/accumulation.py` says what is counted and how, and
prints the same for the models at full size on a real device.
"""

import contextlib
import functools
import json
import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from accumulating.counted import Counted, Tally, alive, count, micro_step, tally
from accumulating.models import MODELS
from accumulating.ways import way

from bareloop.swarm.accumulator import FlatAccumulator

SIZES = {
    "resnet50": 25.6,
    "convnext_t": 28.6,
    "resnet152": 60.2,
    "convnext_b": 88.6,
    "gpt2": 124.4,
    "convnext_l": 197.8,
}
"""Million parameters."""

IN_PROCESS = ("alone", "native", "ours", "compat")
ROUNDING = 4 * 15
"""Bytes at most by which a parameter's place in a flat buffer is rounded up."""
LIMIT_S = 120
"""Ends a child that hangs."""


def without_data(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model at its published size and a micro-batch, on the meta device: operators run, and nothing is computed."""
    with torch.device("meta"):
        model = MODELS[name].build().train()
    batch = {key: value.to("meta") for key, value in MODELS[name].batch(MODELS[name].samples).items()}
    if "input_ids" in batch:  # else transformers reads the device to see whether sequences are packed
        length = batch["input_ids"].shape[1]
        batch["attention_mask"] = torch.zeros(1, 1, length, length, device="meta")
    return model, batch


def tallied(name: str, model: nn.Module, batch: dict[str, Tensor]) -> Tally:
    """A micro-step that adds to gradients that are there."""
    with way(name, list(model.parameters()), MODELS["gpt2"].samples) as opened:
        if name != "ours":  # whose buffers are there from the start
            micro_step(opened, model, batch)
        return tally(opened, model, batch)


@pytest.mark.parametrize("name", MODELS)
def test_at_full_size_each_operator_and_shape_is_that_of_pytorchs_own_accumulation(name: str) -> None:
    model, batch = without_data(name)
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 1) == SIZES[name]
    native, ours = tallied("native", model, batch), tallied("ours", model, batch)
    assert ours.issued == native.issued
    assert (ours.ops, ours.bytes, ours.host_reads) == (native.ops, native.bytes, 0)
    shapes = Counter(tuple(parameter.shape) for parameter in model.parameters())
    added = {shape: ours.issued["aten.add_.Tensor", (shape, shape)] for shape in shapes}
    assert all(added[shape] >= shapes[shape] for shape in shapes), "the accumulation itself was seen"


@pytest.mark.parametrize("name", MODELS)
def test_at_full_size_the_buffers_are_as_large_as_the_parameters(name: str) -> None:
    model, _ = without_data(name)
    buffers = FlatAccumulator(model.parameters()).buffers
    assert 1 <= sum(b.numel() for b in buffers) / sum(p.numel() for p in model.parameters()) < 1.001


def small(name: str) -> tuple[nn.Module, dict[str, Tensor], list[Tensor]]:
    """A small model of this architecture, a micro-batch, and the parameters."""
    torch.manual_seed(0)
    model = MODELS[name].build_small().train()
    return model, MODELS[name].batch(MODELS[name].samples), list(model.parameters())


def sizes(name: str) -> tuple[int, int]:
    """Tensors and bytes of a small model's parameters."""
    _, _, parameters = small(name)
    return len(parameters), sum(4 * parameter.numel() for parameter in parameters)


@functools.cache
def counted(name: str, *ways: str) -> dict[str, Counted]:
    """Counts of some ways on a small model."""
    found, others = {}, alive()
    model, batch, parameters = small(name)
    for each in ways:
        with way(each, parameters, MODELS[name].samples) as opened:
            found[each] = count(opened, model, batch, others=others)
    return found


@pytest.mark.parametrize("name", ["resnet50", "convnext_t", "gpt2"])
def test_counts_and_memory_are_pytorchs_own(name: str) -> None:
    alone, native, ours, compat = counted(name, *IN_PROCESS).values()
    tensors, size = sizes(name)
    assert (ours.ops, ours.bytes, ours.host_reads) == (native.ops, native.bytes, native.host_reads)
    assert native.gradient_bytes == size
    assert size <= ours.gradient_bytes <= size + ROUNDING * tensors
    assert ours.host_bytes == 0
    # As many bytes as hivemind moves, in one operator; the micro-batch's own gradient is held beside the sum.
    assert (compat.ops - alone.ops, compat.bytes - alone.bytes) == (1, 3 * size)
    assert 2 * size <= compat.gradient_bytes <= 2 * size + ROUNDING * tensors
    assert 0 < native.ops - alone.ops <= tensors


@pytest.mark.parametrize("each", ["ours", "compat"])
def test_python_calls_do_not_grow_with_the_model(each: str) -> None:
    found = [counted(name, *IN_PROCESS) for name in ("resnet50", "gpt2")]
    more = {counts[each].python_calls - counts["native"].python_calls for counts in found}
    assert len(more) == 1
    assert 0 < max(more) < 30


def in_a_child(folder: Path, name: str, *ways: str) -> dict[str, Counted]:
    """`counted` in a forked process: hivemind 1.1.12 leaves event loops and sockets open that later tests would trip over."""
    result, errors = folder / "counts.json", folder / "errors"

    def work() -> None:
        os.setsid()  # its daemons end with its group
        signal.alarm(LIMIT_S)
        torch.set_num_threads(1)  # the threads of OpenMP are not forked
        warnings.simplefilter("ignore")  # upstream's own
        with errors.open("w") as sys.stderr:
            try:
                found = {each: asdict(counts) for each, counts in counted(name, *ways).items()}
                result.write_text(json.dumps(found))
            except BaseException:
                traceback.print_exc()
        os._exit(0)

    # Not os.fork: after it, multiprocessing would go on with what another test's averager left in this process.
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid or 0, signal.SIGKILL)
    assert result.exists(), errors.read_text()
    return {each: Counted(**counts) for each, counts in json.loads(result.read_text()).items()}


def test_what_hivemind_1_1_12_costs(tmp_path: Path) -> None:
    """The table of docs/swarm.md rests on this: where it fails, upstream has changed."""
    found = in_a_child(tmp_path, "gpt2", "alone", "native", "default", "reuse", "zeroing", "averager")
    alone, native, default, reuse, zeroing, averager = found.values()
    tensors, size = sizes("gpt2")
    assert (default.ops - alone.ops, default.bytes - alone.bytes) == (tensors, 3 * size)
    assert default.gradient_bytes == 2 * size
    assert (zeroing.ops - alone.ops, zeroing.bytes - alone.bytes) == (3 * tensors, 7 * size)
    assert zeroing.gradient_bytes == 2 * size
    for same in (reuse, averager):
        assert (same.ops, same.bytes, same.host_reads) == (native.ops, native.bytes, native.host_reads)
        assert size <= same.gradient_bytes <= size + ROUNDING * tensors
