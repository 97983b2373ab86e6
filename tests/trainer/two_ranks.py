"""Cases of `steps` on two gloo processes, which test_ranks.py starts: two_ranks.py RANK STORE.

Each case prints its name, its rank, and "ok" or a traceback.
"""

import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import token_model as toy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bareloop.trainer.loop import steps

__all__ = ["CASES"]

SPLITS = [[32], [8, 8, 8, 8], [1] * 32, [4, 8, 8, 12]]
"""Rows of each rank."""


def replicated() -> nn.Module:
    return DistributedDataParallel(toy.model())


def sharded() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = toy.model()
    for layer in (model[1], model[4]):
        fully_shard(layer)
    fully_shard(model)
    return model


WRAPPERS = {"ddp": replicated, "fsdp": sharded}


def own(sizes: list[int]) -> list[toy.Batch]:
    """This rank's micro-batches: rank 0 has those of the first 32 rows, rank 1 of the next 32, with other masks."""
    everything = toy.batches(sizes + sizes)
    return everything[dist.get_rank() * len(sizes) :][: len(sizes)]


def gradients(
    model: nn.Module, sizes: list[int], loss_fn: Callable[..., Any], **options: Any
) -> tuple[list[Tensor], Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = toy.gradients_at_steps(optimizer)
    (step,) = steps(model, optimizer, own(sizes), loss_fn, accumulate=len(sizes), **options)
    return seen[0], step


def any_split_gives_the_gradient_of_the_whole(wrapper: str, loss_fn: Callable[..., Any]) -> None:
    for sizes in SPLITS:
        got, step = gradients(WRAPPERS[wrapper](), sizes, loss_fn, max_norm=1e6)
        assert toy.distance(got, toy.gradients_of_the_whole(64)) < 1e-6, (
            sizes,
            toy.distance(got, toy.gradients_of_the_whole(64)),
        )
        loss, count = toy.summed_loss(toy.model(), toy.batches([64])[0])
        assert int(step.count) == int(count)
        assert step.ranks == 2
        torch.testing.assert_close(
            step.gradient_norm, nn.utils.get_total_norm(toy.gradients_of_the_whole(64)), rtol=1e-6, atol=0
        )
        mean = step.loss.clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / 2, (loss / count).detach(), rtol=1e-6, atol=0)


def clipped_gradients_are_those_of_the_whole(wrapper: str) -> None:
    got, _ = gradients(WRAPPERS[wrapper](), [4, 8, 8, 12], toy.summed_loss, max_norm=1e-3)
    expected = toy.model()
    for parameter, gradient in zip(expected.parameters(), toy.gradients_of_the_whole(64), strict=True):
        parameter.grad = gradient
    nn.utils.clip_grad_norm_(expected.parameters(), 1e-3)
    assert toy.distance(got, [parameter.grad for parameter in expected.parameters()]) < 1e-6


def plain_means_equal_the_loop_by_hand_to_the_bit() -> None:
    """Six micro-batches in windows of four, held back with no_sync() as the documentation of DDP says."""
    by_hand, of_steps = replicated(), replicated()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (by_hand, of_steps)]
    batches = own([4] * 8)
    by_hand.train()
    for start in (0, 4):
        with by_hand.no_sync():
            for batch in batches[start : start + 3]:
                (toy.mean_loss(by_hand, batch) / 4).backward()
        (toy.mean_loss(by_hand, batches[start + 3]) / 4).backward()
        nn.utils.clip_grad_norm_(by_hand.parameters(), 0.5)
        optimizers[0].step()
        optimizers[0].zero_grad()
    list(steps(of_steps, optimizers[1], batches, toy.mean_loss, accumulate=4, max_norm=0.5))
    torch.testing.assert_close(toy.state(of_steps, optimizers[1]), toy.state(by_hand, optimizers[0]), rtol=0, atol=0)


def ddp_reduces_in_the_last_micro_step_alone() -> None:
    """With a window that is cut short; each reduction is of one bucket."""
    model = replicated()
    reductions: list[int] = []

    def hook(process_group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        reductions.append(len(losses))
        work = dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future()
        return work.then(lambda future: future.value()[0])

    def counting(model: nn.Module, batch: toy.Batch) -> Any:
        losses.append(batch)
        return toy.summed_loss(model, batch)

    losses: list[toy.Batch] = []
    model.register_comm_hook(dist.group.WORLD, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = list(steps(model, optimizer, iter(own([4] * 7)), counting, accumulate=3))
    assert [step.micro_steps for step in made] == [3, 3, 1]
    assert reductions == [3, 6, 7], reductions


def fsdp_reduces_in_the_last_micro_step_alone() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as internals

    model, losses, reductions = sharded(), [], []
    reduce = internals.foreach_reduce

    def reducing(*arguments: Any, **options: Any) -> Any:
        reductions.append(len(losses))
        return reduce(*arguments, **options)

    def counting(model: nn.Module, batch: toy.Batch) -> Any:
        losses.append(batch)
        return toy.summed_loss(model, batch)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    internals.foreach_reduce = reducing
    try:
        list(steps(model, optimizer, iter(own([4] * 7)), counting, accumulate=3))
    finally:
        internals.foreach_reduce = reduce
    groups = 3
    assert reductions == [3] * groups + [6] * groups + [7] * groups, reductions


def an_overflow_on_one_rank_is_skipped_on_both(wrapper: str) -> None:
    """Dividing by the count of both ranks makes half-precision gradients neither vanish nor overflow by itself."""
    model = WRAPPERS[wrapper]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=9)
    factors = [1.0, float("inf") if dist.get_rank() == 1 else 1.0, 1.0]
    pairs = list(zip(own([8] * 3), factors, strict=True))

    def loss_fn(model: nn.Module, pair: Any) -> tuple[Tensor, Tensor]:
        loss, count = toy.summed_loss(model, pair[0])
        return loss * pair[1], count

    overflows = [
        float(s.overflow) for s in steps(model, optimizer, pairs, loss_fn, precision="fp16", scheduler=scheduler)
    ]
    assert [overflow > 0 for overflow in overflows] == [False, True, False], overflows
    assert scheduler.last_epoch == 2
    weights = torch.cat([toy.full(parameter).detach().flatten() for parameter in model.parameters()])
    assert weights.isfinite().all()
    other = weights.clone()
    dist.broadcast(other, 0)
    assert torch.equal(weights, other)


def after_an_exception_in_mid_window_training_goes_on(wrapper: str) -> None:
    model = WRAPPERS[wrapper]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def failing(model: nn.Module, batch: toy.Batch | None) -> Any:
        if batch is None:
            raise LookupError
        return toy.summed_loss(model, batch)

    for broken in ([None, *own([8])], [*own([8, 8]), None, *own([8])]):
        try:
            list(steps(model, optimizer, broken, failing, accumulate=4))
        except LookupError:
            continue
        raise AssertionError("no exception came through")
    seen = toy.gradients_at_steps(optimizer)
    list(steps(model, optimizer, own([16, 16]), failing, accumulate=2))
    assert toy.distance(seen[0], toy.gradients_of_the_whole(64)) < 1e-6


def a_hybrid_mesh_counts_all_ranks() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    for shape in ((2, 1), (1, 2)):
        model = toy.model()
        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))
        got, step = gradients(model, [4, 8, 8, 12], toy.counted_on_the_host)
        assert step.ranks == 2
        assert toy.distance(got, toy.gradients_of_the_whole(64)) < 1e-6


def a_gradient_divide_factor_is_undone_too() -> None:
    model = sharded()
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(8.0)
    got, _ = gradients(model, [4, 8, 8, 12], toy.summed_loss)
    assert toy.distance(got, toy.gradients_of_the_whole(64)) < 1e-6
    model[1].set_gradient_divide_factor(4.0)
    try:
        gradients(model, [32], toy.summed_loss)
    except ValueError as error:
        assert "2 different" in str(error)
    else:
        raise AssertionError("two divide factors were taken for one")


def an_accumulator_sees_the_sum_over_the_ranks() -> None:
    model = replicated()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = toy.gradients_at_steps(optimizer)
    target = int(toy.summed_loss(toy.model(), toy.batches([64])[0])[1])
    (step,) = steps(model, optimizer, own([4, 8, 8, 12]), toy.summed_loss, accumulate=toy.Rounds(model, target))
    assert int(step.count) == target
    assert toy.distance(seen[0], toy.gradients_of_the_whole(64)) < 1e-6


def a_model_that_is_not_wrapped_is_one_rank() -> None:
    got, step = gradients(toy.model(), [4, 8, 8, 12], toy.summed_loss)
    assert step.ranks == 1
    model = toy.model()
    rows = own([32])[0]
    loss, count = toy.summed_loss(model, rows)
    (loss / count).backward()
    assert toy.distance(got, [parameter.grad for parameter in model.parameters()]) < 1e-6


def an_optimizer_from_before_sharding_is_refused() -> None:
    from torch.distributed.fsdp import fully_shard

    model = toy.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model)
    try:
        steps(model, optimizer, own([32]), toy.summed_loss)
    except ValueError as error:
        assert "fully_shard" in str(error)
    else:
        raise AssertionError("the optimizer would have stepped parameters that the model no longer has")


CASES: dict[str, Callable[[], None]] = {
    "split_ddp": lambda: any_split_gives_the_gradient_of_the_whole("ddp", toy.summed_loss),
    "split_fsdp": lambda: any_split_gives_the_gradient_of_the_whole("fsdp", toy.summed_loss),
    "split_ddp_host": lambda: any_split_gives_the_gradient_of_the_whole("ddp", toy.counted_on_the_host),
    "split_fsdp_host": lambda: any_split_gives_the_gradient_of_the_whole("fsdp", toy.counted_on_the_host),
    "clip_ddp": lambda: clipped_gradients_are_those_of_the_whole("ddp"),
    "clip_fsdp": lambda: clipped_gradients_are_those_of_the_whole("fsdp"),
    "fp16_ddp": lambda: an_overflow_on_one_rank_is_skipped_on_both("ddp"),
    "fp16_fsdp": lambda: an_overflow_on_one_rank_is_skipped_on_both("fsdp"),
    "exception_ddp": lambda: after_an_exception_in_mid_window_training_goes_on("ddp"),
    "exception_fsdp": lambda: after_an_exception_in_mid_window_training_goes_on("fsdp"),
    "by_hand": plain_means_equal_the_loop_by_hand_to_the_bit,
    "ddp_once": ddp_reduces_in_the_last_micro_step_alone,
    "fsdp_once": fsdp_reduces_in_the_last_micro_step_alone,
    "hybrid": a_hybrid_mesh_counts_all_ranks,
    "divide_factor": a_gradient_divide_factor_is_undone_too,
    "accumulator": an_accumulator_sees_the_sum_over_the_ranks,
    "not_wrapped": a_model_that_is_not_wrapped_is_one_rank,
    "early_optimizer": an_optimizer_from_before_sharding_is_refused,
}


def main(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=40)
    )
    for name, case in CASES.items():
        try:
            case()
            outcome = "ok"
        except Exception:
            outcome = traceback.format_exc().encode("unicode_escape").decode()
        print(f"{name}/{rank}\t{outcome}", flush=True)
    dist.barrier()
    # The destructors of DDP and gloo may wait for each other: nothing is left to clean up.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
