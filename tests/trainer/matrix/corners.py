"""Corners: what users do that a loop which decides everything beforehand could miss."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from transformers import TrainerCallback

from matrix import data, models, scripts
from matrix.callbacks import at
from matrix.journal import Journal
from matrix.settings import DIGITS, SAVED, Setting

__all__ = ["CORNERS"]


def undetached(cls: type, journal: Journal) -> type:
    class Undetached(cls):
        """Returns the loss with its graph."""

        def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            model.train()
            loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
            self.accelerator.backward(loss)
            return loss

    return Undetached


def same_buffer(cls: type, journal: Journal) -> type:
    class Same(cls):
        """Returns the same tensor every time, with another loss in it: what a CUDA graph does."""

        def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            loss = super().training_step(model, inputs, num_items_in_batch)
            self.buffer = getattr(self, "buffer", torch.empty(()))
            return self.buffer.copy_(loss)

    return Same


def one_element(cls: type, journal: Journal) -> type:
    class One(cls):
        def compute_loss(self, *args: Any, **keywords: Any) -> torch.Tensor:
            return super().compute_loss(*args, **keywords).reshape(1)

    return One


def count_as_number(cls: type, journal: Journal) -> type:
    class Number(cls):
        def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> int:
            return int(super()._get_num_items_in_batch(batch_samples, device))

    return Number


def batch_of_two(cls: type, journal: Journal) -> type:
    class Two(cls):
        """The loader gives pairs and no mapping."""

        def compute_loss(
            self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            pixels, labels = inputs
            return model(pixels, labels)["loss"]

    return Two


def sampler_of_its_own(cls: type, journal: Journal) -> type:
    class Every(torch.utils.data.Sampler):
        """Rows in an order that follows from the epoch."""

        epoch = 0

        def __init__(self, size: int) -> None:
            self.size = size

        def __len__(self) -> int:
            return self.size

        def __iter__(self) -> Any:
            journal.add("order", self.epoch)
            return iter([(3 * index + self.epoch) % self.size for index in range(self.size)])

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    class Sampled(cls):
        def _get_train_sampler(self, train_dataset: Any = None) -> torch.utils.data.Sampler:
            return Every(len(self.train_dataset))

    return Sampled


def callback_from_the_loss(cls: type, journal: Journal) -> type:
    late = type(
        "LateActing",
        (TrainerCallback,),
        {
            event: lambda self, args, state, control, event=event, **given: journal.add(
                f"late {event}", state.global_step
            )
            for event in ("on_substep_end", "on_pre_optimizer_step", "on_step_end")
        },
    )

    class Adds(cls):
        """A callback joins in the middle of a window, added by the loss."""

        def compute_loss(self, *args: Any, **keywords: Any) -> Any:
            if self.state.global_step == 2 and late not in map(type, self.callback_handler.callbacks):
                self.add_callback(late)
            return super().compute_loss(*args, **keywords)

    return Adds


def log_from_the_loss(cls: type, journal: Journal) -> type:
    class Asks(cls):
        """The loss asks for a log."""

        def compute_loss(self, *args: Any, **keywords: Any) -> Any:
            if self.state.global_step in (1, 4):
                self.control.should_log = True
            return super().compute_loss(*args, **keywords)

    return Asks


def evaluates_in_its_loss(cls: type, journal: Journal) -> type:
    class Peeks(cls):
        """A forward in evaluation mode before each training forward."""

        def compute_loss(
            self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            model.eval()
            with torch.no_grad():
                journal.add("peek", model(**inputs)["loss"])
            model.train()
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    return Peeks


def counts_nothing(trainer: transformers.Trainer, journal: Journal) -> None:
    """The old way out for models whose loss ignores the count."""
    trainer.model_accepts_loss_kwargs = False


def clipped_elsewhere(trainer: transformers.Trainer, journal: Journal) -> None:
    """Clips by value, through accelerate."""

    def clip(parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        journal.add("clips", max_norm)
        torch.nn.utils.clip_grad_value_(list(parameters), 1e-3)
        return torch.tensor(5.0)

    trainer.accelerator.clip_grad_norm_ = clip


def stepped_in_backward(trainer: transformers.Trainer, journal: Journal) -> None:
    """Parameters are changed as soon as their gradient is there, which is then dropped."""

    @torch.no_grad()
    def step(parameter: torch.Tensor) -> None:
        parameter.sub_(0.1 * parameter.grad)
        parameter.grad = None

    for parameter in trainer.model.parameters():
        parameter.register_post_accumulate_grad_hook(step)


def replacing(change: Callable[[Any], None], *steps: int, event: str = "on_step_end") -> Callable[..., None]:
    """A callback does `change(trainer)` at `steps`."""

    def prepare(trainer: transformers.Trainer, journal: Journal) -> None:
        def act(args: Any, state: Any, control: Any, **given: Any) -> None:
            change(trainer)

        trainer.add_callback(at(event, act, *steps)())

    return prepare


def new_optimizer(trainer: Any) -> None:
    parameters = trainer.model.parameters()
    trainer.optimizer = trainer.accelerator.prepare_optimizer(torch.optim.SGD(parameters, lr=0.3))


def new_loss(trainer: Any) -> None:
    trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch=None: outputs.logits.square().mean()


def new_method(trainer: Any) -> None:
    inherited = trainer.compute_loss
    trainer.compute_loss = lambda *args, **keywords: 2 * inherited(*args, **keywords)


def longer_windows(trainer: Any) -> None:
    trainer.args.gradient_accumulation_steps = 3


def filter_off(trainer: Any) -> None:
    trainer.args.logging_nan_inf_filter = False


def new_head(trainer: Any) -> None:
    torch.manual_seed(11)
    trainer.model.lm_head = nn.Linear(models.WIDTH, data.VOCABULARY, bias=False)


def half(model: Callable[[], nn.Module], dtype: torch.dtype) -> Callable[[], nn.Module]:
    return lambda: model().to(dtype)


def pixels_in(dtype: torch.dtype) -> Callable[[list], dict[str, torch.Tensor]]:
    def collate(rows: list) -> dict[str, torch.Tensor]:
        return {
            "pixels": torch.stack([row["pixels"] for row in rows]).to(dtype),
            "labels": torch.tensor([row["labels"] for row in rows]),
        }

    return collate


def pairs(rows: list) -> tuple[torch.Tensor, torch.Tensor]:
    batch = pixels_in(torch.float32)(rows)
    return batch["pixels"], batch["labels"]


def boxes(rows: list) -> dict[str, Any]:
    batch = pixels_in(torch.float32)(rows)
    return {"pixels": batch["pixels"], "labels": [{"label": label} for label in batch["labels"]]}


def shifted(rows: list) -> dict[str, torch.Tensor]:
    batch = data.padded(rows)
    return {**batch, "shift_labels": nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)}


def shuffled_stream() -> Any:
    return data.table(9).remove_columns("length").to_iterable_dataset().shuffle(seed=3, buffer_size=4)


ACCUMULATED = {"gradient_accumulation_steps": 2}

CORNERS: tuple[Setting, ...] = (
    # losses
    Setting(name="loss with its graph", subclass=undetached, falls_back={"training_step"}, arguments=ACCUMULATED),
    Setting(
        name="loss in a tensor that is written again",
        subclass=same_buffer,
        falls_back={"training_step"},
        arguments={"logging_steps": 3},
    ),
    Setting(name="loss of one element", subclass=one_element, falls_back={"compute_loss"}, raises="broadcast shape"),
    Setting(
        name="loss in float64",
        arguments=ACCUMULATED | {"logging_steps": 2},
        **DIGITS | {"model": half(models.Digits, torch.float64), "collate": pixels_in(torch.float64)},
    ),
    Setting(
        name="loss in bfloat16",
        arguments=ACCUMULATED | {"logging_steps": 2},
        **DIGITS | {"model": half(models.Digits, torch.bfloat16), "collate": pixels_in(torch.bfloat16)},
    ),
    Setting(name="model in bfloat16", model=half(models.llama, torch.bfloat16), arguments=ACCUMULATED),
    Setting(
        name="parameters of two types",
        falls_back={"clip"},
        arguments=ACCUMULATED,
        **DIGITS | {"model": models.TwoTypes},
    ),
    Setting(
        name="parameters of two types, thawed later",
        falls_back={"clip"},
        prepare=replacing(lambda trainer: trainer.model.requires_grad_(True), 2),
        **DIGITS | {"model": models.two_types_frozen},
    ),
    Setting(
        name="inputs looked at in evaluation mode",
        subclass=evaluates_in_its_loss,
        falls_back={"compute_loss"},
        arguments=ACCUMULATED,
        **DIGITS,
    ),
    Setting(
        name="a count that is a number",
        subclass=count_as_number,
        falls_back={"_get_num_items_in_batch"},
        arguments=ACCUMULATED,
    ),
    Setting(name="loss keywords denied", prepare=counts_nothing, arguments=ACCUMULATED),
    Setting(name="labels shifted by the collator", collate=shifted, arguments=ACCUMULATED),
    Setting(
        name="labels that are no tensor", model=models.Boxes, rows=data.digits, collate=boxes, arguments=ACCUMULATED
    ),
    Setting(
        name="batch that is a pair",
        subclass=batch_of_two,
        falls_back={"compute_loss"},
        arguments=ACCUMULATED,
        **DIGITS | {"collate": pairs},
    ),
    # models that change
    Setting(
        name="model with a train of its own",
        falls_back={"module walk"},
        arguments=ACCUMULATED,
        **DIGITS | {"model": models.statistics_frozen},
    ),
    Setting(
        name="model that grows in its first forward",
        arguments=ACCUMULATED | {"max_steps": 8},
        **DIGITS | {"model": models.growing},
    ),
    Setting(
        name="a head replaced in training", prepare=replacing(new_head, 2), arguments=ACCUMULATED | {"max_steps": 5}
    ),
    Setting(name="stepped in backward", prepare=stepped_in_backward),
    # trainers that change
    Setting(name="optimizer replaced in training", prepare=replacing(new_optimizer, 2)),
    Setting(name="compute_loss_func given in training", prepare=replacing(new_loss, 2)),
    Setting(name="compute_loss patched in training", falls_back={"compute_loss"}, prepare=replacing(new_method, 2)),
    Setting(
        name="windows longer from the second epoch",
        prepare=replacing(longer_windows, 3, event="on_epoch_begin"),
        arguments=ACCUMULATED | {"max_steps": 7},
    ),
    Setting(
        name="windows longer in mid-epoch",
        prepare=replacing(longer_windows, 1),
        arguments=ACCUMULATED | {"max_steps": 7},
    ),
    Setting(
        name="nan filter switched off in training",
        prepare=replacing(filter_off, 2),
        nan_steps=1,
        arguments={"logging_steps": 2},
        **DIGITS | {"model": models.exploding(float("nan"), 1, 4)},
    ),
    Setting(name="clipped through accelerate", falls_back={"clip"}, prepare=clipped_elsewhere),
    Setting(
        name="a callback added by the loss",
        subclass=callback_from_the_loss,
        falls_back={"compute_loss"},
        arguments=ACCUMULATED,
    ),
    Setting(
        name="a log asked for by the loss",
        subclass=log_from_the_loss,
        falls_back={"compute_loss"},
        arguments={"logging_steps": 3},
    ),
    # data
    Setting(name="sampler of its own", subclass=sampler_of_its_own),
    Setting(name="stream that shuffles", rows=shuffled_stream, arguments=ACCUMULATED),
    Setting(name="stream that shuffles, resumed", rows=shuffled_stream, arguments=SAVED, script=scripts.resumed),
    Setting(
        name="accumulation set in accelerate's configuration",
        arguments={"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}},
    ),
    # scripts
    Setting(
        name="trained again after an error",
        script=scripts.again_after_an_error,
        raises="gave up",
        arguments=ACCUMULATED,
    ),
    Setting(name="steps made by hand", script=scripts.by_hand, arguments=ACCUMULATED | {"max_steps": 3}),
)
