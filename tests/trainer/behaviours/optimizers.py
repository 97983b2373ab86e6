"""Optimizers and schedulers: what is made from the arguments, and what the user brings."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor, AdafactorSchedule, GreedyLR

from behaviours.behaviour import in_area
from behaviours.tasks import Line, line_rows, logged, near, text_model, trainer, weights

__all__ = ["BEHAVIOURS"]


def _ran(built: Any) -> Any:
    built.train()
    return built


def an_optimizer_and_a_scheduler_can_be_brought(cls: type[Any]) -> None:
    """The pair in `optimizers` trains as it is, at its own learning rate."""
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    built = _ran(trainer(cls, model, optimizers=(optimizer, scheduler), logging_steps=1))
    assert built.optimizer.optimizer is optimizer
    assert built.lr_scheduler is scheduler
    assert logged(built, "learning_rate") == [0.3] * 4
    assert not near(built, _ran(trainer(cls, Line())), 1e-4)


def an_optimizer_alone_gets_the_scheduler_of_the_arguments(cls: type[Any]) -> None:
    """A brought optimizer without a scheduler is scheduled by the arguments, from its own learning rate."""
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    built = _ran(trainer(cls, model, optimizers=(optimizer, None), logging_steps=1))
    assert logged(built, "learning_rate") == pytest.approx([0.4, 0.3, 0.2, 0.1])


def an_optimizer_class_can_be_brought(cls: type[Any]) -> None:
    """optimizer_cls_and_kwargs makes the optimizer once the model's parameters are known."""
    built = _ran(trainer(cls, Line(), optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.2, "momentum": 0.5})))
    assert isinstance(built.optimizer.optimizer, torch.optim.SGD)
    assert built.optimizer.param_groups[0]["momentum"] == 0.5


class Halves:
    """Makes an optimizer of a whole model, as optimizers that treat layers differently need it."""

    def __call__(self, model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
        groups = [{"params": [parameter]} for parameter in model.parameters()]
        return torch.optim.SGD(groups, **settings)


def an_optimizer_can_be_made_from_the_model(cls: type[Any]) -> None:
    """A class whose objects take the model and return an optimizer is used as such."""
    built = _ran(trainer(cls, Line(), optimizer_cls_and_kwargs=(Halves, {"lr": 0.2})))
    assert [len(group["params"]) for group in built.optimizer.param_groups] == [1, 1]
    assert weights(built)["slope"] != 0


def optimizers_are_known_by_name(cls: type[Any]) -> None:
    """optim names the library's optimizers, each of which trains."""
    expected = {
        "adamw_torch": torch.optim.AdamW,
        "adamw_torch_fused": torch.optim.AdamW,
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
        "rmsprop": torch.optim.RMSprop,
        "adafactor": Adafactor,
    }
    for name, kind in expected.items():
        built = _ran(trainer(cls, Line(), optim=name, max_steps=2))
        assert isinstance(built.optimizer.optimizer, kind), name
        assert weights(built)["slope"] != 0, name


def settings_of_adam_reach_it(cls: type[Any]) -> None:
    """Betas, epsilon and weight decay of the arguments are the optimizer's."""
    built = trainer(cls, adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-6, weight_decay=0.25)
    group = built.create_optimizer().param_groups[0]
    assert (group["betas"], group["eps"], group["weight_decay"], group["lr"]) == ((0.8, 0.95), 1e-6, 0.25, 0.1)


def biases_and_norms_are_not_decayed(cls: type[Any]) -> None:
    """Weight decay is for weights: biases and the parameters of normalisation layers are in a group without it."""
    model = text_model()
    built = trainer(cls, model, weight_decay=0.1)
    built.create_optimizer_and_scheduler(4)
    decayed, others = built.optimizer.param_groups
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert all("bias" in names[parameter] or "ln_" in names[parameter] for parameter in others["params"])
    assert not any("bias" in names[parameter] or "ln_" in names[parameter] for parameter in decayed["params"])


def what_is_decayed_can_be_overridden(cls: type[Any]) -> None:
    """get_decay_parameter_names decides what is decayed."""

    class Named(cls):
        def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
            return ["slope"]

    built = trainer(Named, Line(), weight_decay=0.5)
    groups = built.create_optimizer().param_groups
    assert [len(group["params"]) for group in groups] == [1, 1]
    assert groups[0]["params"][0] is built.model.slope


def groups_and_rates_can_be_read(cls: type[Any]) -> None:
    """Groups and learning rates can be read once there is an optimizer, and raise before."""
    built = trainer(cls)
    for read in (built.get_learning_rates, built.get_optimizer_group):
        with pytest.raises(ValueError):
            read()
    built.create_optimizer()
    assert built.get_learning_rates() == [0.1, 0.1]
    assert len(built.get_optimizer_group()) == 2
    parameter = built.model.slope
    assert any(parameter is member for member in built.get_optimizer_group(parameter)["params"])


def making_the_optimizer_can_be_overridden(cls: type[Any]) -> None:
    """create_optimizer and create_scheduler of a subclass are used."""

    class Own(cls):
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.25)
            return self.optimizer

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.planned = num_training_steps
            self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, factor=1.0)
            return self.lr_scheduler

    built = _ran(trainer(Own, Line(), logging_steps=1))
    assert built.planned == 4
    assert logged(built, "learning_rate") == [0.25] * 4


class Modal(torch.optim.SGD):
    """Has a mode, like optimizers that keep averages of the weights; writes down each change."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.modes: list[str] = []

    def train(self) -> None:
        self.modes.append("train")

    def eval(self) -> None:
        self.modes.append("eval")

    def step(self, closure: Any = None) -> Any:
        assert self.modes[-1] == "train"
        return super().step(closure)


def optimizers_with_a_mode_are_switched(cls: type[Any]) -> None:
    """An optimizer with train() and eval() is in training mode at each step and in the other in evaluation."""
    settings = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": line_rows(8)}
    built = _ran(trainer(cls, Line(), optimizer_cls_and_kwargs=(Modal, {"lr": 0.1}), max_steps=4, **settings))
    inner = built.optimizer.optimizer
    assert inner.modes.count("eval") == 2
    assert weights(built)["slope"] != 0


def adafactor_can_choose_its_own_rate(cls: type[Any]) -> None:
    """Adafactor with relative steps and its schedule trains without a learning rate."""
    model = Line()
    optimizer = Adafactor(model.parameters(), scale_parameter=True, relative_step=True, warmup_init=True, lr=None)
    built = _ran(trainer(cls, model, optimizers=(optimizer, AdafactorSchedule(optimizer)), logging_steps=1))
    assert optimizer.param_groups[0]["lr"] > 0
    assert len(logged(built, "learning_rate")) == 4


def _rates(cls: type[Any], **settings: Any) -> list[float]:
    defaults = {"max_steps": 10, "warmup_steps": 2, "logging_steps": 1, "learning_rate": 0.2}
    return logged(_ran(trainer(cls, **(defaults | settings))), "learning_rate")


def the_rate_falls_in_a_line(cls: type[Any]) -> None:
    """The default schedule rises in the warm-up and falls linearly to zero; each step logs the rate that it used."""
    assert _rates(cls) == pytest.approx([0, 0.1, *(0.2 * (10 - step) / 8 for step in range(2, 10))])


def the_rate_follows_a_cosine(cls: type[Any]) -> None:
    """The cosine schedule falls from the end of the warm-up along half a wave."""
    expected = [0.1 * (1 + math.cos(math.pi * (step - 2) / 8)) for step in range(2, 10)]
    assert _rates(cls, lr_scheduler_type="cosine") == pytest.approx([0, 0.1, *expected])


def the_rate_can_be_constant(cls: type[Any]) -> None:
    """The constant schedules hold the rate, with or without warm-up."""
    assert _rates(cls, lr_scheduler_type="constant") == [0.2] * 10
    assert _rates(cls, lr_scheduler_type="constant_with_warmup") == pytest.approx([0, 0.1] + [0.2] * 8)


def a_cosine_can_end_above_zero(cls: type[Any]) -> None:
    """cosine_with_min_lr ends at min_lr."""
    settings = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 0.05}}
    built = trainer(cls, max_steps=10, warmup_steps=2, learning_rate=0.2, **settings)
    built.train()
    assert built.lr_scheduler.get_last_lr()[0] == pytest.approx(0.05)


def a_warm_up_can_start_above_zero(cls: type[Any]) -> None:
    """cosine_warmup_with_min_lr takes its first step at a rate above zero and ends at min_lr."""
    kwargs = {"min_lr": 0.01}
    rates = _rates(cls, lr_scheduler_type="cosine_warmup_with_min_lr", lr_scheduler_kwargs=kwargs)
    assert rates[0] == pytest.approx(0.1)
    assert rates[1] == pytest.approx(0.2)
    assert rates[-1] == pytest.approx(0.01)


def schedules_take_settings(cls: type[Any]) -> None:
    """lr_scheduler_kwargs reach the schedule."""
    rates = _rates(cls, lr_scheduler_type="polynomial", lr_scheduler_kwargs={"power": 2.0, "lr_end": 0.1})
    assert rates[2:] == pytest.approx([0.1 * ((10 - step) / 8) ** 2 + 0.1 for step in range(2, 10)])


def a_plateau_lowers_the_rate(cls: type[Any]) -> None:
    """reduce_lr_on_plateau lowers the rate after evaluations that do not improve, and not before."""

    class Worsening(cls):
        def evaluate(self, *args: Any, **settings: Any) -> dict[str, float]:
            metrics = super().evaluate(*args, **settings)
            metrics["eval_loss"] = 1.0 + self.state.global_step
            return metrics

    built = trainer(
        Worsening,
        num_train_epochs=4,
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs={"patience": 1, "factor": 0.5},
        eval_strategy="epoch",
        eval_dataset=line_rows(8),
        metric_for_best_model="eval_loss",
        logging_strategy="epoch",
    )
    built.train()
    assert logged(built, "learning_rate") == [0.1, 0.1, 0.1, 0.05]


def a_plateau_scheduler_can_be_brought(cls: type[Any]) -> None:
    """A ReduceLROnPlateau of the user's keeps its settings and is stepped with the metric."""
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.2, patience=5, cooldown=2)
    settings = {"eval_strategy": "epoch", "eval_dataset": line_rows(8), "metric_for_best_model": "eval_loss"}
    built = _ran(trainer(cls, model, optimizers=(optimizer, scheduler), num_train_epochs=2, **settings))
    assert built.lr_scheduler is scheduler
    assert (scheduler.factor, scheduler.patience, scheduler.cooldown) == (0.2, 5, 2)
    assert scheduler.last_epoch == 2
    assert scheduler.best == pytest.approx(min(logged(built, "eval_loss")))


def the_greedy_schedule_moves_both_ways(cls: type[Any]) -> None:
    """The greedy schedule adjusts the rate by the metric of the evaluations."""
    built = _ran(
        trainer(
            cls,
            num_train_epochs=8,
            learning_rate=0.2,
            lr_scheduler_type="greedy",
            lr_scheduler_kwargs={"patience": 1, "factor": 0.5},
            eval_strategy="epoch",
            eval_dataset=line_rows(8),
            metric_for_best_model="eval_loss",
            logging_strategy="epoch",
        )
    )
    assert isinstance(built.lr_scheduler, GreedyLR)
    assert len(set(logged(built, "learning_rate"))) > 1


BEHAVIOURS = in_area(
    "optimizers and schedules",
    an_optimizer_and_a_scheduler_can_be_brought,
    an_optimizer_alone_gets_the_scheduler_of_the_arguments,
    an_optimizer_class_can_be_brought,
    an_optimizer_can_be_made_from_the_model,
    optimizers_are_known_by_name,
    settings_of_adam_reach_it,
    biases_and_norms_are_not_decayed,
    what_is_decayed_can_be_overridden,
    groups_and_rates_can_be_read,
    making_the_optimizer_can_be_overridden,
    optimizers_with_a_mode_are_switched,
    adafactor_can_choose_its_own_rate,
    the_rate_falls_in_a_line,
    the_rate_follows_a_cosine,
    the_rate_can_be_constant,
    a_cosine_can_end_above_zero,
    a_warm_up_can_start_above_zero,
    schedules_take_settings,
    a_plateau_lowers_the_rate,
    a_plateau_scheduler_can_be_brought,
    the_greedy_schedule_moves_both_ways,
)
