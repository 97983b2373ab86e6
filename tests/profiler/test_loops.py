"""Scripts of every shape, run as the command runs them: where their steps are and what each consumed."""

import time
from pathlib import Path

import pytest

from bareloop.profiler.command import command_from_words
from bareloop.profiler.inspect import Inspected, inspect
from bareloop.profiler.options import Options

LOOPS = Path(__file__).parent.parent / "scripts" / "loops"


def look(*words: str) -> Inspected:
    command = command_from_words([str(LOOPS / word) if word.endswith(".py") else word for word in words])
    return inspect({"a": command}, Options(), time.monotonic() + 90)["a"]


def test_plain_loop_with_accumulation_and_loader_workers(tmp_path: Path) -> None:
    seen = look("plain.py", "--accumulate", "4", "--workers", "2", "--mark", str(tmp_path / "mark"))
    work = seen.trace.work
    assert (work.samples_per_step, work.micro_steps_per_step, work.forwards_per_step) == (128, 4, 4)
    assert (work.planned_passes, work.dataset_size, work.planned_steps) == (200, 1024, 1600)
    assert work.trainable_parameters == 64 * 256 + 256 + 256 * 10 + 10
    assert work.max_grad_norm is None
    assert (seen.trace.first.environment.loader_workers, seen.trace.first.environment.prefetched_batches) == (2, 4)
    steps = seen.trace.first.steps
    assert [step.index for step in steps] == [1, 2, 3, 4, 5, 6]
    assert len({row for step in steps for row in step.rows}) == 6 * 128
    # It ended at the step boundary, by an exit that runs what the script wants run.
    assert (tmp_path / "mark.exit").read_text() == "exit handler ran"
    assert int((tmp_path / "mark.finally").read_text()) % 4 == 0


def test_evaluation_in_between_is_not_training() -> None:
    work = look("plain.py", "--evaluate-every", "2").trace.work
    assert (work.samples_per_step, work.forwards_per_step, work.micro_steps_per_step) == (32, 1, 1)


def test_several_optimizers() -> None:
    seen = look("gan.py")
    assert seen.optimizers == 2
    assert seen.trace.work.backwards_per_step == 2
    assert [optimizer.per_step for optimizer in seen.trace.work.optimizers] == [1.0, 1.0]
    assert all(step.backwards == 2 for step in seen.trace.first.steps)


def test_a_closure_runs_the_model_several_times_in_a_step() -> None:
    work = look("lbfgs.py").trace.work
    assert work.micro_steps_per_step == work.forwards_per_step
    assert work.micro_steps_per_step > 1
    assert work.optimizers[0].name == "LBFGS"


def test_functional_forward_without_a_loader() -> None:
    trace = look("functional.py").trace
    assert trace.work.samples_per_step is None
    assert trace.work.micro_steps_per_step == 1
    assert all(step.loss is not None and step.gradient_norm is not None for step in trace.first.steps)


def test_a_step_that_grad_scaler_skips_is_a_step() -> None:
    trace = look("scaler.py").trace
    assert [step.skipped for step in trace.first.steps] == [False, False, True, False, False, True]
    losses = [step.loss for step in trace.first.steps if not step.skipped]
    assert all(loss is not None and loss < 10 for loss in losses), "the scaler's factor is taken out"


def test_recompute_is_seen() -> None:
    assert look("checkpointing.py").trace.work.forward_per_backward == 2.0


@pytest.mark.parametrize(
    "words",
    [("torchrun", "--nproc-per-node", "2", "ddp.py"), ("spawned_ranks.py",)],
    ids=["torchrun", "mp.spawn"],
)
def test_two_ranks(words: tuple[str, ...]) -> None:
    trace = look(*words).trace
    assert [process.rank for process in trace.processes] == [0, 1]
    assert trace.work.world_size == 2
    assert trace.work.wrapper == "DistributedDataParallel"
    assert trace.work.samples_per_step == 32
    assert trace.first.work.samples_per_step == 16
    counts = trace.counts
    assert counts is not None
    assert sum(c.per_step for c in counts.collectives if "allreduce" in c.op.replace("_", "")) == 1
    assert sum(c.bytes_per_step or 0 for c in counts.collectives) == (64 * 64 + 64) * 4
    if words[0] == "torchrun":
        assert trace.work.max_grad_norm == pytest.approx(0.001)
        assert trace.work.clipped_share == 1.0


def test_lightning() -> None:
    seen = look("lightning_fit.py")
    work = seen.trace.work
    assert seen.trace.first.environment.framework == "lightning"
    assert (work.samples_per_step, work.micro_steps_per_step, work.max_grad_norm) == (16, 2, 0.5)
    assert (work.planned_steps, work.planned_passes) == (50 * 256, 50)


def test_accelerate() -> None:
    seen = look("accelerate_loop.py")
    work = seen.trace.work
    assert seen.trace.first.environment.framework == "accelerate"
    assert (work.samples_per_step, work.micro_steps_per_step, work.max_grad_norm) == (32, 4, 1.0)
    assert (work.planned_steps, work.planned_passes) == (30 * 64, 30)


def test_transformers_trainer() -> None:
    seen = look("trainer.py")
    work, counts = seen.trace.work, seen.trace.counts
    assert seen.trace.first.environment.framework == "transformers"
    assert (work.samples_per_step, work.tokens_per_step, work.micro_steps_per_step) == (8, 128, 2)
    assert (work.planned_steps, work.planned_passes) == (3 * 256, 3)
    assert work.max_grad_norm == 1.0
    assert work.weight_decay == (0.1, 0.0), "the Trainer exempts biases and norms"
    assert work.autocast == "bfloat16"
    assert max(work.matmul_dtypes, key=work.matmul_dtypes.__getitem__) == "bfloat16"
    steps = seen.trace.first.steps
    assert work.padding_share == pytest.approx(1 - sum(s.real_tokens or 0 for s in steps) / (128 * len(steps)))
    assert counts is not None
    nan_checks = [read for read in counts.host_reads if read.kind == "nan_check"]
    assert sum(read.per_step for read in nan_checks) == 4, "two per micro-step"


def test_a_process_that_is_left_alone_trains_on_unharmed() -> None:
    """The second of two independent processes is told to go on by itself, in the middle of its optimizer's step."""
    seen = look("independent_processes.py")
    assert seen.trace.work.world_size == 1
    assert seen.trace.first.counts is not None
    assert any("2 processes that are not ranks of each other" in note for note in seen.notes)


def test_torch_is_asked_for_before_it_is_imported() -> None:
    assert look("asks_for_torch.py").trace.work.samples_per_step == 4
