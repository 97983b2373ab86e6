"""Children of this process that are killed on purpose, or train as two: forked, so that they need not import torch."""

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import tqdm
from accelerate.state import AcceleratorState, GradientState, PartialState

__all__ = ["fork", "kill_at_event", "outcome_of", "two_ranks"]

LIMIT_S = 60
"""A child that runs longer is ended by an alarm."""


def fork(function: Callable[[], object], errors: Path) -> int:
    """The process id of a child that calls `function`; what it raises goes to the file `errors`."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        signal.alarm(LIMIT_S)
        torch.set_num_threads(1)  # the threads of OpenMP are not forked
        # Its default is shared with the parent, whom a child that is killed inside would hold up.
        tqdm.tqdm.set_lock(threading.RLock())
        with errors.open("w", encoding="utf-8") as sys.stderr, Path(os.devnull).open("w") as sys.stdout:
            try:
                function()
                code = 0
            except BaseException:
                traceback.print_exc()
    finally:
        os._exit(code)


def outcome_of(child: int, errors: Path) -> int:
    """The exit code of `child`, minus the signal's number for a child that a signal ended.

    Raises:
        AssertionError: it raised, or ran into its limit; with what it wrote.
    """
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code not in (1, -signal.SIGALRM), errors.read_text(encoding="utf-8")
    return code


def kill_at_event(folder: Path, count: int) -> list[int]:
    """Kill this process at the `count`-th file-system event (a file opened, a folder made, ...) below `folder`.

    Returns a list whose one item is how many of them are left.
    """
    left = [count]
    prefix = str(folder)

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir"):
            path = arguments[0]
            if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(prefix):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    return left


def two_ranks(function: Callable[[], object], folder: Path) -> None:
    """Call `function` in two processes of one gloo group.

    Raises:
        AssertionError: one of them raised.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    errors = [folder / f"errors_{rank}" for rank in range(2)]
    children = [fork(lambda rank=rank: _as_rank(rank, port, function), errors[rank]) for rank in range(2)]
    codes = [outcome_of(child, error) for child, error in zip(children, errors, strict=True)]
    assert codes == [0, 0]


def _as_rank(rank: int, port: int, function: Callable[[], object]) -> None:
    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in own.items()} | {"MASTER_ADDR": "127.0.0.1"})
    function()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        time.sleep(0.1)  # the last answer of the barrier is to leave before the process does
