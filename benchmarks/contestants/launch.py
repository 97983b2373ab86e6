"""A job in fresh processes: the parent starts them and reads what the first one wrote."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["in_child", "launch"]


def launch(script: str, job: Mapping[str, Any], processes: int, timeout_s: float) -> Any:
    """What `script --child` made of `job`, in as many new processes as wished, on one thread each.

    Raises:
        RuntimeError: a process failed or took too long; with the end of what it wrote.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # then what was started ends too
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(job))
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        children = []
        try:
            for rank in range(processes):
                own = _rank_variables(rank, processes) if processes > 1 else {}
                command = [sys.executable, script, "--child", str(folder)]
                with (folder / f"output{rank}").open("w") as output:
                    children.append(
                        subprocess.Popen(
                            command,
                            env={**environment, **own},
                            stdout=output,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                        )
                    )
            _wait(children, timeout_s)
        finally:
            for child in children:
                _end(child)
        if any(child.returncode for child in children):
            ends = "\n".join((folder / f"output{rank}").read_text()[-3000:] for rank in range(processes))
            raise RuntimeError(f"a process failed or took more than {timeout_s:g} s:\n{ends}")
        return json.loads((folder / "result.json").read_text())


def _rank_variables(rank: int, processes: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "ACCELERATE_USE_CPU": "true",
    }


def _wait(children: list[subprocess.Popen[bytes]], timeout_s: float) -> None:
    """Until all have ended well, or one has not."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        codes = [child.poll() for child in children]
        if all(code == 0 for code in codes) or any(codes):
            return
        time.sleep(0.05)


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Ends a process with those that it has started: hivemind's would outlive it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def in_child(folder: str, work: Callable[[dict[str, Any]], Any]) -> None:
    """Does the job that `launch` left in `folder`; never returns, so that no process group is torn down.

    gloo's threads may still hold the last operation of a model that dies with the interpreter.
    """
    import torch.distributed as dist

    rank, processes = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes)
    result = work(json.loads((Path(folder) / "job.json").read_text()))
    if rank == 0:
        (Path(folder) / "result.json").write_text(json.dumps(result))
    if processes > 1:
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
