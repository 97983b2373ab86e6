"""`record(setting, side, ...)`: everything that a run under a setting did, as a `Journal`.

What is written while it runs: each forward (inputs, training modes of all modules, state of the random numbers, loss
and logits), each optimizer step (gradients, learning rates, parameters before it), each callback event with the
control flags, each log line and warning. After each `train()`: its result, weights, buffers, gradients, states of
optimizer, scheduler and scaler, random states, the Trainer's state. At the end: every file of the output folder.
"""

import contextlib
import copy
import dataclasses
import io
import logging
import os
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from accelerate.state import GradientState
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import TrainerCallback, TrainerControl, TrainerState

from matrix.files import files
from matrix.journal import Journal

if TYPE_CHECKING:
    from matrix.settings import Setting
    from matrix.verdict import Side

__all__ = ["EVENTS", "Run", "Watch", "record"]

EVENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))
Watch = tuple[str, ...]
"""The events that the recording callback overrides; without any there is no such callback."""

TINY = {
    "use_cpu": True,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 4,
    "learning_rate": 1e-2,
    "max_steps": 6,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "seed": 7,
}
"""Arguments of every setting, where it says nothing else: six steps of two rows, each logged."""

REWORDED = {
    "There seems not to be a single sample in your epoch_iterator": "no batch",
    "The training loader gave no batch": "no batch",
    "The model did not return a loss from the inputs": "no loss",
    "The model returned no loss": "no loss",
    "num_samples should be a positive integer": "no row",
    "train_dataset is empty": "no row",
    "Batch does not contain any data": "no row",
    "train_dataset gave no row at all": "no row",
}
"""Beginnings of messages that lean gives in words of its own, and what they say."""

LOGGERS = ("transformers", "accelerate", "trl", "peft", "bareloop")


class Run:
    """One run under a setting: builds trainers, trains them, and writes what they do.

    Args:
        setting: what to train and how.
        trainer_class: the Trainer under test, with the setting's own subclass in or around it.
        journal: where to write.
        watch: events that a callback of ours overrides.
    """

    def __init__(self, setting: "Setting", trainer_class: type, journal: Journal, watch: Watch) -> None:
        self.setting, self.trainer_class, self.journal, self.watch = setting, trainer_class, journal, watch
        self.trainers: list[transformers.Trainer] = []

    def build(self, *callbacks: TrainerCallback, **arguments: Any) -> transformers.Trainer:
        """A trainer of the setting, with fresh model and data; `arguments` override the setting's."""
        setting = self.setting
        torch.manual_seed(3)
        args = setting.arguments_class(
            output_dir=self.journal.folder, **{**TINY, **copy.deepcopy(setting.arguments), **arguments}
        )
        model = setting.model()
        collator = {"data_collator": setting.collate} if setting.collate else {}
        recording = [recording_callback(self, self.watch)] if self.watch else []
        trainer = self.trainer_class(
            args=args,
            train_dataset=setting.rows(),
            callbacks=[*recording, *setting.callbacks(), *callbacks],
            **{"model": model, "eval_dataset": setting.held_out()} | collator | setting.extra(),
        )
        if setting.watch_forward:
            watch_forward(trainer.model, self.journal)
        setting.prepare(trainer, self.journal)
        self.trainers.append(trainer)
        return trainer

    def train(self, trainer: transformers.Trainer, **keywords: Any) -> None:
        """Trains and writes the result, or the error, and the state that is left."""
        try:
            self.journal.add("result", trainer.train(**keywords)._asdict())
        except Exception as error:
            if self.setting.raises is None or self.setting.raises not in in_our_words(str(error)):
                raise
            self.journal.add("error", f"{type(error).__name__}: {in_our_words(str(error))}")
        self.final_state(trainer)

    def final_state(self, trainer: transformers.Trainer) -> None:
        add = self.journal.add
        model = trainer.model
        add("weight", dict(model.named_parameters()))
        add("gradient", {name: parameter.grad for name, parameter in model.named_parameters()})
        add("buffer", dict(model.named_buffers()))
        add("frozen", [name for name, parameter in model.named_parameters() if not parameter.requires_grad])
        add("mode", [module.training for module in model.modules()])
        add("optimizer", trainer.optimizer and trainer.optimizer.state_dict())
        add("scheduler", trainer.lr_scheduler and trainer.lr_scheduler.state_dict())
        scaler = trainer.accelerator.scaler
        add("scaler", scaler and scaler.state_dict())
        add("random", [random.getstate(), np.random.get_state(), torch.get_rng_state()])
        add("state", dataclasses.asdict(trainer.state))
        add("control", dataclasses.asdict(trainer.control))
        add("is_in_train", trainer.is_in_train)


def record(setting: "Setting", side: "Side", folder: Path, watch: Watch) -> tuple[Journal, Run]:
    """The journal of `setting` run by the class of `side`, with its output in `folder`, and the run itself."""
    journal = Journal(folder)
    GradientState._reset_state()  # accelerate keeps it for the process: a run would begin as the last one ended
    run = Run(setting, side(setting, journal), journal, watch)
    with environment_restored(), watch_optimizers(journal), watch_logs(journal), watch_warnings(journal):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            setting.script(run)
    for trainer in run.trainers:
        end_workers(trainer)
    for name, content in files(folder):
        journal.add(f"file {name}", content)
    return journal, run


def end_workers(trainer: transformers.Trainer) -> None:
    """Ends loader workers that stay: left to the garbage collection they are waited for, five seconds each."""
    iterator = getattr(trainer.callback_handler.train_dataloader, "_iterator", None)
    if iterator is not None:
        iterator._shutdown_workers()


def in_our_words(message: str) -> str:
    return next((said for start, said in REWORDED.items() if message.startswith(start)), message)


def recording_callback(run: Run, watch: Watch) -> TrainerCallback:
    """A callback that overrides exactly the events of `watch` and writes each."""

    def override(event: str) -> Callable[..., None]:
        def write(self: TrainerCallback, args: Any, state: TrainerState, control: TrainerControl, **given: Any) -> None:
            flags = "".join(name[7:] + " " for name, value in dataclasses.asdict(control).items() if value)
            trainer = run.trainers[-1] if run.trainers else None
            run.journal.add(
                f"event {event}",
                {
                    "at": (state.global_step, state.epoch, flags),
                    "given": {name: type(value).__name__ for name, value in given.items()},
                    "told": {name: given[name] for name in ("logs", "metrics") if name in given},
                    "trainer": trainer and visible(trainer),
                    "tokens": state.num_input_tokens_seen,
                },
            )

        return write

    return type("Recording", (TrainerCallback,), {event: override(event) for event in watch})()


def visible(trainer: transformers.Trainer) -> dict[str, Any]:
    """What a callback that holds the trainer can see of the loop."""
    return {
        "syncs": trainer.accelerator.sync_gradients,
        "ends": trainer.accelerator.gradient_state.end_of_dataloader,
        "flops": trainer.current_flos,
        "window": getattr(trainer, "current_gradient_accumulation_steps", None),
        "loss": getattr(trainer, "_tr_loss", None),
    }


def watch_forward(model: torch.nn.Module, journal: Journal) -> None:
    """Writes each forward of `model`."""

    def before(module: torch.nn.Module, args: tuple, keywords: dict[str, Any]) -> None:
        modes = "".join("ET"[part.training] for part in module.modules())
        journal.add(
            "forward", {"modes": modes, "random": torch.get_rng_state(), "args": args, "inputs": dict(keywords)}
        )

    def after(module: torch.nn.Module, args: tuple, keywords: dict[str, Any], output: Any) -> None:
        journal.add(
            "answer", {name: output.get(name) for name in ("loss", "logits")} if hasattr(output, "get") else output
        )

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after, with_kwargs=True)


@contextlib.contextmanager
def environment_restored() -> Iterator[None]:
    """Takes back what transformers and accelerate write into the environment, which later runs would read."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def watch_optimizers(journal: Journal) -> Iterator[None]:
    """Writes each step of any torch optimizer: its groups without the parameters, parameters and gradients."""

    def before(optimizer: torch.optim.Optimizer, args: tuple, keywords: dict[str, Any]) -> None:
        groups = optimizer.param_groups
        journal.add("optimizer step", [{k: v for k, v in group.items() if k != "params"} for group in groups])
        journal.add("stepped", [[(p, p.grad) for p in group["params"]] for group in groups])

    handle = register_optimizer_step_pre_hook(before)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def watch_logs(journal: Journal) -> Iterator[None]:
    """Writes each log line of the libraries from WARNING up; those given once per process may come again."""

    class Written(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            message = record.getMessage()
            if not message.startswith("bareloop: "):  # what lean says of itself
                journal.add("log line", f"{record.levelname} {in_our_words(message)}")

    handler = Written(logging.WARNING)
    transformers.utils.logging.warning_once.cache_clear()
    for name in LOGGERS:
        logging.getLogger(name).addHandler(handler)
    try:
        yield
    finally:
        for name in LOGGERS:
            logging.getLogger(name).removeHandler(handler)


@contextlib.contextmanager
def watch_warnings(journal: Journal) -> Iterator[None]:
    """Writes each warning, wherever it is given, except those of the lean notice itself."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        journal.add("warning", f"{warning.category.__name__}: {warning.message}")
