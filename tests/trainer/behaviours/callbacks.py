"""Callbacks: which there are, when they are called and with what, and what their flags do."""

from typing import Any

import pytest
from transformers import DefaultFlowCallback, EarlyStoppingCallback, PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerControl, TrainerState

from behaviours.behaviour import in_area
from behaviours.tasks import Events, line_rows, logged, said, tokenizer, trainer

__all__ = ["BEHAVIOURS"]

STEP = ["step_begin", "pre_optimizer_step", "optimizer_step", "step_end"]
WINDOW = ["step_begin", "substep_end", "pre_optimizer_step", "optimizer_step", "step_end"]
EVALUATION = ["prediction_step", "prediction_step", "log", "evaluate"]


def _kinds(built: Any) -> set[type]:
    return {type(callback) for callback in built.callback_handler.callbacks}


def the_default_callbacks_are_there(cls: type[Any]) -> None:
    """A trainer has the callback of the default flow and one that shows progress, or prints without a bar."""
    assert {DefaultFlowCallback, PrinterCallback} <= _kinds(trainer(cls))
    with_bar = _kinds(trainer(cls, disable_tqdm=False))
    assert {DefaultFlowCallback, ProgressCallback} <= with_bar
    assert PrinterCallback not in with_bar


def callbacks_come_as_classes_or_objects(cls: type[Any]) -> None:
    """A callback is given when building or added later, as a class or as an object."""
    kept = Events()
    built = trainer(cls, callbacks=[Events])
    built.add_callback(kept)
    assert kept in built.callback_handler.callbacks
    assert sum(isinstance(callback, Events) for callback in built.callback_handler.callbacks) == 2
    built.train()
    assert kept.names[0] == "train_begin"


def callbacks_can_be_taken_out(cls: type[Any]) -> None:
    """remove_callback and pop_callback take a class or an object out, pop_callback returns it."""
    events = Events()
    built = trainer(cls, callbacks=[events])
    assert built.pop_callback(Events) is events
    assert built.pop_callback(Events) is None
    built.add_callback(events)
    built.remove_callback(events)
    built.remove_callback(PrinterCallback)
    assert not {Events, PrinterCallback} & _kinds(built)
    built.train()
    assert events.names == ["init_end"]


def doubled_callbacks_are_warned_about(cls: type[Any]) -> None:
    """A second callback of a class is taken with a warning that names it."""
    with said() as heard:
        built = trainer(cls, callbacks=[Events, Events])
    assert any("Events" in message for message in heard)
    assert sum(isinstance(callback, Events) for callback in built.callback_handler.callbacks) == 2


def nothing_is_due_without_the_default_flow(cls: type[Any]) -> None:
    """Without the default flow nothing is logged or saved, and training runs its epochs out."""
    built = trainer(cls, logging_steps=1, save_steps=2)
    built.remove_callback(DefaultFlowCallback)
    assert built.train().global_step == 4
    assert logged(built, "loss") == []


def _flow(name: str, says: str, expected: list[str], **settings: Any) -> Any:
    """A check of the exact sequence of events."""

    def check(cls: type[Any]) -> None:
        events = Events()
        trainer(cls, callbacks=[events], **settings).train()
        assert events.names == ["init_end", "train_begin", *expected, "log", "train_end"], events.names

    check.__name__ = f"flow_{name}"
    check.__doc__ = says
    return check


EPOCH = ["epoch_begin", *STEP * 4, "epoch_end"]
EVALUATED = {"eval_dataset": line_rows(16)}

FLOWS = (
    _flow(
        "of_epochs", "Events of two epochs without anything in between come in order.", EPOCH * 2, num_train_epochs=2
    ),
    _flow(
        "of_windows",
        "A window has one step_begin, substep_end after each micro-step but the last, and one end.",
        ["epoch_begin", *WINDOW * 2, "epoch_end"],
        gradient_accumulation_steps=2,
    ),
    _flow(
        "of_logs",
        "A log comes after the end of its step.",
        ["epoch_begin", *STEP, *STEP, "log", *STEP, *STEP, "log", "epoch_end"],
        logging_steps=2,
    ),
    _flow(
        "of_evaluations",
        "An evaluation comes after the log of its step: prediction steps, log, evaluate.",
        ["epoch_begin", *STEP * 2, "log", *EVALUATION, *STEP * 2, "log", *EVALUATION, "epoch_end"],
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        **EVALUATED,
    ),
    _flow(
        "of_saves",
        "A save comes last in its step, and the last step is saved too.",
        ["epoch_begin", *STEP * 3, "save", *STEP, "save", "epoch_end"],
        save_steps=3,
    ),
    _flow(
        "of_everything_by_epoch",
        "By epochs, log, evaluation and save come after the end of the epoch.",
        [*EPOCH, "log", *EVALUATION, "save"] * 2,
        num_train_epochs=2,
        logging_strategy="epoch",
        eval_strategy="epoch",
        save_strategy="epoch",
        **EVALUATED,
    ),
    _flow(
        "of_different_intervals",
        "Logs, evaluations and saves at different intervals come where each is due.",
        ["epoch_begin", *STEP * 2, "save", *STEP, "log", *EVALUATION, *STEP, *EVALUATION, "save", "epoch_end"],
        logging_steps=3,
        eval_strategy="steps",
        eval_steps=3,
        save_steps=2,
        **EVALUATED,
    ),
)


def predict_has_its_events(cls: type[Any]) -> None:
    """predict() has an event for each batch and one at its end."""
    events = Events()
    trainer(cls, callbacks=[events]).predict(line_rows(16))
    assert events.names == ["init_end", "prediction_step", "prediction_step", "predict"]


def callbacks_see_the_step_they_are_at(cls: type[Any]) -> None:
    """Before the end of a step the state has the step before it, at its end the step itself."""
    events = Events()
    trainer(cls, callbacks=[events], max_steps=2).train()
    assert [event for event in events.seen if event[0] in STEP] == [
        ("step_begin", 0),
        ("pre_optimizer_step", 0),
        ("optimizer_step", 0),
        ("step_end", 1),
        ("step_begin", 1),
        ("pre_optimizer_step", 1),
        ("optimizer_step", 1),
        ("step_end", 2),
    ]


class Acting(TrainerCallback):
    """Does `act(control)` at `event` of `step`."""

    def __init__(self, event: str, step: int, act: Any) -> None:
        def at(args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == step:
                act(control)

        setattr(self, event, at)


def _setting(flag: str) -> Any:
    return lambda control: setattr(control, flag, True)


def training_can_be_stopped(cls: type[Any]) -> None:
    """should_training_stop ends the training after the step, or inside the window at the end of a micro-step."""
    built = trainer(cls, num_train_epochs=5, callbacks=[Acting("on_step_end", 3, _setting("should_training_stop"))])
    assert built.train().global_step == 3
    stop = Acting("on_substep_end", 1, _setting("should_training_stop"))
    assert trainer(cls, num_train_epochs=5, gradient_accumulation_steps=2, callbacks=[stop]).train().global_step == 1


def an_epoch_can_be_stopped(cls: type[Any]) -> None:
    """should_epoch_stop goes on with the next epoch."""
    stop, events = Acting("on_step_end", 2, _setting("should_epoch_stop")), Events()
    trainer(cls, num_train_epochs=2, callbacks=[stop, events]).train()
    assert events.names.count("step_end") == 6
    assert events.names.count("epoch_end") == 2


def anything_can_be_asked_for_at_a_step(cls: type[Any]) -> None:
    """A callback may ask for a log, an evaluation and a save that were not due."""

    def all_of_it(control: Any) -> None:
        control.should_log = control.should_evaluate = control.should_save = True

    events = Events()
    built = trainer(cls, callbacks=[Acting("on_step_end", 2, all_of_it), events], **EVALUATED)
    built.train()
    assert events.names[events.seen.index(("step_end", 2)) + 1 :][:6] == ["log", *EVALUATION, "save"]


def anything_can_be_called_off(cls: type[Any]) -> None:
    """A callback after the default flow may take back a log that was due."""

    def not_now(control: Any) -> None:
        control.should_log = False

    built = trainer(cls, logging_steps=1, callbacks=[Acting("on_step_end", 2, not_now)])
    built.train()
    assert [entry["step"] for entry in built.state.log_history if "loss" in entry] == [1, 3, 4]


def a_callback_can_return_another_control(cls: type[Any]) -> None:
    """The control that a callback returns takes the place of the one it was given."""

    class Replacing(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> TrainerControl:
            return TrainerControl(should_training_stop=state.global_step == 2, should_log=True)

    built = trainer(cls, callbacks=[Replacing()])
    assert built.train().global_step == 2
    assert len(logged(built, "loss")) == 2
    assert isinstance(built.control, TrainerControl)


def callbacks_get_what_they_may_need(cls: type[Any]) -> None:
    """Every event has model, tokenizer, optimizer, scheduler and loaders."""
    seen: dict[str, Any] = {}

    class Needing(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            seen.update(more)

    words = tokenizer()
    collator = trainer(cls).data_collator
    built = trainer(cls, callbacks=[Needing()], processing_class=words, data_collator=collator, **EVALUATED)
    built.evaluate()
    built.train()
    assert seen["model"] is built.model
    assert seen["processing_class"] is words
    assert seen["optimizer"] is built.optimizer
    assert seen["lr_scheduler"] is built.lr_scheduler
    assert len(seen["train_dataloader"]) == 4
    assert len(seen["eval_dataloader"]) == 2


def callbacks_added_in_training_are_called(cls: type[Any]) -> None:
    """A callback that another one adds at the start of an epoch, or at a step, is called from that event on."""
    for event in ("on_epoch_begin", "on_step_begin", "on_step_end"):
        late = Events()

        def add(*args: Any, late: Events = late, **more: Any) -> None:
            if late not in more["handler"].callbacks:
                more["handler"].add_callback(late)

        adding = TrainerCallback()
        built = trainer(cls, callbacks=[adding])
        handler = built.callback_handler
        setattr(adding, event, lambda *args, handler=handler, add=add, **more: add(handler=handler))
        built.train()
        expected = ["epoch_begin", *STEP * 4, "epoch_end", "log", "train_end"]
        assert late.names == expected[expected.index(event.removeprefix("on_")) :], event


def callbacks_taken_out_in_training_are_not_called(cls: type[Any]) -> None:
    """A callback taken out at a step is not called after it."""
    leaving = Events()
    built = trainer(cls, callbacks=[leaving])
    built.add_callback(Acting("on_step_end", 2, lambda control: built.remove_callback(leaving)))
    built.train()
    assert leaving.names.count("step_end") == 2


def events_can_be_set_on_an_object(cls: type[Any]) -> None:
    """A function put on a callback object as an event is called, not its class's."""
    called: list[int] = []
    callback = TrainerCallback()
    callback.on_optimizer_step = lambda args, state, control, **more: called.append(state.global_step)
    trainer(cls, callbacks=[callback]).train()
    assert called == [0, 1, 2, 3]


def early_stopping_stops(cls: type[Any]) -> None:
    """EarlyStoppingCallback ends the training when the metric has not improved for its patience."""
    settings = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    built = trainer(cls, num_train_epochs=9, learning_rate=0.0, metric_for_best_model="loss", **settings, **EVALUATED)
    built.add_callback(EarlyStoppingCallback(early_stopping_patience=2))
    assert built.train().global_step == 12
    assert built.state.best_global_step == 4


def early_stopping_has_a_threshold(cls: type[Any]) -> None:
    """Improvements below the threshold count as none."""
    settings = {"eval_strategy": "epoch", "save_strategy": "no", "metric_for_best_model": "loss"}
    built = trainer(cls, num_train_epochs=5, learning_rate=0.01, **settings, **EVALUATED)
    built.add_callback(EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=1e3))
    assert built.train().global_step == 8


def early_stopping_needs_evaluations_and_a_metric(cls: type[Any]) -> None:
    """EarlyStoppingCallback refuses to start without evaluations or without a metric."""
    for settings in ({"metric_for_best_model": "loss"}, {"eval_strategy": "epoch", **EVALUATED}):
        built = trainer(cls, callbacks=[EarlyStoppingCallback()], **settings)
        with pytest.raises(AssertionError):
            built.train()
        assert built.state.global_step == 0


class Named(TrainerCallback, ExportableState):
    """Has a name that is saved."""

    def __init__(self, name: str = "nobody") -> None:
        self.name = name
        self.steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.steps += 1

    def state(self) -> dict:
        return {"args": {"name": self.name}, "attributes": {"steps": self.steps}}


def states_of_callbacks_are_saved_and_restored(cls: type[Any]) -> None:
    """A callback with a state is restored from a checkpoint when asked for, beside others, and goes on from there."""
    trainer(cls, callbacks=[Named("one"), Events()], max_steps=2, save_steps=2).train()
    settings = {"max_steps": 3, "restore_callback_states_from_checkpoint": True}
    built = trainer(cls, callbacks=[Events(), Named()], **settings)
    built.train(resume_from_checkpoint="out/checkpoint-2")
    [restored] = [callback for callback in built.callback_handler.callbacks if isinstance(callback, Named)]
    assert (restored.name, restored.steps) == ("one", 3)


def callbacks_of_one_class_are_told_apart(cls: type[Any]) -> None:
    """Several callbacks of one class get back each its own arguments, in their order."""
    trainer(cls, callbacks=[Named("one"), Named("two")], max_steps=2, save_steps=2).train()
    settings = {"max_steps": 3, "restore_callback_states_from_checkpoint": True}
    built = trainer(cls, callbacks=[Named(), Named()], **settings)
    built.train(resume_from_checkpoint="out/checkpoint-2")
    assert [it.name for it in built.callback_handler.callbacks if isinstance(it, Named)] == ["one", "two"]


def flags_are_restored_with_the_callbacks(cls: type[Any]) -> None:
    """The flags of a checkpoint's moment are restored with the callbacks' states."""
    trainer(cls, max_steps=2, save_steps=2).train()
    built = trainer(cls, max_steps=2, restore_callback_states_from_checkpoint=True)
    built.state = TrainerState.load_from_json("out/checkpoint-2/trainer_state.json")
    built._load_callback_state()
    assert built.control.should_training_stop


def a_missing_callback_is_warned_about(cls: type[Any]) -> None:
    """Restoring names the callbacks of the checkpoint that the trainer does not have."""
    trainer(cls, callbacks=[Named("one")], max_steps=2, save_steps=2).train()
    built = trainer(cls, max_steps=3, restore_callback_states_from_checkpoint=True)
    with said() as heard:
        built.train(resume_from_checkpoint="out/checkpoint-2")
    assert any("Named" in message for message in heard)


BEHAVIOURS = in_area(
    "callbacks",
    the_default_callbacks_are_there,
    callbacks_come_as_classes_or_objects,
    callbacks_can_be_taken_out,
    doubled_callbacks_are_warned_about,
    nothing_is_due_without_the_default_flow,
    *FLOWS,
    predict_has_its_events,
    callbacks_see_the_step_they_are_at,
    training_can_be_stopped,
    an_epoch_can_be_stopped,
    anything_can_be_asked_for_at_a_step,
    anything_can_be_called_off,
    a_callback_can_return_another_control,
    callbacks_get_what_they_may_need,
    callbacks_added_in_training_are_called,
    callbacks_taken_out_in_training_are_not_called,
    events_can_be_set_on_an_object,
    early_stopping_stops,
    early_stopping_has_a_threshold,
    early_stopping_needs_evaluations_and_a_metric,
    states_of_callbacks_are_saved_and_restored,
    callbacks_of_one_class_are_told_apart,
    flags_are_restored_with_the_callbacks,
    a_missing_callback_is_warned_about,
)
