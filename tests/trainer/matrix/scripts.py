"""What a user does with a trainer: train once, again, or from a checkpoint after a stop."""

import os

from matrix.callbacks import at, raises, sets
from matrix.recorder import Run

__all__ = [
    "again_after_an_error",
    "by_hand",
    "continued",
    "evaluated_after",
    "finished_then_resumed",
    "once",
    "resumed",
    "resumed_with_more_steps",
    "twice",
]


def once(run: Run) -> None:
    run.train(run.build())


def twice(run: Run) -> None:
    """The same trainer trains a second time."""
    trainer = run.build()
    run.train(trainer)
    run.train(trainer)


def resumed(run: Run) -> None:
    """Stopped after the third step, whose checkpoint a new trainer takes up."""
    run.train(run.build(at("on_step_end", sets("should_training_stop"), 3)()))
    run.train(run.build(), resume_from_checkpoint=True)


def continued(run: Run) -> None:
    """A run to its end, then a new trainer from an earlier checkpoint of it."""
    run.train(run.build())
    run.train(run.build(), resume_from_checkpoint=os.path.join(run.journal.folder, "checkpoint-2"))


def finished_then_resumed(run: Run) -> None:
    """Resumed from the checkpoint of the last step: nothing is left to do."""
    run.train(run.build())
    run.train(run.build(), resume_from_checkpoint=True)


def resumed_with_more_steps(run: Run) -> None:
    run.train(run.build())
    run.train(run.build(max_steps=9, learning_rate=0.05), resume_from_checkpoint=True)


def evaluated_after(run: Run) -> None:
    """Training between an evaluation and a prediction by the same trainer."""
    trainer = run.build()
    run.journal.add("evaluated before", trainer.evaluate())
    run.train(trainer)
    run.journal.add("evaluated", trainer.evaluate())
    prediction = trainer.predict(trainer.eval_dataset)
    run.journal.add("predicted", [prediction.predictions, prediction.label_ids, prediction.metrics])


def again_after_an_error(run: Run) -> None:
    """A callback raises in mid-window of the third step; then the same trainer trains again without it."""
    callback = at("on_substep_end", raises, 2)()
    trainer = run.build(callback)
    run.train(trainer)
    trainer.remove_callback(callback)
    run.train(trainer)


def by_hand(run: Run) -> None:
    """After training, steps made by the user with the trainer's methods, then training goes on."""
    trainer = run.build()
    run.train(trainer)
    for batch in trainer.get_train_dataloader():
        trainer.model.eval()
        run.journal.add("step by hand", trainer.training_step(trainer.model, batch))
        run.journal.add("loss by hand", trainer.compute_loss(trainer.model, batch).detach())
        run.journal.add("gradient by hand", {name: p.grad for name, p in trainer.model.named_parameters()})
    run.train(trainer)
