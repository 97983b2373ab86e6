"""The lean epoch does what the stock epoch does, with the same bits, and costs what a bare loop costs.

The matrix of settings is in `test_equal_to_stock.py`; here are the parts that the epoch replaces, one by one.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

from bareloop.trainer.hf import lean

ROWS = 11
WALL_CLOCK = ("runtime", "per_second")


def gpt2(layers: int = 1) -> nn.Module:
    torch.manual_seed(3)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=layers, n_head=2, bos_token_id=1, eos_token_id=1)
    )


def rows(count: int = ROWS) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 64, (count, 8), generator=draw)
    labels = ids.clone()
    labels[::3, :5] = -100  # windows of unequal label counts
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


class Endless(torch.utils.data.IterableDataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        yield from rows(self.count)


def train(cls: type, folder: Path, arguments: dict[str, Any], **kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """A finished trainer of `cls` and everything of it that must not depend on `cls`."""
    fixed = {"output_dir": str(folder), "use_cpu": True, "report_to": "none", "disable_tqdm": True, "seed": 9}
    usual = {"per_device_train_batch_size": 2, "logging_steps": 2, "save_strategy": "no", "learning_rate": 1e-2}
    args = TrainingArguments(**{**fixed, **usual, **arguments})
    made = {"model": gpt2, "train_dataset": rows, "callbacks": list, **kwargs}
    trainer = cls(
        args=args,
        **{name: value() if name in ("model", "train_dataset", "callbacks") else value for name, value in made.items()},
    )
    output = trainer.train()
    history = [
        {key: value for key, value in line.items() if not key.endswith(WALL_CLOCK)}
        for line in trainer.state.log_history
    ]
    optimizer = trainer.optimizer.state_dict()["state"]
    return trainer, {
        "log_history": repr(history),
        "weights": [value.clone() for value in trainer.model.state_dict().values()],
        "optimizer": [
            value.clone() for each in optimizer.values() for value in each.values() if torch.is_tensor(value)
        ],
        "gradients": [value.grad is None for value in trainer.model.parameters()],
        "flos": repr(trainer.state.total_flos),
        "result": (output.global_step, repr(output.training_loss), trainer.state.epoch),
        "rng": torch.get_rng_state(),
        "modes": [module.training for module in trainer.model.modules()],
    }


def assert_equal(stock: dict[str, Any], ours: dict[str, Any]) -> None:
    for name, expected in stock.items():
        if name in ("weights", "optimizer"):
            assert [each.dtype for each in expected] == [each.dtype for each in ours[name]], name
            pairs = zip(expected, ours[name], strict=True)
            assert all(torch.equal(bits(one), bits(other)) for one, other in pairs), name
        elif torch.is_tensor(expected):
            assert torch.equal(expected, ours[name]), name
        else:
            assert expected == ours[name], name


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of `tensor`, so that NaN equals NaN and 0.0 does not equal -0.0."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def both(tmp_path: Path, arguments: dict[str, Any], base: type = transformers.Trainer, **kwargs: Any) -> Any:
    """Train the stock class and its lean one, compare, and give the lean trainer."""
    _, stock = train(base, tmp_path / "stock", arguments, **kwargs)
    trainer, ours = train(lean(base), tmp_path / "lean", arguments, **kwargs)
    assert_equal(stock, ours)
    assert trainer.lean_report.loop_is_lean, str(trainer.lean_report)
    return trainer


class NanAt(nn.Module):
    """A model whose loss is NaN at some of its forwards."""

    def __init__(self, *bad: int) -> None:
        super().__init__()
        self.inner, self.bad, self.calls = gpt2(), bad, 0

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.calls += 1
        loss = self.inner(input_ids=input_ids, labels=labels).loss
        return (torch.where(torch.tensor(self.calls in self.bad), loss.detach() * torch.nan, loss),)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"num_train_epochs": 2}, {}),
    "ragged windows": ({"gradient_accumulation_steps": 4, "num_train_epochs": 2, "logging_steps": 1}, {}),
    "stops in a window": ({"gradient_accumulation_steps": 4, "max_steps": 3, "logging_first_step": True}, {}),
    "tight clip": ({"max_grad_norm": 0.01, "logging_steps": 1}, {}),
    "no clip": ({"max_grad_norm": 0.0, "logging_steps": 3, "num_train_epochs": 2}, {}),
    "no clip, logs of epochs": ({"max_grad_norm": 0.0, "logging_strategy": "epoch", "num_train_epochs": 2}, {}),
    "never logs": ({"logging_strategy": "no", "num_train_epochs": 2}, {}),
    "bf16": ({"bf16": True, "gradient_accumulation_steps": 2}, {}),
    "label smoothing": ({"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 3}, {}),
    "counts tokens": ({"include_num_input_tokens_seen": "all"}, {}),
    "plateau": (
        {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 2},
        {"eval_dataset": rows(4)},
    ),
    "evaluates": (
        {"eval_strategy": "steps", "eval_steps": 1, "gradient_accumulation_steps": 2},
        {"eval_dataset": rows(4)},
    ),
    "loss function": (
        {"gradient_accumulation_steps": 2},
        {"compute_loss_func": lambda outputs, labels, num_items_in_batch: outputs.logits.float().square().sum() / 64},
    ),
    "iterable": ({"max_steps": 5, "gradient_accumulation_steps": 2}, {"train_dataset": lambda: Endless(7)}),
    "model without loss keywords": (
        {"gradient_accumulation_steps": 4, "num_train_epochs": 2},
        {"model": lambda: NanAt()},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_same_bits_as_the_stock_epoch(name: str, tmp_path: Path) -> None:
    arguments, kwargs = CASES[name]
    trainer = both(tmp_path, arguments, **kwargs)
    assert trainer.lean_report.fallen_back == ()


@pytest.mark.parametrize("filters", [True, False])
def test_losses_of_nan_are_logged_as_by_stock_and_counted(
    filters: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = {"logging_nan_inf_filter": filters, "num_train_epochs": 2, "logging_steps": 3}
    # backward of a NaN that hangs on nothing leaves the gradient of the other branch: zero
    trainer = both(tmp_path, arguments, model=lambda: NanAt(2, 5, 9))
    assert trainer.lean_report.non_finite_losses == (3 if filters else 0)
    assert ("3 micro-steps had a loss of NaN" in caplog.text) == filters


class Recorder(TrainerCallback):
    """Overrides some events, and writes what it sees."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("substep", state.global_step, sorted(kwargs)))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.seen.append(("before", state.global_step, float(sum(p.grad.norm() for p in model.parameters()))))


def test_a_users_callback_gets_its_events_as_from_stock(tmp_path: Path) -> None:
    seen = []
    for cls in (transformers.Trainer, lean(transformers.Trainer)):
        recorder = Recorder()
        trainer, _ = train(cls, tmp_path, {"gradient_accumulation_steps": 2}, callbacks=lambda r=recorder: [r])
        seen.append(recorder.seen)
    assert seen[0] == seen[1] != []
    assert trainer.lean_report.reasons("events") == (
        "on_pre_optimizer_step is overridden by Recorder",
        "on_substep_end is overridden by Recorder",
    )


class Switch(TrainerCallback):
    """Puts a part of the model in evaluation mode, adds a callback, asks for a log, and stops."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.transformer.drop.eval()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_log = state.global_step == 2
        control.should_training_stop = state.global_step == 4


class Adder(TrainerCallback):
    added: Recorder
    trainer: Any

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            self.trainer.add_callback(self.added)


def test_a_callback_may_change_modes_logs_and_the_end(tmp_path: Path) -> None:
    both(
        tmp_path,
        {"max_grad_norm": 0.0, "logging_steps": 100, "gradient_accumulation_steps": 2, "num_train_epochs": 3},
        callbacks=lambda: [Switch()],
    )


def test_a_callback_added_while_training_gets_its_events(tmp_path: Path) -> None:
    seen = []
    for cls in (transformers.Trainer, lean(transformers.Trainer)):
        adder, adder.added = Adder(), Recorder()

        class Own(cls):  # type: ignore[misc, valid-type]
            def __init__(self, *args: Any, adder: Adder = adder, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                adder.trainer = self

        train(Own, tmp_path, {"gradient_accumulation_steps": 2}, callbacks=lambda a=adder: [a])
        seen.append(adder.added.seen)
    assert seen[0] == seen[1] != []


def test_modes_set_by_a_users_loss_are_reset_as_by_stock(tmp_path: Path) -> None:
    class Own(transformers.Trainer):
        def compute_loss(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, *args, **kwargs)
            model.eval()
            return loss

    trainer = both(tmp_path, {"gradient_accumulation_steps": 2}, base=Own)
    assert trainer.lean_report.reasons("compute_loss")


def test_an_iterable_shorter_than_max_steps_is_not_asked_again(tmp_path: Path) -> None:
    calls = Counter()

    class Own(lean(transformers.Trainer)):  # type: ignore[misc]
        def _get_num_items_in_batch(self, batches: list[Any], device: torch.device) -> Any:
            calls[len(batches)] += 1
            return super()._get_num_items_in_batch(batches, device)

    train(
        Own,
        tmp_path,
        {"max_steps": 4000, "save_strategy": "no"},
        train_dataset=lambda: Endless(6),
        callbacks=lambda: [StopAt(6)],
    )
    assert calls[1] == 6
    assert calls[0] == 1


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def test_an_empty_iterable_stops_training_with_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    arguments = {"max_steps": 9, "accelerator_config": {"dispatch_batches": False}}
    trainer, _ = train(lean(transformers.Trainer), tmp_path, arguments, train_dataset=lambda: Endless(0))
    assert trainer.state.global_step == 0
    assert "gave no batch" in caplog.text


def test_resumes_in_mid_epoch_as_stock(tmp_path: Path) -> None:
    arguments = {"gradient_accumulation_steps": 2, "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 2}
    found = []
    for cls in (transformers.Trainer, lean(transformers.Trainer)):
        folder = tmp_path / str(len(found))
        train(cls, folder, arguments)

        class Resumed(cls):  # type: ignore[misc, valid-type]
            checkpoint = str(folder / "checkpoint-2")

            def train(self) -> Any:  # type: ignore[override]
                return super().train(resume_from_checkpoint=self.checkpoint)

        found.append(train(Resumed, folder, arguments)[1])
    assert_equal(*found)


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops[str(func)] += 1
        return func(*args, **(kwargs or {}))


Boundary = Callable[[], None]


def within(run: Callable[[Boundary], None], first: int, last: int, begin: Boundary, end: Boundary) -> None:
    """Call `begin` at the `first` and `end` at the `last` of the steps that `run` tells of."""
    seen = 0

    def boundary() -> None:
        nonlocal seen
        seen += 1
        if seen == first:
            begin()
        elif seen == last:
            end()

    run(boundary)


def ops_of(run: Callable[[Boundary], None], first: int, last: int) -> Counter[str]:
    mode = Counting()
    within(run, first, last, mode.__enter__, lambda: mode.__exit__(None, None, None))
    return mode.ops


def calls_of(run: Callable[[Boundary], None], first: int, last: int) -> int:
    calls = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    within(run, first, last, lambda: sys.setprofile(profile), lambda: sys.setprofile(None))
    return calls


def bare_loop(accumulate: int, boundary: Boundary) -> None:
    """The loop of the same work: token-averaged loss over the window, clip, AdamW, linear schedule."""
    model, data = gpt2(2), rows(64)
    batches = torch.utils.data.DataLoader(data, batch_size=2)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 100)
    model.config.use_cache = False
    model.train()
    iterator, total = iter(batches), torch.tensor(0.0)
    for _ in range(32 // accumulate):
        window = [next(iterator) for _ in range(accumulate)]
        count = sum(batch["labels"][..., 1:].ne(-100).sum() for batch in window)
        for batch in window:
            loss = model(**batch, num_items_in_batch=count).loss
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        boundary()


@pytest.mark.parametrize("accumulate", [1, 4])
def test_costs_what_a_bare_loop_costs(accumulate: int, tmp_path: Path) -> None:
    def lean_loop(boundary: Boundary) -> None:
        class Own(lean(transformers.Trainer)):  # type: ignore[misc]
            def create_optimizer(self, model: Any = None) -> Any:
                optimizer = super().create_optimizer(model)
                optimizer.register_step_post_hook(lambda *args: boundary())
                return optimizer

        train(
            Own,
            tmp_path,
            {"gradient_accumulation_steps": accumulate, "num_train_epochs": 1, "logging_steps": 1000},
            model=lambda: gpt2(2),
            train_dataset=lambda: rows(64),
        )

    def own_loop(boundary: Boundary) -> None:
        bare_loop(accumulate, boundary)

    first, last = 2, 32 // accumulate - 1
    micro_steps = (last - first) * accumulate
    ops, bare_ops = ops_of(lean_loop, first, last), ops_of(own_loop, first, last)
    assert sum(ops.values()) <= sum(bare_ops.values()), ops - bare_ops
    for name in ("aten._local_scalar_dense.default", "aten._to_copy.default", "aten.copy_.default"):
        assert ops[name] <= bare_ops[name], name
    assert calls_of(lean_loop, first, last) <= calls_of(own_loop, first, last) + 60 * micro_steps
