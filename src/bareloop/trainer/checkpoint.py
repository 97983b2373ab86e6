"""Checkpoints of a lean trainer: the stock files, written so that a save is whole or was never there.

The files are written by the stock methods into a folder beside the checkpoint, `_saving-checkpoint-12`, which
`get_last_checkpoint` does not match, put on the disk (fsync) and renamed to `checkpoint-12`; older checkpoints are
deleted after that. A process that is killed in a save leaves the checkpoints before it whole, and a folder that the
next save removes. Only where the same step is saved again are there two renames: killed between them, it leaves the
earlier save, whole, as `_replaced-checkpoint-12`. A save that fails (a full disk) raises one `CheckpointError`; what it
wrote is removed, and model, optimizer and the trainer's state are as before: nothing is trained on that can not be
resumed from the checkpoint which the error names.

Putting 152 MB on the disk took 0.1 s where the stock save, which leaves that to the system, takes 0.3 s. Without it a
process may be killed, but after a power cut a folder may have its name and not its files.

Several processes of one machine write into the same folder; the one that saves the model renames it when all are done.
The stock save runs instead, as it is, where `why_stock_save` has a reason.
"""

import functools
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from safetensors import SafetensorError
from transformers.trainer_callback import ExportableState, TrainerCallback
from transformers.trainer_utils import (
    PREFIX_CHECKPOINT_DIR,
    HubStrategy,
    SaveStrategy,
    get_last_checkpoint,
    rotate_checkpoints,
)
from transformers.training_args import ParallelMode
from transformers.utils.import_utils import is_sagemaker_mp_enabled, is_torch_xla_available

from bareloop.trainer import resume, swarm, upstream
from bareloop.trainer.checkpoint_error import CheckpointError
from bareloop.trainer.checkpoint_thread import CheckpointThread, written_later

__all__ = ["finish", "raise_failure", "refuse_async", "save_checkpoint", "why_stock_save"]

logger = logging.getLogger("bareloop")

_SAVING = f"_saving-{PREFIX_CHECKPOINT_DIR}-"
"""Starts the name of a folder that is being written. The underscore keeps it out of what is pushed to the hub."""
_REPLACED = f"_replaced-{PREFIX_CHECKPOINT_DIR}-"
_STATE_FILE = "trainer_state.json"
_TESTED_SAVE = "d9833db7afa9"
"""Fingerprint of the stock `_save_checkpoint`, whose steps are taken here in its order."""
_WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)
"""What the writers raise on a disk that is full or gone: torch.save a RuntimeError, safetensors one of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where a checkpoint goes. Strings, joined as the stock trainer does: the best one's is part of its state."""

    run_folder: str
    folder: str
    """The checkpoint, once it is whole."""
    saving: str
    """Beside it, while it is written."""
    replaced: str
    """The earlier save of the same step, while it is replaced."""


def save_checkpoint(trainer: Any, stock_save: Callable[[Any, Any], None], model: Any, trial: Any) -> None:
    """What `trainer._save_checkpoint(model, trial)` does, whole or not at all.

    Args:
        stock_save: the stock method, bound to the trainer.

    Raises:
        CheckpointError: the checkpoint, or under `async_checkpoints` the one before it, could not be written.
    """
    reason = why_stock_save(trainer)
    if reason is not None:
        _give_notice(trainer, reason)
        stock_save(model, trial)
        resume.save_position(trainer, _place(trainer, trial).folder)
        swarm.save_state(trainer, _place(trainer, trial).folder)
        return
    finish(trainer)
    if trainer.hp_search_backend is None and trial is None:
        trainer.store_flos()
    place = _place(trainer, trial)
    later: list[Callable[[], None]] | None = [] if trainer.lean_options.async_checkpoints else None
    _together(trainer, place, functools.partial(_prepare, trainer, place))
    _together(trainer, place, functools.partial(_write, trainer, place, later))
    rotate = functools.partial(
        rotate_checkpoints,
        output_dir=place.run_folder,
        save_total_limit=trainer.args.save_total_limit,
        best_model_checkpoint=trainer.state.best_model_checkpoint,
        use_mtime=True,
    )
    if later is not None:
        _finish_later(trainer, place, [*later, functools.partial(_rename, place), rotate])
        return
    _together(trainer, place, functools.partial(_rename, place) if trainer.args.should_save else lambda: None)
    if trainer.args.push_to_hub:
        trainer._push_from_checkpoint(place.folder)
    if trainer.args.should_save:
        rotate()


def finish(trainer: Any) -> None:
    """Wait, on every process, for the checkpoint that is being written; nothing without `async_checkpoints`.

    Raises:
        CheckpointError: it could not be written.
    """
    if not trainer.lean_options.async_checkpoints:
        return
    thread, trainer._checkpoint_thread = trainer._checkpoint_thread, None
    error = None if thread is None else thread.outcome()
    if _on_any(trainer, error is not None):
        raise error or CheckpointError("A checkpoint could not be written by another process; its error says why.")


def raise_failure(trainer: Any) -> None:
    """Raise the error of the thread that writes a checkpoint, on the process that has it; call it when one `failed`.

    Raises:
        CheckpointError: always.
    """
    thread, trainer._checkpoint_thread = trainer._checkpoint_thread, None
    raise thread.outcome()


def refuse_async(trainer: Any) -> None:
    """Refuse `async_checkpoints` where it cannot be honoured.

    Raises:
        ValueError: the stock save has to run, or checkpoints are pushed to the hub as they are saved.
    """
    if not trainer.lean_options.async_checkpoints:
        return
    reason = why_stock_save(trainer)
    if reason is not None:
        raise ValueError(f"async_checkpoints=True: the stock save has to run, since {reason}; set it to False")
    if trainer.args.push_to_hub and trainer.args.hub_strategy != HubStrategy.END:
        raise ValueError(
            f"async_checkpoints=True with push_to_hub=True and hub_strategy={trainer.args.hub_strategy.value!r}: a "
            "checkpoint would be pushed before it is whole; set hub_strategy='end' or async_checkpoints=False"
        )


def why_stock_save(trainer: Any) -> str | None:
    """Why checkpoints are saved by the stock method, which is not atomic; None where they are saved as here."""
    if upstream.fingerprint(transformers.Trainer._save_checkpoint) != _TESTED_SAVE:
        return "transformers.Trainer._save_checkpoint is not the tested one"
    if trainer.is_deepspeed_enabled:
        return "DeepSpeed writes its own files"
    if trainer.is_fsdp_enabled or trainer.is_distributed_loading_by_transformers:
        return "the model is sharded, and every process writes a part of it"
    if is_torch_xla_available() or is_sagemaker_mp_enabled():
        return "XLA and SageMaker write their own files"
    processes = trainer.args.world_size
    if int(os.environ.get("LOCAL_WORLD_SIZE") or processes) != processes:
        return "the processes are on several machines, which may not share a disk"
    return None


def _place(trainer: Any, trial: Any) -> _Place:
    run_folder, step = trainer._get_output_dir(trial=trial), trainer.state.global_step
    return _Place(
        run_folder=run_folder,
        folder=os.path.join(run_folder, f"{PREFIX_CHECKPOINT_DIR}-{step}"),
        saving=os.path.join(run_folder, f"{_SAVING}{step}"),
        replaced=os.path.join(run_folder, f"{_REPLACED}{step}"),
    )


def _prepare(trainer: Any, place: _Place) -> None:
    if not trainer.args.should_save:
        return
    os.makedirs(place.run_folder, exist_ok=True)
    for left in Path(place.run_folder).glob(f"{_SAVING}*"):
        shutil.rmtree(left)
    if os.path.isdir(place.folder):
        # The stock save writes over files that are there and leaves the others: begin with all of them.
        shutil.copytree(place.folder, place.saving)
    else:
        os.mkdir(place.saving)


def _write(trainer: Any, place: _Place, later: list[Callable[[], None]] | None) -> None:
    """Write the files of the checkpoint, in the stock order; with `later`, put the large ones there instead."""
    args, state = trainer.args, trainer.state
    with written_later(trainer, place.saving, later, (trainer.save_model, trainer._save, _saves_model(trainer))):
        trainer.save_model(place.saving, _internal_call=True)
    if args.save_strategy in (SaveStrategy.STEPS, SaveStrategy.EPOCH, SaveStrategy.BEST) and state.best_global_step:
        best = os.path.join(place.run_folder, f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
        if best == place.folder or os.path.exists(best):
            state.best_model_checkpoint = best
    if not args.save_only_model:
        with written_later(trainer, place.saving, later, (trainer._save_optimizer_and_scheduler,)):
            trainer._save_optimizer_and_scheduler(place.saving)
        trainer._save_scaler(place.saving)
        trainer._save_rng_state(place.saving)
        resume.save_position(trainer, place.saving)
        swarm.save_state(trainer, place.saving)
    if args.should_save:
        _store_callbacks(trainer)
        state.save_to_json(os.path.join(place.saving, _STATE_FILE))


def _saves_model(trainer: Any) -> Callable[..., Any]:
    return getattr(trainer.accelerator.unwrap_model(trainer.model), "save_pretrained", trainer._save)


def _store_callbacks(trainer: Any) -> None:
    """Put the state of callbacks and control in the trainer's state; a second of a class makes a list of the two."""
    stored = trainer.state.stateful_callbacks
    for each in (*trainer.callback_handler.callbacks, trainer.control):
        if isinstance(each, ExportableState):
            name = type(each).__name__
            if isinstance(stored[name], list):
                stored[name].append(each.state())
            else:
                stored[name] = each.state()


def _finish_later(trainer: Any, place: _Place, jobs: list[Callable[[], None]]) -> None:
    if trainer.args.should_save:
        trainer._checkpoint_thread = CheckpointThread(jobs, functools.partial(_failure, place))
        trainer._checkpoint_thread.start()
    stock = TrainerCallback.on_save
    overrides = any(type(callback).on_save is not stock for callback in trainer.callback_handler.callbacks)
    if _on_any(trainer, overrides):
        finish(trainer)  # what on_save is for: the folder is whole when it is called


def _rename(place: _Place) -> None:
    """Make the folder that was written the checkpoint, with its content on the disk first."""
    for folder, _, files in os.walk(place.saving):
        for name in files:
            _to_disk(os.path.join(folder, name))
        _to_disk(folder)
    replaces = os.path.isdir(place.folder)
    if replaces:
        shutil.rmtree(place.replaced, ignore_errors=True)
        os.rename(place.folder, place.replaced)
    os.rename(place.saving, place.folder)
    _to_disk(place.run_folder)
    if replaces:
        shutil.rmtree(place.replaced, ignore_errors=True)


def _to_disk(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _together(trainer: Any, place: _Place, act: Callable[[], None]) -> None:
    """Do `act` on every process and go on when all have done it; one that fails makes all raise, and none wait.

    Raises:
        CheckpointError: it failed to write, here or on another process.
        Exception: what `act` raised otherwise.
    """
    error: Exception | None = None
    try:
        act()
    except Exception as raised:
        error = raised
    except BaseException:
        _remove(trainer, place)
        raise
    if not _on_any(trainer, error is not None):
        return
    _remove(trainer, place)
    if error is None:
        raise CheckpointError(f"{place.folder} could not be written by another process; its error says why.")
    if isinstance(error, _WRITE_ERRORS):
        raise _failure(place, error) from error
    raise error


def _on_any(trainer: Any, here: bool) -> bool:
    """Whether `here` is true on one process at least. Every process has to ask."""
    if trainer.args.parallel_mode != ParallelMode.DISTRIBUTED or not dist.is_initialized():
        return here
    flag = torch.tensor(int(here), device=trainer.args.device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def _remove(trainer: Any, place: _Place) -> None:
    if trainer.args.should_save:
        shutil.rmtree(place.saving, ignore_errors=True)


def _failure(place: _Place, error: BaseException) -> CheckpointError:
    """The error of a checkpoint that could not be written; what was written of it is removed."""
    shutil.rmtree(place.saving, ignore_errors=True)
    try:
        free = f"{shutil.disk_usage(place.run_folder).free / 1e6:,.1f} MB are free there"
        last = get_last_checkpoint(place.run_folder)
    except OSError as unreadable:
        free, last = f"the folder cannot be read ({unreadable})", None
    whole = "there is no earlier checkpoint" if last is None else f"the last whole checkpoint is {last}"
    return CheckpointError(
        f"{place.folder} could not be written: {error} ({type(error).__name__}; {free}). What was written of it is "
        f"removed and {whole}. Make room or change output_dir, and go on with resume_from_checkpoint."
    )


def _give_notice(trainer: Any, reason: str) -> None:
    if trainer.is_world_process_zero() and not trainer._stock_save_told:
        logger.warning(f"bareloop: checkpoints are saved by the stock method, which is not atomic, since {reason}")
    trainer._stock_save_told = True
