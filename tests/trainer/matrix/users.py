"""What users write: callbacks, errors, subclasses, patches."""

from matrix import models
from matrix.callbacks import (
    at,
    clipping_changed,
    eager_logging,
    gradients_edited,
    joins_and_leaves,
    learning_rate_edited,
    modes_changed,
    new_control,
    raises,
    sets,
)
from matrix.settings import DIGITS, EVALUATED, HOT, PRIVATE, PUBLIC, TOUCHING, Setting
from matrix.subclasses import (
    caught_loss,
    extra_log,
    flops_of_its_own,
    loss_of_its_own,
    loss_scaled_for_accumulation,
    loss_without_count,
    manual_step,
    own_batches,
    past_its_class,
    patched_class,
    patched_instance,
    step_around,
    watching,
)

__all__ = ["USERS"]

USERS: tuple[Setting, ...] = (
    # callbacks
    Setting(name="stopped by a callback", callbacks=lambda: [at("on_step_end", sets("should_training_stop"), 3)()]),
    Setting(
        name="stopped in mid-window",
        callbacks=lambda: [at("on_substep_end", sets("should_training_stop"), 2)()],
        arguments={"gradient_accumulation_steps": 3},
    ),
    Setting(
        name="stopped when a window begins",
        callbacks=lambda: [at("on_step_begin", sets("should_training_stop"), 2)()],
        arguments={"gradient_accumulation_steps": 2},
    ),
    Setting(name="stopped by a log", callbacks=lambda: [at("on_log", sets("should_training_stop"), 2)()]),
    Setting(
        name="epochs cut short",
        callbacks=lambda: [at("on_step_end", sets("should_epoch_stop"), 2, 4)()],
        arguments={"max_steps": -1, "num_train_epochs": 3},
    ),
    Setting(
        name="an epoch cut short in mid-window",
        callbacks=lambda: [at("on_substep_end", sets("should_epoch_stop"), 1)()],
        arguments={"gradient_accumulation_steps": 2, "max_steps": 5},
    ),
    Setting(name="modes changed after a step", callbacks=lambda: [at("on_step_end", modes_changed)()]),
    Setting(
        name="modes changed in mid-window",
        callbacks=lambda: [at("on_substep_end", modes_changed)()],
        arguments={"gradient_accumulation_steps": 3},
    ),
    Setting(
        name="modes changed when a window begins",
        callbacks=lambda: [at("on_step_begin", modes_changed)()],
        arguments={"gradient_accumulation_steps": 2},
    ),
    Setting(name="a callback joins and leaves", prepare=joins_and_leaves, arguments={"gradient_accumulation_steps": 2}),
    Setting(
        name="log, evaluation and save on demand",
        callbacks=lambda: [
            at("on_step_end", sets("should_log"), 2)(),
            at("on_step_end", sets("should_evaluate"), 3)(),
            at("on_step_end", sets("should_save"), 4)(),
        ],
        arguments={"logging_strategy": "no", "eval_strategy": "no"},
        **EVALUATED,
    ),
    Setting(
        name="log asked for too early",
        callbacks=lambda: [
            at("on_pre_optimizer_step", sets("should_log"), 2)(),
            at("on_substep_end", sets("should_save"), 3)(),
        ],
        arguments={"logging_strategy": "no", "gradient_accumulation_steps": 2},
    ),
    Setting(
        name="a control of the callback's own",
        callbacks=lambda: [
            at("on_step_end", new_control(should_log=True), 2)(),
            at("on_optimizer_step", new_control(), 4)(),
        ],
        arguments={"logging_steps": 2, "max_steps": 5},
    ),
    Setting(name="gradients edited", callbacks=lambda: [at("on_pre_optimizer_step", gradients_edited)()]),
    Setting(
        name="learning rate edited",
        callbacks=lambda: [at("on_step_end", learning_rate_edited, 2)()],
        arguments={"lr_scheduler_type": "constant"},
    ),
    Setting(name="arguments changed in training", callbacks=lambda: [at("on_step_end", clipping_changed)()]),
    Setting(
        name="logging interval changed in training",
        callbacks=lambda: [at("on_step_end", eager_logging, 3)()],
        arguments={"logging_steps": 50},
    ),
    Setting(name="a callback that raises", callbacks=lambda: [at("on_step_end", raises, 3)()], raises="gave up"),
    # errors
    Setting(name="model without loss", raises="no loss", **DIGITS | {"model": models.losing_itself}),
    Setting(name="no data at all", rows=list, raises="no row"),
    # subclasses and patches
    Setting(
        name="overrides: a step around the step",
        subclass=step_around,
        falls_back={"training_step"},
        arguments={"gradient_accumulation_steps": 2},
    ),
    Setting(
        name="overrides: a step of its own",
        subclass=manual_step,
        falls_back={"training_step"},
        arguments={"gradient_accumulation_steps": 2},
    ),
    Setting(
        name="overrides: a loss of its own",
        subclass=loss_of_its_own,
        falls_back={"compute_loss"},
        arguments={"gradient_accumulation_steps": 3, "eval_strategy": "steps", "eval_steps": 3},
        **EVALUATED,
    ),
    Setting(
        name="overrides: a loss with an old signature",
        subclass=loss_without_count,
        falls_back={"compute_loss"},
        arguments={"gradient_accumulation_steps": 2},
    ),
    Setting(
        name="overrides: a loss scaled by the Trainer",
        subclass=loss_scaled_for_accumulation,
        falls_back={"compute_loss"},
        arguments={"gradient_accumulation_steps": 3},
    ),
    Setting(
        name="overrides: a figure of the outputs logged",
        subclass=caught_loss,
        falls_back={"compute_loss"},
        arguments={"logging_steps": 2},
    ),
    Setting(
        name="overrides: batches of its own",
        subclass=own_batches,
        falls_back={"get_batch_samples"},
        arguments={"gradient_accumulation_steps": 2},
    ),
    Setting(
        name="overrides: by the name of the class",
        subclass=past_its_class,
        falls_back={"training_step", "compute_loss"},
        arguments={"gradient_accumulation_steps": 2},
    ),
    Setting(
        name="overrides: its own count of operations", subclass=flops_of_its_own, falls_back={"floating_point_ops"}
    ),
    Setting(
        name="overrides: more in the log",
        subclass=extra_log,
        arguments={"logging_steps": 2, "eval_strategy": "steps", "eval_steps": 2},
        **EVALUATED,
    ),
    *(
        Setting(name=f"overrides: {method}", subclass=watching(method), falls_back={method} & HOT, **TOUCHING)
        for method in PUBLIC + PRIVATE
    ),
    Setting(name="overrides: every public method", subclass=watching(*PUBLIC), falls_back=HOT & {*PUBLIC}, **TOUCHING),
    Setting(
        name="overrides: every private method", subclass=watching(*PRIVATE), falls_back=HOT & {*PRIVATE}, **TOUCHING
    ),
    Setting(
        name="methods patched on the trainer",
        prepare=patched_instance,
        falls_back={"compute_loss", "floating_point_ops"},
        arguments={"gradient_accumulation_steps": 2},
    ),
    Setting(
        name="a method patched on the class",
        prepare=patched_class,
        subclass=watching("store_flos"),
        falls_back={"training_step"},
        arguments={"gradient_accumulation_steps": 2},
    ),
)
