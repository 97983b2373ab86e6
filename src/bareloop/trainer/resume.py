"""Resume in mid-epoch from the state of the loader, without reading again what was trained on.

The stock trainer skips batches: an iterable is read from its beginning, and the random state is restored after the
first batches of the resumed epoch were read, where a run that was not stopped has it before. With `stateful_loader` the
training loader is torchdata's StatefulDataLoader over data and samplers that know where they are (`loader_state`), and
a checkpoint has one file more for each process, `loader_state.pt` (`loader_state_0.pt`, ... of several), with

* the loader's state after the last batch that was trained on. (accelerate's loader is always one batch ahead; that
  batch is read again, with the random state that it was read with.)
* the pass over the data and the micro-batches trained on in it. The stock trainer computes both from the step, which
  is wrong for an iterable of unknown length that was read more than once.
* the loss that was not logged yet, so that the first line of the log after resuming is that of a run not stopped.

How fast: the indices of a map-style data set are drawn again and no sample is read; an iterable with `state_dict` goes
on where it was. One without is read again, in its worker or process. Its samples are the same as long as it does not
draw from the generators that the model draws from (`dataloader_num_workers` of 1 or more gives it generators of its
own).
"""

import functools
import importlib.util
import logging
import os
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers.trainer
from accelerate import skip_first_batches
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, MapDataPipe
from transformers.trainer_pt_utils import nested_gather

from bareloop.trainer.checkpoint_error import CheckpointError
from bareloop.trainer.loader_state import TrackedBatches, TrackedDataset, TrackedIterable, generators_of

__all__ = [
    "fast_skip",
    "init_training_state",
    "load_rng_state",
    "refuse_stateful",
    "save_position",
    "skip_trained",
    "tracked",
]

logger = logging.getLogger("bareloop")

_LOADER_SETTINGS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


class _Position:
    """Where a training loader is. The loader itself calls `begin` and `note`, so it is up to date at every step."""

    def __init__(self, trainer: Any, loader: Any) -> None:
        """`loader`: accelerate's, with torchdata's inside."""
        self._trainer = trainer
        self._loader = loader
        self._loader_begins = loader.begin
        self._iterator: Any = None
        self.epoch = 0
        self.trained = 0
        """Micro-batches of this pass that were given out, all of which are trained on when a checkpoint is saved."""
        self.finished = False
        self.state: Any = None
        """Of torchdata's loader, after `trained` micro-batches; None where this process fetches none."""
        self.resumed: _Resumed | None = None
        """What the loader was set to, until the random state is restored."""
        self._ahead = isinstance(loader, DataLoaderDispatcher)
        """Whether the first note of a pass comes before the first batch was fetched."""
        whole = not self._ahead or loader.split_batches or loader.submesh_tp is not None
        self._fetches_per_batch = 1 if whole else loader.state.num_processes
        self._notes = 0

    def iterate(self) -> Any:
        """torchdata's iterator over the data, which ends with the pass.

        torchdata's loader would hold it as well, until the garbage collector comes to the loader; that closes the
        queues to the workers first, and then waits 5 s for each.
        """
        base = self._loader.base_dataloader
        iterator = type(base).__iter__(base)
        if not base.persistent_workers:
            base._iterator = None
        self._iterator = weakref.ref(iterator)
        return iterator

    def begin(self) -> None:
        """A pass over the data begins."""
        self._loader_begins()
        self.epoch, self.finished, self.state, self._notes = self._loader.iteration, False, None, 0
        self.trained = 0 if self.resumed is None else self.resumed.trained

    def note(self) -> None:
        """A batch is about to be fetched, and the one before it to be given out; or the data has ended."""
        if self._loader.end_of_dataloader:
            self.finished = True
            return
        self._notes += 1
        if (self._notes - 1) % self._fetches_per_batch:
            return
        if not (self._ahead and self._notes == 1):
            self.trained += 1
            if self.resumed is not None:
                # Where the run that was not stopped saved its random state: between these two fetches.
                self._trainer._load_rng_state(self.resumed.folder)
        self.state = self._iterator().state_dict()

    def generators(self) -> list[torch.Generator]:
        """Those that the order is drawn from, beside the global ones."""
        base = self._loader.base_dataloader
        return generators_of(base.sampler if base.batch_sampler is None else base.batch_sampler)


@dataclass(slots=True)
class _Resumed:
    """The checkpoint that training goes on from."""

    folder: str
    saved: dict[str, Any]
    """What this process saved."""
    epoch: int
    trained: int
    """Micro-batches of `epoch` that were trained on."""
    is_restored: bool = False
    """Whether the random state and the loss are restored."""


def tracked(trainer: Any, loader: Any) -> Any:
    """The training loader with torchdata's StatefulDataLoader in it, whose position is saved with checkpoints.

    Raises:
        ValueError: it is not a loader that accelerate prepared from torch's DataLoader.
    """
    from torchdata.stateful_dataloader import StatefulDataLoader

    base = getattr(loader, "base_dataloader", None)
    if not isinstance(loader, DataLoaderShard | DataLoaderDispatcher) or type(base) is not DataLoader:
        found = type(loader if base is None else base).__name__
        raise ValueError(
            f"stateful_loader=True: get_train_dataloader() gives a {found}, not torch's DataLoader as prepared by "
            "accelerate (trainer.accelerator.prepare); return that, or set stateful_loader=False"
        )
    settings = {name: getattr(base, name) for name in _LOADER_SETTINGS}
    if isinstance(base.dataset, IterDataPipe | MapDataPipe):
        raise ValueError("stateful_loader=True: data pipes shard and shuffle themselves; give a Dataset instead")
    if isinstance(base.dataset, IterableDataset):
        data: Any = TrackedIterable(base.dataset)
        settings |= {"batch_size": base.batch_size, "drop_last": base.drop_last}
    else:
        data = TrackedDataset(base.dataset)
        order: Any = TrackedBatches(base.sampler if base.batch_sampler is None else base.batch_sampler)
        settings |= {"batch_size": None, "sampler": order} if base.batch_sampler is None else {"batch_sampler": order}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)  # torchdata 0.11 calls it
        stateful: Any = StatefulDataLoader(data, **settings)
    prepared: Any = loader
    prepared.base_dataloader = stateful
    prepared.lean_position = position = _Position(trainer, loader)
    prepared.begin, prepared._update_state_dict, stateful.__iter__ = position.begin, position.note, position.iterate
    return loader


def save_position(trainer: Any, folder: str) -> None:
    """Write where the training loader of this process is, and the loss not logged yet, into the checkpoint."""
    position = getattr(trainer.callback_handler.train_dataloader, "lean_position", None)
    if position is None or trainer.args.save_only_model or not trainer.lean_options.stateful_loader:
        return
    loss = trainer._tr_loss
    of_all: Any = nested_gather(loss, trainer.args.parallel_mode)
    saved = {
        **_settings(trainer),
        "epoch": position.epoch,
        "trained": position.trained,
        "finished": position.finished or trainer.control.should_epoch_stop,
        "loader": position.state,
        "generators": [generator.get_state() for generator in position.generators()],
        "loss": loss.item(),
        "loss_of_all": of_all.mean().item(),
        "last_logged": trainer._globalstep_last_logged,
    }
    os.makedirs(folder, exist_ok=True)
    torch.save(saved, _file(trainer, folder, trainer.args.process_index))


def init_training_state(
    trainer: Any,
    stock: Callable[..., tuple[int, int]],
    max_steps: int,
    num_update_steps_per_epoch: int,
    num_train_epochs: int,
    resume_from_checkpoint: str | None,
    trial: Any,
) -> tuple[int, int]:
    """What `trainer._init_training_state` returns: the epoch to go on with, and its micro-batches trained on.

    Raises:
        CheckpointError: the loader was saved under other settings, or its state cannot be read.
    """
    counted = stock(max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial)
    trainer._resumed = None
    if resume_from_checkpoint is None:
        return counted
    own = _file(trainer, resume_from_checkpoint, trainer.args.process_index)
    # Of a loader that one process reads for all, that one alone knows how far it is.
    first = _file(trainer, resume_from_checkpoint, 0)
    if not (os.path.isfile(own) and os.path.isfile(first)):
        logger.warning(
            f"bareloop: {resume_from_checkpoint} has no {os.path.basename(own)}: it was saved without stateful_loader or "
            "by another number of processes. The batches trained on are skipped as the stock trainer does"
        )
        return counted
    saved, leader = _read(trainer, own), _read(trainer, first)
    epoch, trained = (leader["epoch"] + 1, 0) if leader["finished"] else (leader["epoch"], leader["trained"])
    trainer._resumed = _Resumed(folder=resume_from_checkpoint, saved=saved, epoch=epoch, trained=trained)
    return epoch, trained


def skip_trained(trainer: Any, loader: Any, num_batches: int = 0) -> Any:
    """The loader without the first `num_batches`, as accelerate's `skip_first_batches`, but set to its saved state."""
    position, resumed = getattr(loader, "lean_position", None), trainer._resumed
    if position is None or resumed is None:
        return skip_first_batches(loader, num_batches)
    position.resumed = resumed
    if resumed.saved["loader"] is not None:
        loader.base_dataloader.load_state_dict(resumed.saved["loader"])
    return loader


@contextmanager
def fast_skip(trainer: Any) -> Iterator[None]:
    """Within: the stock loop skips the batches trained on by `skip_trained`."""
    if not trainer.lean_options.stateful_loader:
        yield
        return
    of_the_loop: Any = transformers.trainer
    stock = of_the_loop.skip_first_batches
    of_the_loop.skip_first_batches = functools.partial(skip_trained, trainer)
    try:
        yield
    finally:
        of_the_loop.skip_first_batches = stock


def load_rng_state(trainer: Any, stock: Callable[[Any], None], folder: str | None) -> None:
    """What `trainer._load_rng_state(folder)` does, once: the second call, that of the loop, comes too late."""
    resumed = trainer._resumed
    if resumed is None:
        stock(folder)
        return
    if resumed.is_restored:
        return
    stock(folder)
    resumed.is_restored = True
    trainer._tr_loss.add_(resumed.saved["loss"])
    trainer._total_loss_scalar -= resumed.saved["loss_of_all"]  # it is of steps that the earlier run has counted
    trainer._globalstep_last_logged = resumed.saved["last_logged"]
    position = getattr(trainer.callback_handler.train_dataloader, "lean_position", None)
    if position is not None:
        position.resumed = None
        if resumed.trained == 0:
            for generator, state in zip(position.generators(), resumed.saved["generators"], strict=True):
                generator.set_state(state)


def refuse_stateful(trainer: Any) -> None:
    """Refuse `stateful_loader` where it cannot be honoured.

    Raises:
        ValueError: torchdata is not installed; batches may come out of order, or are not to be skipped.
    """
    if not trainer.lean_options.stateful_loader:
        return
    if importlib.util.find_spec("torchdata") is None:
        raise ValueError("stateful_loader=True needs torchdata: pip install 'torchdata>=0.11'")
    if trainer.args.ignore_data_skip:
        raise ValueError("stateful_loader=True with ignore_data_skip=True: one goes on in the data, one starts it anew")
    if not trainer.args.dataloader_in_order and trainer.args.dataloader_num_workers > 0:
        raise ValueError(
            "stateful_loader=True with dataloader_in_order=False: there is no state to go on from where batches come "
            "as they are ready; set dataloader_in_order=True"
        )


def _settings(trainer: Any) -> dict[str, int]:
    """What has to be the same for a loader to go on from a saved state."""
    args = trainer.args
    return {
        "processes": args.world_size,
        "dataloader_num_workers": args.dataloader_num_workers,
        "batch_size": trainer._train_batch_size,
    }


def _file(trainer: Any, folder: str, process: int) -> str:
    return os.path.join(folder, "loader_state.pt" if trainer.args.world_size <= 1 else f"loader_state_{process}.pt")


def _read(trainer: Any, path: str) -> dict[str, Any]:
    try:
        saved = torch.load(path, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}. If the state of your data holds objects of your own, name their classes "
            "with torch.serialization.add_safe_globals; stateful_loader=False resumes without this file."
        ) from error
    for name, here in _settings(trainer).items():
        if saved[name] != here:
            raise CheckpointError(
                f"{path} was saved with {name}={saved[name]}, and here it is {here}: resume with {saved[name]}, or with "
                "stateful_loader=False, which reads the data again up to there"
            )
    return saved
