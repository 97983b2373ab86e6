"""Two processes that go through settings together: `run_pair` here, and what each of them does, as `-m matrix.pair`.

Each setting is judged by each rank for itself. A setting that one rank cannot finish ends both, since the other waits
for it in a collective; the pair is then started again for the rest.
"""

import gc
import json
import os
import subprocess
import sys
import traceback
from datetime import timedelta
from pathlib import Path

__all__ = ["run_pair"]

RANKS = 2
WATCHED_TOO = {"plain", "accumulation of 4, ragged epochs", "reduced at every micro-step", "sharded"}
"""Settings that are run with all events watched too; the rest only as most people train, with none."""

WAIT_S = 60
"""A collective that takes longer has lost its other rank."""


def run_pair(names: list[str], folder: Path, limit_s: float = 300) -> dict[str, list[str]]:
    """The problems of each setting of `names`, of both ranks, run in pairs of processes.

    Args:
        names: settings of `matrix.catalogue.TWO_PROCESSES`.
        folder: empty.
        limit_s: seconds after which the processes are killed and the rest of the settings counts as not run.
    """
    found: dict[str, list[str]] = {}
    waiting = list(names)
    for attempt in range(len(names)):
        if not waiting:
            break
        answers, ended = one_pair(waiting, folder / str(attempt), limit_s)
        for rank, answer in enumerate(answers):
            for name, problems in answer.items():
                found.setdefault(name, []).extend(f"rank {rank}: {problem}" for problem in problems)
        done = set(answers[0]) & set(answers[1])
        if not done:
            found[waiting[0]] = [*found.get(waiting[0], []), f"the pair ended before it was done: {ended}"]
            done = {waiting[0]}
        waiting = [name for name in waiting if name not in done]
    return found


def one_pair(names: list[str], folder: Path, limit_s: float) -> tuple[list[dict[str, list[str]]], str]:
    """What each rank said of each setting that it came to, and how the processes ended."""
    folder.mkdir(parents=True)
    here = str(Path(__file__).parents[1])
    processes = []
    for rank in range(RANKS):
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
        environment = {**os.environ, **{name: str(value) for name, value in ranks.items()}, "PYTHONPATH": here}
        command = [sys.executable, "-m", "matrix.pair", str(folder), json.dumps(names)]
        with (folder / f"said_{rank}").open("wb") as said:
            processes.append(subprocess.Popen(command, env=environment, cwd=folder, stdout=said, stderr=said))
    try:
        ended = f"exit codes {[process.wait(limit_s) for process in processes]}"
    except subprocess.TimeoutExpired:
        ended = f"not done after {limit_s} s"
    finally:
        for process in processes:
            process.kill()
            process.wait()
    said = "".join((folder / f"said_{rank}").read_text(errors="replace")[-2000:] for rank in range(RANKS))
    return [answers_of(folder / f"answers_{rank}") for rank in range(RANKS)], f"{ended}\n{said}"


def answers_of(path: Path) -> dict[str, list[str]]:
    return dict(json.loads(line) for line in path.read_text().splitlines()) if path.exists() else {}


def main(folder: Path, names: list[str]) -> None:
    """One rank: judges each setting and writes a line of answers for it."""
    import torch

    from matrix.catalogue import TWO_PROCESSES
    from matrix.ranks import MISCOUNTING
    from matrix.verdict import ALL_EVENTS, NO_EVENTS, problems

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # accelerate asks for a collection in every `train()`, which takes 0.4 s over what is imported
    rank = int(os.environ["RANK"])
    settings = {setting.name: setting for setting in (*TWO_PROCESSES, MISCOUNTING)}
    torch.distributed.init_process_group(
        "gloo", f"file://{folder}/store", timedelta(seconds=WAIT_S), world_size=RANKS, rank=rank
    )
    with (folder / f"answers_{rank}").open("a") as answers:
        for index, name in enumerate(names):
            try:
                found = problems(settings[name], folder / str(index), NO_EVENTS)
                if name in WATCHED_TOO:
                    found += problems(settings[name], folder / f"{index}_watched", ALL_EVENTS)
                failed = False
            except Exception:
                found, failed = [traceback.format_exc()], True
            answers.write(json.dumps([name, found]) + "\n")
            answers.flush()
            if failed:
                os._exit(1)
            torch.distributed.barrier()
    # gloo's threads may still hold the last work of a model that the interpreter takes down: leave without that.
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
