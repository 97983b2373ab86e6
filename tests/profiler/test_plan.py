"""Plans are read off real loops: each test trains a tiny model and looks at its second step."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset, TensorDataset  # noqa: E402

from bareloop.profiler.probes.plan import PlanFacts, observe_plan  # noqa: E402


class Seen:
    """The plan observed at the second step of whatever ran, and the number of steps there were."""

    facts: PlanFacts
    steps = 0


@contextmanager
def watched(loader: Any = None, micro_steps: float = 1.0, samples: float | None = None) -> Iterator[Seen]:
    seen = Seen()

    def after(*_: Any) -> None:
        seen.steps += 1
        if seen.steps == 2:
            # Frame 1 is torch's: this one would be taken for user code.
            seen.facts = observe_plan(sys._getframe(1), loader, micro_steps, samples)

    handle = register_optimizer_step_post_hook(after)
    try:
        yield seen
    finally:
        handle.remove()


def data(rows: int = 40, batch: int = 4, **options: Any) -> DataLoader:
    return DataLoader(TensorDataset(torch.ones(rows, 2)), batch_size=batch, **options)


class Net:
    """One weight, its optimizer, and a backward."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)

    def backward(self, batch: Any) -> None:
        self.model(batch[0]).sum().backward()


def test_epochs_over_the_loader() -> None:
    net, loader, epochs = Net(), data(rows=42), 3
    with watched(loader, samples=4) as seen:
        for _epoch in range(epochs):
            for batch in loader:
                net.backward(batch)
                net.optimizer.step()
    assert seen.steps == 33
    assert (seen.facts.planned_steps, seen.facts.planned_passes, seen.facts.dataset_size) == (33, 3.0, 42)
    assert "range(epochs) [3] x loader [11]" in seen.facts.plans[0].source


def test_progress_bars_enumerations_and_arguments_are_looked_through() -> None:
    from tqdm.auto import tqdm, trange

    net, loader = Net(), data()
    args = argparse.Namespace(epochs=2, limit=7)
    with watched(loader, samples=4) as seen:
        for _epoch in trange(args.epochs, disable=True):
            for _index, batch in enumerate(tqdm(loader, disable=True), start=1):
                net.backward(batch)
                net.optimizer.step()
    assert seen.facts.planned_steps == seen.steps == 20
    assert seen.facts.planned_passes == 2.0
    with watched(loader, samples=4) as seen:
        for _epoch in range(args.epochs):
            for batch in islice(loader, args.limit):
                net.backward(batch)
                net.optimizer.step()
    assert seen.facts.planned_steps == seen.steps == 14
    assert seen.facts.planned_passes == pytest.approx(1.4)


@pytest.mark.parametrize("rows", [40, 44])
def test_accumulation_by_the_loop_index_counts_the_steps_there_are(rows: int) -> None:
    net, loader, accumulate = Net(), data(rows=rows), 4
    with watched(loader, accumulate, 16) as dropped:
        for _epoch in range(3):
            for i, batch in enumerate(loader):
                net.backward(batch)
                if (i + 1) % accumulate == 0:
                    net.optimizer.step()
    assert dropped.facts.planned_steps == dropped.steps
    assert dropped.facts.planned_passes == 3.0
    with watched(loader, accumulate, 16) as kept:
        for _epoch in range(3):
            for i, batch in enumerate(loader):
                net.backward(batch)
                if (i + 1) % accumulate == 0 or i + 1 == len(loader):
                    net.optimizer.step()
    assert kept.facts.planned_steps == kept.steps > dropped.steps


def test_accumulation_by_a_counter_or_a_guard() -> None:
    net, loader, counter = Net(), data(), 0
    with watched(loader, 4, 16) as seen:
        for _epoch in range(3):
            for batch in loader:
                net.backward(batch)
                counter += 1
                if counter % 4:
                    continue
                net.optimizer.step()
    assert seen.facts.planned_steps == seen.steps == 7


def test_a_window_loop_inside_a_step_loop() -> None:
    net, loader, use_scaler = Net(), data(), False
    batches = iter(data(rows=400))
    with watched(loader, 4, 16) as seen:
        for _step in range(10):
            for _micro in range(4):
                loss = net.model(next(batches)[0]).sum()
                loss.backward()
            if not use_scaler:
                net.optimizer.step()
    assert seen.facts.planned_steps == seen.steps == 10
    assert seen.facts.planned_passes == 4.0


def train_one(net: Net, batch: Any, index: int, accumulate: int) -> None:
    net.backward(batch)
    if (index + 1) % accumulate != 0:
        return
    net.optimizer.step()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_step_in_a_function_that_the_loop_calls(accumulate: int) -> None:
    net, loader = Net(), data()
    with watched(loader, accumulate, 4 * accumulate) as seen:
        for _epoch in range(2):
            for index, batch in enumerate(loader):
                train_one(net, batch, index, accumulate)
    assert seen.facts.planned_steps == seen.steps == 20 // accumulate
    assert seen.facts.planned_passes == 2.0


def test_while_over_endless_epochs() -> None:
    net, loader, step, max_steps = Net(), data(), 0, 25
    with watched(loader, samples=4) as seen:
        while step < max_steps:
            for batch in loader:
                net.backward(batch)
                net.optimizer.step()
                step += 1
                if step >= max_steps:
                    break
    assert seen.facts.planned_steps == seen.steps == 25
    assert seen.facts.planned_passes == 2.5
    assert "while step < max_steps" in seen.facts.plans[0].source


def test_while_true_left_by_a_counter_past_its_bound() -> None:
    net, loader, iter_num, max_iters, eval_only = Net(), data(), 0, 11, False
    batches = iter(data(rows=400))
    with watched(loader, 2, 8) as seen:
        while True:
            if iter_num == 0 and eval_only:
                break
            for _micro in range(2):
                net.backward(next(batches))
            net.optimizer.step()
            iter_num += 1
            if iter_num > max_iters:
                break
    assert seen.facts.planned_steps == seen.steps == 12


def test_a_break_on_the_loop_index() -> None:
    net, loader = Net(), data()
    with watched(loader, samples=4) as seen:
        for _epoch in range(2):
            for i, batch in enumerate(loader):
                if i >= 5:
                    break
                net.backward(batch)
                net.optimizer.step()
    assert seen.facts.planned_steps == seen.steps == 10
    assert seen.facts.planned_passes == 1.0


def test_slices_of_a_tensor() -> None:
    net, x = Net(), torch.ones(24, 2)
    with watched(None, samples=8) as seen:
        for _epoch in range(4):
            for start in range(0, len(x), 8):
                net.backward([x[start : start + 8]])
                net.optimizer.step()
    assert (seen.facts.planned_steps, seen.facts.planned_passes, seen.facts.dataset_size) == (12, 4.0, 24)


def test_a_generator_tells_nothing_and_the_scheduler_does() -> None:
    net = Net()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(net.optimizer, max_lr=0.1, total_steps=9)

    def batches() -> Iterator[Any]:
        for _ in range(9):
            yield [torch.ones(4, 2)]

    with watched(None, samples=4) as seen:
        for batch in batches():
            net.backward(batch)
            net.optimizer.step()
            scheduler.step()
    assert seen.facts.planned_steps == seen.steps == 9
    assert seen.facts.planned_passes is None
    assert seen.facts.plans[0].source == "OneCycleLR.total_steps of scheduler"


def test_a_schedule_per_epoch_is_no_plan_of_steps() -> None:
    net, loader = Net(), data()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(net.optimizer, T_max=3)
    with watched(loader, samples=4) as seen:
        for _epoch in range(3):
            for batch in loader:
                net.backward(batch)
                net.optimizer.step()
            schedule.step()
    assert {(plan.quantity, plan.value) for plan in seen.facts.plans} == {("steps", 30.0), ("passes", 3.0)}


def test_a_bar_moved_by_hand() -> None:
    from tqdm import tqdm

    net, bar = Net(), tqdm(total=6, disable=True)
    with watched(None, samples=4) as seen:
        for batch in ([torch.ones(4, 2)] for _ in range(6)):
            net.backward(batch)
            net.optimizer.step()
            bar.update(1)
    assert seen.facts.planned_steps == seen.steps == 6


def test_epochs_of_a_stream_have_passes_but_no_steps() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            return iter(torch.ones(8, 2))

    net, loader = Net(), DataLoader(Stream(), batch_size=2)
    with watched(loader, samples=2) as seen:
        for _epoch in range(3):
            for batch in loader:
                net.backward([batch])
                net.optimizer.step()
    assert (seen.facts.planned_steps, seen.facts.planned_passes, seen.facts.dataset_size) == (None, 3.0, None)


def test_loops_over_optimizers_and_frames_that_call_locals() -> None:
    net, loader = Net(), data()
    optimizers = [net.optimizer]
    mine = locals()
    with watched(loader, samples=4) as seen:
        for _epoch in range(3):
            for batch in loader:
                net.backward(batch)
                for optimizer in optimizers:
                    optimizer.step()
    assert "seen" not in mine, "bareloop read the frame and changed a dictionary of the user"
    assert (seen.facts.planned_steps, seen.facts.planned_passes) == (None, None)


def test_accelerate_shards_of_two_processes() -> None:
    pytest.importorskip("accelerate")
    from accelerate import Accelerator
    from accelerate.data_loader import prepare_data_loader
    from tqdm import tqdm

    accelerator, net = Accelerator(cpu=True), Net()
    optimizer = accelerator.prepare_optimizer(net.optimizer)
    loader = prepare_data_loader(data(rows=42), num_processes=2, process_index=0, put_on_device=False)
    with watched(loader, samples=8) as seen:
        for _epoch in range(3):
            for batch in tqdm(loader, disable=True) if accelerator.is_main_process else loader:
                net.backward(batch)
                optimizer.step()
    assert seen.facts.planned_steps == seen.steps == 18
    assert (seen.facts.planned_passes, seen.facts.dataset_size) == (3.0, 42)


def test_accelerate_accumulates_and_ends_a_window_with_the_loader() -> None:
    pytest.importorskip("accelerate")
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    net = Net()
    model, optimizer, loader = accelerator.prepare(net.model, net.optimizer, data())
    max_train_steps, completed = 8, 0
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0))
    with watched(loader, 4, 16) as seen:
        for _epoch in range(3):
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch[0]).sum())
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    completed += 1
                if completed >= max_train_steps:
                    break
    assert seen.facts.planned_steps == seen.steps == 8
    assert seen.facts.planned_passes == pytest.approx(2 + 32 / 40)


def trainer_plan(**options: Any) -> tuple[Seen, Any]:
    transformers = pytest.importorskip("transformers")
    import tempfile

    config = transformers.GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=16, n_positions=8)
    rows = [{"input_ids": [1] * 8, "labels": [1] * 8} for _ in range(16)]
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            folder, per_device_train_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True, **options
        )
        trainer = transformers.Trainer(model=transformers.GPT2LMHeadModel(config), args=args, train_dataset=rows)
        micro_steps = args.gradient_accumulation_steps
        with watched(None, micro_steps, 2 * micro_steps) as seen:
            trainer.train()
    return seen, trainer


def test_transformers_by_epochs_and_by_steps() -> None:
    seen, trainer = trainer_plan(num_train_epochs=1.5, gradient_accumulation_steps=3)
    assert seen.facts.planned_steps == seen.steps == trainer.state.global_step
    assert (seen.facts.planned_passes, seen.facts.dataset_size) == (1.5, 16)
    seen, trainer = trainer_plan(max_steps=48)
    assert seen.facts.planned_steps == seen.steps == 48
    assert seen.facts.planned_passes == 6.0
    assert seen.facts.plans[0].source == "transformers.Trainer state.max_steps, args.max_steps"


@pytest.mark.filterwarnings("ignore")  # Lightning's own, about torch and about few loader workers
def test_lightning_by_epochs_and_by_steps() -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: Any, _index: int) -> Any:
            return self.layer(batch[0]).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
    for options, steps, passes in (
        ({"max_epochs": 3, "accumulate_grad_batches": 2}, 15, 3.0),
        ({"max_epochs": 2, "limit_train_batches": 5}, 10, 1.0),
        ({"max_steps": 15, "max_epochs": -1}, 15, 1.5),
    ):
        micro_steps = options.get("accumulate_grad_batches", 1)
        trainer = lightning.Trainer(**options, **quiet, enable_model_summary=False)
        with watched(None, micro_steps, 4 * micro_steps) as seen:
            trainer.fit(Module(), data())
        assert seen.facts.planned_steps == seen.steps == steps
        assert (seen.facts.planned_passes, seen.facts.dataset_size) == (passes, 40)


def test_outside_any_loop_nothing_is_planned() -> None:
    net = Net()
    with watched(None) as seen:
        net.optimizer.step()
        net.optimizer.step()
    assert seen.facts == PlanFacts()


def test_a_bound_of_minus_one_for_none_bounds_nothing() -> None:
    """`if steps == most: return` with -1 for "all" is how people write it."""
    net, loader, most = Net(), data(), -1
    with watched(loader, samples=4) as seen:
        steps = 0
        for _epoch in range(3):
            for batch in loader:
                net.backward(batch)
                net.optimizer.step()
                steps += 1
                if steps == most:
                    return
    assert seen.steps == 30
    assert (seen.facts.planned_steps, seen.facts.planned_passes) == (30, 3.0)
