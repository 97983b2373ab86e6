"""The upstream faults of docs/swarm.md are there: a test that fails here says that hivemind or torchft has mended one.

The reproductions run each in a process forked from one that has imported both libraries, four at a time.
"""

import importlib.util
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = {path.stem: path for path in sorted((ROOT / "docs" / "upstream").glob("*.py"))}
LONG = {"hivemind_cut_leader", "hivemind_dead_peer"}
"""Those that wait for a minute or more, or need peers to come in an order that a busy machine spoils; they are run by hand."""
AT_ONCE = 4
LIMIT_S = 90.0
"""For one reproduction; each takes 1 to 5 s on an idle machine."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="hivemind runs on Linux alone"),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("hivemind", "torchft")),
        reason="needs pip install 'bareloop[swarm]'",
    ),
]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each reproduction printed, then what it wrote to stderr."""
    folder = tmp_path_factory.mktemp("upstream")
    names = sorted(SCRIPTS.keys() - LONG)
    command = [sys.executable, "-W", "ignore", __file__, str(folder), *(str(SCRIPTS[name]) for name in names)]
    subprocess.run(command, check=True, timeout=600, start_new_session=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return {
        name: "\n".join((folder / file).read_text(errors="replace") for file in (name, f"{name}.errors"))
        for name in names
    }


@pytest.mark.parametrize("name", sorted(SCRIPTS.keys() - LONG))
def test_the_fault_is_still_there(name: str, printed: dict[str, str]) -> None:
    verdicts = [line for line in printed[name].splitlines() if line.startswith("fault: ")]
    assert verdicts == ["fault: present"], (
        f"docs/upstream/{name}.py no longer shows its fault, or broke: read what it printed, then bring docs/swarm.md and"
        f" what bareloop.swarm does about it up to date\n{printed[name]}"
    )


def test_the_guide_names_every_reproduction() -> None:
    guide = (ROOT / "docs" / "swarm.md").read_text(encoding="utf-8")
    assert [name for name in SCRIPTS if f"upstream/{name}.py" not in guide] == []


def _run(folder: Path, scripts: list[Path]) -> None:
    """Runs `scripts`, and leaves what each printed in a file of its name."""
    import hivemind
    import torch
    import torchft.manager

    assert hivemind and torchft.manager
    torch.set_num_threads(1)  # the threads of OpenMP are not forked
    running: dict[int, float] = {}
    while scripts or running:
        while scripts and len(running) < AT_ONCE:
            script = scripts.pop(0)
            child = os.fork()
            if not child:
                _become(script, folder / script.stem)
            running[child] = time.monotonic()
        time.sleep(0.02)
        for child, began in list(running.items()):
            late = time.monotonic() - began > LIMIT_S
            ended, _ = os.waitpid(child, os.WNOHANG)
            if ended or late:
                try:
                    os.killpg(child, signal.SIGKILL)  # with the daemons that it may have left
                except ProcessLookupError:
                    pass
                if not ended:
                    os.waitpid(child, 0)
                del running[child]


def _become(script: Path, output: Path) -> None:
    """Runs `script` in this process, and ends it."""
    os.setsid()
    for descriptor, path in ((1, output), (2, output.with_suffix(".errors"))):
        with path.open("wb") as file:
            os.dup2(file.fileno(), descriptor)
    code = 1
    try:
        sys.argv = [str(script)]
        runpy.run_path(str(script), run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _run(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
