"""What users write on top of a Trainer: subclasses, patched methods, losses and metrics of their own.

A subclass is a function of the class below it and of the run's journal, so that the same text can be put around stock,
around a lean class, or inside one.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from matrix.data import Once, padded, words
from matrix.journal import Journal

__all__ = [
    "Modal",
    "Subclass",
    "accuracy",
    "batch_seen_by_flops",
    "caught_loss",
    "extra_log",
    "flops_of_its_own",
    "loader_used_up",
    "loss_of_its_own",
    "loss_scaled_for_accumulation",
    "loss_sum",
    "loss_without_count",
    "manual_step",
    "nothing",
    "optimizer_of_its_own",
    "own_batches",
    "own_loader",
    "past_its_class",
    "patched_class",
    "patched_instance",
    "running_accuracy",
    "scaling",
    "step_around",
    "top_token",
    "watching",
]

Subclass = Callable[[type, Journal], type]


def nothing(cls: type, journal: Journal) -> type:
    return cls


def watching(*names: str) -> Subclass:
    """Overrides each method of `names`, as inherited and with a line in the journal per call."""

    def subclass(cls: type, journal: Journal) -> type:
        class Watching(cls):
            pass

        def override(name: str) -> Callable:
            def method(self: Any, *args: Any, **keywords: Any) -> Any:
                journal.add(f"call {name}", {"args": len(args), "keywords": sorted(keywords)})
                return getattr(super(Watching, self), name)(*args, **keywords)

            return method

        for name in names:
            setattr(Watching, name, override(name))
        return Watching

    return subclass


def step_around(cls: type, journal: Journal) -> type:
    class Around(cls):
        """Doubles what is logged, not what is trained."""

        def training_step(
            self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
        ) -> torch.Tensor:
            return 2 * super().training_step(model, inputs, num_items_in_batch)

    return Around


def past_its_class(cls: type, journal: Journal) -> type:
    class Past(cls):
        """Reaches the stock methods by their class and not by `super()`, past what lies between."""

        def training_step(self, *args: Any, **keywords: Any) -> torch.Tensor:
            return transformers.Trainer.training_step(self, *args, **keywords)

        def compute_loss(self, *args: Any, **keywords: Any) -> Any:
            return transformers.Trainer.compute_loss(self, *args, **keywords)

    return Past


def manual_step(cls: type, journal: Journal) -> type:
    class Manual(cls):
        """Forward and backward of its own, with a penalty, and nothing inherited."""

        def training_step(
            self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
        ) -> torch.Tensor:
            model.train()
            inputs = self._prepare_inputs(inputs)
            loss = model(**inputs).loss + 1e-3 * sum(p.square().sum() for p in model.parameters())
            loss = loss / self.current_gradient_accumulation_steps
            self.accelerator.backward(loss)
            journal.add("manual", [self.accelerator.sync_gradients, self.state.global_step])
            return loss.detach()

    return Manual


def loss_of_its_own(cls: type, journal: Journal) -> type:
    class Own(cls):
        def compute_loss(
            self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
            return (loss, {"loss": loss, "logits": outputs.logits}) if return_outputs else loss

    return Own


def loss_without_count(cls: type, journal: Journal) -> type:
    class Old(cls):
        """The signature of years ago: anything else goes into keywords."""

        def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
            journal.add("keywords", sorted(keywords))
            return super().compute_loss(model, inputs, return_outputs=return_outputs)

    return Old


def loss_scaled_for_accumulation(cls: type, journal: Journal) -> type:
    class Scaled(loss_of_its_own(cls, journal)):
        loss_is_scaled_for_ga = False

    return Scaled


def caught_loss(cls: type, journal: Journal) -> type:
    class Caught(cls):
        """Asks for the outputs too, and keeps a figure of them for the log."""

        def compute_loss(
            self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            self.spread = outputs.logits.detach().std()
            return (loss, outputs) if return_outputs else loss

        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            super().log({**logs, "spread": self.spread.item()}, start_time)

    return Caught


def own_batches(cls: type, journal: Journal) -> type:
    class Batches(cls):
        """Every second batch twice, and a count of its own."""

        def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list, Any]:
            batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
            journal.add("batches", [len(batches), num_batches, str(device)])
            return [batches[0], *batches[: num_batches - 1]], count * 2

    return Batches


def own_loader(cls: type, journal: Journal) -> type:
    class Loader(cls):
        """A loader that accelerate never saw, and a sampler in the order of the rows."""

        def get_train_dataloader(self) -> torch.utils.data.DataLoader:
            journal.add("call get_train_dataloader")
            return torch.utils.data.DataLoader(words(7), batch_size=2, collate_fn=padded, shuffle=True)

    return Loader


def loader_used_up(cls: type, journal: Journal) -> type:
    class UsedUp(cls):
        """A loader over rows that can be read once."""

        def get_train_dataloader(self) -> torch.utils.data.DataLoader:
            return torch.utils.data.DataLoader(Once(words(7)), batch_size=2, collate_fn=padded)

    return UsedUp


def flops_of_its_own(cls: type, journal: Journal) -> type:
    class Flops(cls):
        def floating_point_ops(self, inputs: dict[str, Any]) -> int:
            return int(inputs["input_ids"].ne(0).sum()) * 1000

    return Flops


def batch_seen_by_flops(cls: type, journal: Journal) -> type:
    class Seen(cls):
        """The batch that this method is given is the loader's, whatever the loss took out of its own."""

        def floating_point_ops(self, inputs: dict[str, Any]) -> int:
            journal.add("seen", sorted(inputs))
            return super().floating_point_ops(inputs)

    return Seen


def extra_log(cls: type, journal: Journal) -> type:
    class Extra(cls):
        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            logs["spread"] = sum(p.detach().abs().sum().item() for p in self.model.parameters())
            logs["modes"] = sum(module.training for module in self.model.modules())
            super().log(logs, start_time)

    return Extra


def optimizer_of_its_own(cls: type, journal: Journal) -> type:
    class Own(cls):
        def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
            return self.optimizer

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.lr_scheduler = torch.optim.lr_scheduler.CyclicLR(self.optimizer, 0.01, 0.1, step_size_up=2)
            self._created_lr_scheduler = True
            return self.lr_scheduler

    return Own


def scaling(cls: type, journal: Journal) -> type:
    class Scaling(cls):
        """fp16 with a GradScaler on a CPU, which accelerate leaves out; the first scales overflow, so steps are skipped."""

        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.accelerator.native_amp = True
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26, growth_interval=2)

    return Scaling


class Modal(torch.optim.SGD):
    """An optimizer with modes, like the schedule-free ones: it steps in training mode alone."""

    training = False

    def train(self) -> None:
        self.training = True

    def eval(self) -> None:
        self.training = False

    def step(self, closure: Any = None) -> Any:
        if not self.training:
            raise RuntimeError("stepped in evaluation mode")
        return super().step(closure)


def patched_instance(trainer: transformers.Trainer, journal: Journal) -> None:
    """Replaces methods on the trainer itself after it was built."""
    inherited = trainer.compute_loss

    def compute_loss(
        model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        journal.add("patched", sorted(inputs))
        found = inherited(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        return found if return_outputs else 3 * found

    trainer.compute_loss = compute_loss
    trainer.floating_point_ops = lambda inputs: 11


def patched_class(trainer: transformers.Trainer, journal: Journal) -> None:
    """Replaces a method on a class of the user's own between building and training."""
    cls = type(trainer)
    inherited = cls.training_step

    def training_step(self: Any, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        journal.add("patched", sorted(inputs))
        return inherited(self, model, inputs, num_items_in_batch)

    cls.training_step = training_step


def loss_sum(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None) -> torch.Tensor:
    """Sum over the labels that count, divided by the window's; a `compute_loss_func`."""
    loss = nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return loss / num_items_in_batch


def accuracy(prediction: transformers.EvalPrediction) -> dict[str, float]:
    logits, labels = prediction
    return {"accuracy": float((np.argmax(logits, axis=-1)[:, :-1] == labels[:, 1:]).mean()), "rows": len(labels)}


def running_accuracy() -> Callable[..., dict[str, float]]:
    """A metric for `batch_eval_metrics`: it keeps sums between calls."""
    sums: list[float] = []

    def compute(prediction: transformers.EvalPrediction, compute_result: bool) -> dict[str, float]:
        sums.append(float(np.asarray(prediction.predictions).sum()))
        return {"sum": sum(sums), "calls": len(sums)} if compute_result else {}

    return compute


def top_token(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(dim=-1)
