"""TRL's SFTTrainer and PEFT models, lean against stock: the same bits in losses, weights and optimizer state.

Both run in the test, from the same seed; the task is that of `examples/sft_*.py`.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import get_peft_model

from bareloop.trainer.hf import lean

pytestmark = [
    pytest.mark.usefixtures("frozen_heap"),
    # TRL sets this argument, and transformers warns of its name.
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
]
EXAMPLES = Path(__file__).parents[2] / "examples"
OPTIONS = argparse.Namespace(layers=1, width=32, lora=True)
STEPS = 4
WALL_CLOCK = ("runtime", "per_second")


@pytest.fixture(name="task")
def task_fixture(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The examples' `sft_task`; TRL sends nothing home under CI."""
    monkeypatch.setenv("CI", "1")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    known = set(sys.modules)
    import sft_task

    yield sft_task
    for name in {"sft_task", "corpus"} - known:
        sys.modules.pop(name, None)


def supervised(task: Any, kind: Callable[[type], type], folder: Path, *, lora: bool, **arguments: Any) -> Any:
    """An SFTTrainer that trained, evaluated and saved."""
    import trl

    args = trl.SFTConfig(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        learning_rate=1e-3,
        max_length=64,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=STEPS,
        use_cpu=True,
        dataloader_pin_memory=False,
        report_to="none",
        disable_tqdm=True,
        **arguments,
    )
    rows = task.rows()
    trainer = kind(trl.SFTTrainer)(
        model=task.llama(OPTIONS),
        args=args,
        train_dataset=rows.select(range(24)),
        eval_dataset=rows.select(range(24, 28)),
        processing_class=task.tokenizer(),
        peft_config=task.adapters(OPTIONS) if lora else None,
    )
    trainer.train()
    return trainer


def adapted(task: Any, kind: Callable[[type], type], folder: Path) -> Any:
    """A plain Trainer that trained the LoRA adapters of a model."""
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        logging_steps=1,
        save_steps=STEPS,
        use_cpu=True,
        dataloader_pin_memory=False,
        report_to="none",
        disable_tqdm=True,
    )
    blocks = [{"input_ids": row, "labels": row} for row in torch.arange(24 * 16).remainder(97).reshape(24, 16)]
    torch.manual_seed(0)
    model = get_peft_model(task.llama(OPTIONS), task.adapters(OPTIONS))
    trainer = kind(transformers.Trainer)(model=model, args=args, train_dataset=blocks)
    trainer.train()
    return trainer


def outcome(trainer: Any) -> dict[str, Any]:
    """What training left behind, without times."""
    folder = Path(trainer.args.output_dir)
    history = [
        {key: value for key, value in entry.items() if not key.endswith(WALL_CLOCK)}
        for entry in trainer.state.log_history
    ]
    return {
        "history": history,
        "flops": trainer.state.total_flos,
        "weights": dict(trainer.model.state_dict()),
        "optimizer": trainer.optimizer.state_dict(),
        "random": torch.get_rng_state(),
        "files": sorted(str(file.relative_to(folder)) for file in folder.rglob("*")),
    }


def assert_same_bits(stock: Any, own: Any, where: str = "") -> None:
    """Equal down to the last bit, tensors anywhere inside included."""
    assert type(stock) is type(own), where
    if isinstance(stock, dict):
        assert stock.keys() == own.keys(), where
        for key in stock:
            assert_same_bits(stock[key], own[key], f"{where}.{key}")
    elif isinstance(stock, list | tuple):
        assert len(stock) == len(own), where
        for index, (first, second) in enumerate(zip(stock, own, strict=True)):
            assert_same_bits(first, second, f"{where}[{index}]")
    elif isinstance(stock, torch.Tensor):
        assert torch.equal(stock, own), where
    else:
        assert stock == own, where


def itself(kind: type) -> type:
    """The stock class."""
    return kind


@pytest.mark.parametrize(
    ("lora", "arguments"),
    [
        pytest.param(False, {}, id="defaults of TRL: bf16 and checkpointing"),
        pytest.param(False, {"bf16": False, "gradient_checkpointing": False, "loss_type": "dft"}, id="fp32, dft"),
        pytest.param(True, {"bf16": False, "gradient_checkpointing": False}, id="LoRA"),
        pytest.param(True, {}, id="LoRA, bf16 and checkpointing"),
    ],
)
def test_sft_trainer_trains_to_the_same_bits(lora: bool, arguments: dict[str, Any], task: Any, tmp_path: Path) -> None:
    stock = supervised(task, itself, tmp_path / "stock", lora=lora, **arguments)
    own = supervised(task, lean, tmp_path / "lean", lora=lora, **arguments)
    assert_same_bits(outcome(stock), outcome(own))
    assert own.lean_report.loop_is_lean
    assert {str(each) for each in own.lean_report.fallen_back} == {
        "training_step: overridden by SFTTrainer",
        "compute_loss: overridden by SFTTrainer",
    }
    assert {entry["step"] for entry in own.state.log_history if "mean_token_accuracy" in entry} >= set(range(1, STEPS))


def test_adapters_under_the_plain_trainer_train_to_the_same_bits(task: Any, tmp_path: Path) -> None:
    stock, own = adapted(task, itself, tmp_path / "stock"), adapted(task, lean, tmp_path / "lean")
    assert_same_bits(outcome(stock), outcome(own))
    assert own.lean_report.loop_is_lean
    assert own.lean_report.fallen_back == ()
    adapters = [name for name, weight in own.model.named_parameters() if weight.requires_grad]
    assert adapters
    assert all("lora" in name for name in adapters)
