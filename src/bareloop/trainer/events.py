"""The callback events of a step, delivered only to the callbacks that override them.

The stock handler calls every callback for every event, most of them the empty method of the base class. Here the
callbacks that override an event are found before the loop, and an event that nobody overrides costs nothing. The
flow and progress callbacks of transformers are called directly. An event that any other callback overrides is
delivered by the stock handler, since such a callback may add or remove callbacks while it runs.
"""

from collections.abc import Callable
from typing import Any

from transformers import (
    DefaultFlowCallback,
    EarlyStoppingCallback,
    IntervalStrategy,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
)
from transformers.trainer_callback import CallbackHandler

from bareloop.trainer.report import FallBack
from bareloop.trainer.upstream import EVENTS

__all__ = ["Events"]

_OF_A_STEP = ("on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_substep_end", "on_step_end")
_CAN_ASK_FOR_A_LOG = (*_OF_A_STEP, "on_epoch_begin", "on_epoch_end", "on_evaluate", "on_save")
_OF_TRANSFORMERS = (DefaultFlowCallback, EarlyStoppingCallback, PrinterCallback, ProgressCallback)


class Events:
    """Who gets the events of a step. Decided anew after a callback that changed the list of callbacks.

    Each of the five events is a function without arguments, or None where nobody overrides it.
    """

    __slots__ = (
        "_after_foreign",
        "_by_stock",
        "_trainer",
        "callbacks",
        "foreign_log",
        "log_can_be_foreseen",
        "on_optimizer_step",
        "on_pre_optimizer_step",
        "on_step_begin",
        "on_step_end",
        "on_substep_end",
    )

    on_step_begin: Callable[[], None] | None
    on_pre_optimizer_step: Callable[[], None] | None
    on_optimizer_step: Callable[[], None] | None
    on_substep_end: Callable[[], None] | None
    on_step_end: Callable[[], None] | None
    callbacks: list[Any]
    """The callbacks that were asked what they override."""
    log_can_be_foreseen: bool
    """Only transformers' own flow decides when to log, so `logs_at` says it before the step."""
    foreign_log: bool
    """A callback that is not of transformers gets the logs."""

    def __init__(self, trainer: Any, *, by_stock: bool, after_foreign: Callable[[], None]) -> None:
        """`by_stock`: the handler is not the tested one, so it delivers every event itself; `after_foreign`: to be
        called after a callback that is not of transformers ran."""
        self._trainer = trainer
        self._after_foreign = after_foreign
        self._by_stock = by_stock or type(trainer.callback_handler) is not CallbackHandler
        self._decide()

    def _decide(self) -> None:
        trainer = self._trainer
        self.callbacks = list(trainer.callback_handler.callbacks)
        for event in _OF_A_STEP:
            setattr(self, event, self._delivery(event))
        self.foreign_log = self._has_foreign("on_log")
        self.log_can_be_foreseen = not self._by_stock and not any(map(self._has_foreign, _CAN_ASK_FOR_A_LOG))

    def logs_at(self, step: int) -> bool:
        """Whether transformers' own flow logs when `step` steps are done, or may at the end of an epoch that ends there."""
        args, state = self._trainer.args, self._trainer.state
        if args.logging_strategy == IntervalStrategy.EPOCH or (step == 1 and args.logging_first_step):
            return True
        return args.logging_strategy == IntervalStrategy.STEPS and step % state.logging_steps == 0

    def fallen_back(self) -> tuple[FallBack, ...]:
        """Events that the stock handler delivers, and why."""
        if self._by_stock:
            handler = type(self._trainer.callback_handler)
            return (FallBack(part=EVENTS, reason=f"{handler.__qualname__} is not the handler this was tested with"),)
        found: list[FallBack] = []
        for event in _OF_A_STEP:
            names = [type(each).__qualname__ for each in self.callbacks if _is_foreign(each, event)]
            if names:
                found.append(FallBack(part=EVENTS, reason=f"{event} is overridden by {', '.join(names)}"))
        return tuple(found)

    def _has_foreign(self, event: str) -> bool:
        return any(_is_foreign(callback, event) for callback in self.callbacks)

    def _delivery(self, event: str) -> Callable[[], None] | None:
        overriding = [callback for callback in self.callbacks if _overrides(callback, event)]
        if self._by_stock or self._has_foreign(event):
            return self._stock_delivery(event)
        return _direct_delivery(self._trainer, event, overriding) if overriding else None

    def _stock_delivery(self, event: str) -> Callable[[], None]:
        trainer = self._trainer

        def deliver() -> None:
            fire = getattr(trainer.callback_handler, event)
            trainer.control = fire(trainer.args, trainer.state, trainer.control)
            if trainer.callback_handler.callbacks != self.callbacks:
                self._decide()
            self._after_foreign()

        return deliver


def _overrides(callback: Any, event: str) -> bool:
    method = getattr(callback, event)
    return getattr(method, "__func__", method) is not getattr(TrainerCallback, event)


def _is_foreign(callback: Any, event: str) -> bool:
    is_of_transformers = type(callback) in _OF_TRANSFORMERS and event not in vars(callback)
    return _overrides(callback, event) and not is_of_transformers


def _direct_delivery(trainer: Any, event: str, callbacks: list[Any]) -> Callable[[], None]:
    methods = [getattr(callback, event) for callback in callbacks]
    handler = trainer.callback_handler

    def deliver() -> None:
        control = trainer.control
        for method in methods:
            result = method(
                trainer.args,
                trainer.state,
                control,
                model=handler.model,
                processing_class=handler.processing_class,
                optimizer=handler.optimizer,
                lr_scheduler=handler.lr_scheduler,
                train_dataloader=handler.train_dataloader,
                eval_dataloader=handler.eval_dataloader,
            )
            if result is not None:
                control = result
        trainer.control = control

    return deliver
