"""`lean(cls)`: the classes it makes, what stays the user's, and when the stock loop runs."""

import contextlib
import gc
import inspect
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Seq2SeqTrainer, TrainingArguments

from bareloop.trainer.hf import LeanLoop, Trainer, lean
from bareloop.trainer.options import LeanOptions


def gpt2() -> nn.Module:
    torch.manual_seed(3)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1)
    )


def made(cls: type, folder: Path, *, lean_options: Any = None, **arguments: Any) -> Any:
    """A trainer of `cls` on eight rows, to be trained for four steps."""
    ids = torch.randint(0, 64, (8, 8), generator=torch.Generator().manual_seed(5))
    args = TrainingArguments(
        output_dir=str(folder),
        **{
            "use_cpu": True,
            "report_to": "none",
            "disable_tqdm": True,
            "save_strategy": "no",
            "max_steps": 4,
            "per_device_train_batch_size": 2,
            "logging_steps": 1,
            **arguments,
        },
    )
    extra = {} if lean_options is None else {"lean_options": lean_options}
    return cls(
        model=gpt2(), args=args, train_dataset=[{"input_ids": row, "labels": row.clone()} for row in ids], **extra
    )


def trained(cls: type, folder: Path, **arguments: Any) -> Any:
    trainer = made(cls, folder, **arguments)
    trainer.train()
    return trainer


def losses(trainer: Any) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def test_the_classes_it_makes() -> None:
    assert issubclass(Trainer, transformers.Trainer)
    assert Trainer.__name__ == "Trainer"
    assert lean(Trainer) is Trainer
    own = lean(Seq2SeqTrainer)
    assert own.__mro__[1:4] == (Seq2SeqTrainer, LeanLoop, transformers.Trainer)
    assert "lean(Seq2SeqTrainer)" in repr(own)
    assert lean(own) is own


def test_its_signature_is_the_stock_one_and_two_keywords() -> None:
    stock = inspect.signature(Seq2SeqTrainer.__init__).parameters
    ours = dict(inspect.signature(lean(Seq2SeqTrainer).__init__).parameters)
    assert ours.pop("lean_options").kind is inspect.Parameter.KEYWORD_ONLY
    assert ours.pop("swarm").kind is inspect.Parameter.KEYWORD_ONLY
    assert list(ours.values()) == list(stock.values())


@pytest.mark.parametrize("wrong", [nn.Linear, "Trainer", None])
def test_only_classes_of_trainers_can_be_lean(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"transformers\.Trainer or a subclass"):
        lean(wrong)


def test_options_are_always_there(tmp_path: Path) -> None:
    assert made(Trainer, tmp_path).lean_options == LeanOptions()
    options = LeanOptions()
    assert made(Trainer, tmp_path, lean_options=options).lean_options is options
    with pytest.raises(TypeError, match="lean_options"):
        made(Trainer, tmp_path, lean_options={"prefetch_batches": 2})


def test_the_report_before_and_after_training(tmp_path: Path) -> None:
    trainer = made(Trainer, tmp_path)
    assert trainer.lean_report.loop_is_lean
    assert trainer.lean_report.lean == ()
    trainer.train()
    assert {"compute_loss", "clip", "events", "module walk"} <= set(trainer.lean_report.lean)
    assert trainer.lean_report.fallen_back == ()


def test_a_finished_training_keeps_no_model_alive(tmp_path: Path) -> None:
    trainer = trained(Trainer, tmp_path)
    found = weakref.ref(trainer.model)
    trainer.model = trainer.model_wrapped = trainer.callback_handler.model = None
    trainer.accelerator.free_memory()
    trainer.optimizer = trainer.callback_handler.optimizer = None
    gc.collect()
    assert found() is None


class Journal:
    """Classes of a user who overrides what can be overridden, and writes down each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def around(self, cls: type) -> type:
        calls = self.calls

        class Own(cls):  # type: ignore[misc, valid-type]
            def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
                calls.append(("training_step", type(inputs).__name__, float(num_items_in_batch), model.training))
                return super().training_step(model, inputs, num_items_in_batch)

            def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
                calls.append(("compute_loss", sorted(inputs), sorted(kwargs), args, model.training))
                return super().compute_loss(model, inputs, *args, **kwargs)

            def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
                found = super().get_batch_samples(epoch_iterator, num_batches, device)
                calls.append(("get_batch_samples", num_batches, device, len(found[0]), found[1].dtype))
                return found

            def floating_point_ops(self, inputs: Any) -> int:
                calls.append(("floating_point_ops", sorted(inputs)))
                return super().floating_point_ops(inputs) + 1

            def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
                calls.append(("log", sorted(logs), float(self._tr_loss)))
                super().log(logs, *args, **kwargs)

            def _prepare_inputs(self, inputs: Any) -> Any:
                calls.append(("_prepare_inputs", sorted(inputs)))
                return super()._prepare_inputs(inputs)

            def create_optimizer(self, *args: Any) -> Any:
                calls.append(("create_optimizer",))
                return super().create_optimizer(*args)

            def _clip_grad_norm(self, model: Any) -> Any:
                norm = super()._clip_grad_norm(model)
                calls.append(("_clip_grad_norm", float(norm)))
                return norm

            def compute_loss_context_manager(self) -> Any:
                calls.append(("compute_loss_context_manager",))
                return contextlib.nullcontext()

        return Own


@pytest.mark.parametrize("how", ["lean(own)", "own(lean)"])
def test_overridden_methods_are_called_as_by_stock(how: str, tmp_path: Path) -> None:
    stock, ours = Journal(), Journal()
    expected = trained(stock.around(transformers.Trainer), tmp_path, gradient_accumulation_steps=2)
    cls = lean(ours.around(transformers.Trainer)) if how == "lean(own)" else ours.around(Trainer)
    trainer = trained(cls, tmp_path, gradient_accumulation_steps=2)
    assert {name for name, *_ in stock.calls} == {
        name for name in vars(Journal().around(object)) if name in dir(cls) and not name.startswith("__")
    }
    assert ours.calls == stock.calls
    assert losses(trainer) == losses(expected) != []
    assert trainer.state.total_flos == expected.state.total_flos
    report = trainer.lean_report
    assert report.loop_is_lean
    assert {each.part for each in report.fallen_back} == {
        "training_step",
        "compute_loss",
        "compute_loss_context_manager",
        "get_batch_samples",
        "floating_point_ops",
        "_prepare_inputs",
        "_clip_grad_norm",
    }
    assert all("Own" in each.reason for each in report.fallen_back)


def test_a_method_set_on_the_object_is_called(tmp_path: Path) -> None:
    trainer = made(Trainer, tmp_path)
    stock = trainer.compute_loss
    calls = []
    trainer.compute_loss = lambda *args, **kwargs: calls.append(1) or stock(*args, **kwargs)
    trainer.train()
    assert len(calls) == 4
    assert trainer.lean_report.reasons("compute_loss") == ("overridden by the object itself",)


def test_an_overridden_epoch_runs_and_the_lean_one_in_it(tmp_path: Path) -> None:
    class Own(transformers.Trainer):
        own_epochs = 0

        def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
            self.own_epochs += 1
            super()._run_epoch(*args, **kwargs)

    stock, trainer = trained(transformers.Trainer, tmp_path), trained(lean(Own), tmp_path)
    assert trainer.own_epochs == 1
    assert losses(trainer) == losses(stock)
    assert trainer.lean_report.loop_is_lean


def test_an_epoch_that_leaves_out_the_lean_one_is_said(tmp_path: Path) -> None:
    class Own(transformers.Trainer):
        def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
            self.control.should_training_stop = True

    trainer = made(lean(Own), tmp_path)
    trainer.train()
    assert not trainer.lean_report.loop_is_lean
    (reason,) = trainer.lean_report.reasons("loop")
    assert "Own" in reason


@pytest.mark.parametrize(
    ("arguments", "part_of_reason"),
    [({"torch_empty_cache_steps": 2}, "torch_empty_cache_steps")],
)
def test_what_is_not_covered_runs_the_stock_loop_with_one_line(
    arguments: dict[str, Any], part_of_reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stock, trainer = trained(transformers.Trainer, tmp_path), trained(Trainer, tmp_path, **arguments)
    assert losses(trainer) == losses(stock)
    assert not trainer.lean_report.loop_is_lean
    assert part_of_reason in str(trainer.lean_report)
    assert caplog.text.count("the stock loop runs") == 1


def test_an_upstream_that_changed_runs_the_stock_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = transformers.Trainer.training_step
    seen = []

    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return stock(self, *args, **kwargs)

    trainer = made(Trainer, tmp_path)
    monkeypatch.setattr(transformers.Trainer, "training_step", training_step)
    trainer.train()
    assert len(seen) == 4
    assert "Trainer.training_step is not what transformers" in str(trainer.lean_report)


def test_trains_again_after_an_error_as_stock(tmp_path: Path) -> None:
    def failing(base: type) -> Any:
        class Fails(base):  # type: ignore[misc, valid-type]
            fails = True

            def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
                if self.fails and self.state.global_step == 2:
                    raise RuntimeError("out of luck")
                return super().compute_loss(*args, **kwargs)

        return made(Fails, tmp_path, logging_steps=3)

    found = []
    for base in (transformers.Trainer, Trainer):
        trainer = failing(base)
        with pytest.raises(RuntimeError, match="out of luck"):
            trainer.train()
        trainer.fails = False
        output = trainer.train()
        found.append((losses(trainer), output.training_loss, trainer.state.total_flos))
    assert found[0] == found[1]
