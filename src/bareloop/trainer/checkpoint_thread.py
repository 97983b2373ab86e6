"""The thread that writes a checkpoint while training goes on, and the copy of the state that it writes.

A save under `async_checkpoints` runs the stock methods as they are; only the two functions that write tensors to files
(`torch.save` and safetensors' `save_file`) are taken down instead of done: their tensors are copied to host memory,
where training cannot change them, and the thread does the calls. So the files are those of the stock save, and
training waits for the copy and for files of a few kB. Both writers let other threads run while they write (measured
with 400 MB: training's thread was never held up for more than 14 ms).

A thread rather than torch.distributed.checkpoint's `async_save`: that writes a format of its own, which neither
`from_pretrained` nor the stock trainer reads, needs a process group, and copies the same state to the same memory
before it starts a thread as well.

Tensors of an accelerator are written as tensors of the CPU: `torch.load` without `map_location` puts them there. (The
stock trainer gives a `map_location`.)
"""

import copy
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bareloop.trainer.checkpoint_error import CheckpointError

__all__ = ["CheckpointThread", "on_host", "written_later"]

logger = logging.getLogger("bareloop")

_WRITERS = (
    ("torch", "save"),
    ("safetensors.torch", "save_file"),
    ("transformers.modeling_utils", "safe_save_file"),
    ("peft.peft_model", "safe_save_file"),
)
"""Module, and name there, of each function (content, file, ...) that writes tensors to a file. A writer that is not
here writes at once."""
_LIBRARIES = ("bareloop", "peft", "transformers")
"""Their methods do not read again what they have written."""


class CheckpointThread:
    """Writes one checkpoint. Not a daemon: a process that exits waits for it."""

    def __init__(self, jobs: list[Callable[[], Any]], failure: Callable[[BaseException], CheckpointError]) -> None:
        """`jobs`: called in order; `failure`: makes the error to raise of the one that stopped them."""
        self._jobs = jobs
        self._failure = failure
        self._error: CheckpointError | None = None
        self._thread = threading.Thread(target=self._run, name="bareloop-checkpoint")

    @property
    def failed(self) -> bool:
        """Whether it has stopped with an error. Does not wait."""
        return self._error is not None

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def outcome(self) -> CheckpointError | None:
        """The error that stopped it; None when the checkpoint is written. Waits for the end."""
        self._thread.join()
        return self._error

    def _run(self) -> None:
        try:
            while self._jobs:
                self._jobs.pop(0)()  # so that the tensors of a file that is written are let go of
        except BaseException as error:
            self._jobs.clear()
            failure = self._failure(error)
            failure.__cause__ = error
            self._error = failure
            logger.error(f"bareloop: {failure}")  # a run that ends with another error would not raise this one


@contextmanager
def written_later(
    trainer: Any, folder: str, later: list[Callable[[], Any]] | None, methods: tuple[Callable[..., Any], ...]
) -> Iterator[None]:
    """Within: files of tensors that this thread writes in `folder` are put in `later`, as calls on a copy of them.

    Args:
        later: None writes at once.
        methods: what is run within. The user's may read a file again that they wrote, so with one of theirs everything
            is written at once, with a notice.
    """
    if later is None:
        yield
        return
    own = next((method for method in methods if method.__module__.partition(".")[0] not in _LIBRARIES), None)
    if own is not None:
        _give_notice(trainer, own)
        yield
        return
    modules = [(sys.modules.get(module), name) for module, name in _WRITERS]
    writers = [(module, name, getattr(module, name)) for module, name in modules if hasattr(module, name)]
    try:
        for module, name, write in writers:
            setattr(module, name, _taken_down(write, folder, later, threading.get_ident()))
        yield
    finally:
        for module, name, write in writers:
            setattr(module, name, write)


def _taken_down(
    write: Callable[..., Any], folder: str, later: list[Callable[[], Any]], of_thread: int
) -> Callable[..., Any]:
    """`write`, put off where this thread writes tensors to a file in `folder`."""

    @functools.wraps(write)
    def take_down(content: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
        inside = isinstance(file, str | os.PathLike) and os.fspath(file).startswith(os.path.join(folder, ""))
        if not inside or threading.get_ident() != of_thread or not _holds_tensor(content):
            return write(content, file, *args, **kwargs)
        later.append(functools.partial(write, on_host(content), file, *args, **kwargs))
        return None

    return take_down


def on_host(content: Any) -> Any:
    """A copy of `content` with its tensors in host memory; what shared storage or identity still does, in the copy.

    So it is pickled to the bytes that `content` is pickled to (where its tensors are on the CPU).

    Args:
        content: tensors in dicts, lists and tuples; other objects are copied by `copy.deepcopy`.
    """
    return _on_host(content, {}, {})


def _on_host(content: Any, copies: dict[int, Any], storages: dict[int, torch.UntypedStorage]) -> Any:
    if id(content) in copies:
        return copies[id(content)]
    if isinstance(content, Tensor):
        made = _tensor_on_host(content, storages)
    elif isinstance(content, dict):
        made = copy.copy(content)  # keeps the class, and what it holds beside the items
        copies[id(content)] = made
        for key, value in content.items():
            made[key] = _on_host(value, copies, storages)
    elif type(content) is list:
        made = [_on_host(value, copies, storages) for value in content]
    elif isinstance(content, tuple):
        values = [_on_host(value, copies, storages) for value in content]
        made = tuple(values) if type(content) is tuple else type(content)(*values)
    else:
        made = copy.deepcopy(content)
    copies[id(content)] = made
    return made


def _tensor_on_host(tensor: Tensor, storages: dict[int, torch.UntypedStorage]) -> Tensor:
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.device.type == "meta":
        return tensor.detach().clone().cpu()
    storage = tensor.untyped_storage()
    if storage.data_ptr() not in storages:
        storages[storage.data_ptr()] = storage.clone() if tensor.device.type == "cpu" else storage.cpu()
    made = torch.empty(0, dtype=tensor.dtype)
    made.set_(storages[storage.data_ptr()], tensor.storage_offset(), tensor.shape, tensor.stride())
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _holds_tensor(content: Any) -> bool:
    if isinstance(content, dict):
        return any(_holds_tensor(value) for value in content.values())
    if isinstance(content, list | tuple):
        return any(_holds_tensor(value) for value in content)
    return isinstance(content, Tensor)


def _give_notice(trainer: Any, own: Callable[..., Any]) -> None:
    if trainer.is_world_process_zero() and not getattr(trainer, "_writes_at_once_told", False):
        logger.warning(
            f"bareloop: async_checkpoints writes what {own.__qualname__} writes at once, since it is not a method of "
            "transformers: it may read its files again"
        )
    trainer._writes_at_once_told = True
