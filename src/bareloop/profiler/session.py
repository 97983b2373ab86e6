"""Starts commands with the probes in, and talks to their training processes at step boundaries.

One thread, one selector. A session owns a folder of its own for its socket and settings; nothing is written anywhere
else, and leaving the session ends every process that it started, launchers' grandchildren included.
"""

import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Any

from bareloop.profiler.command import Command
from bareloop.profiler.failures import RunFailed, ScriptFailed
from bareloop.profiler.options import STEPS_NEEDED

__all__ = ["EndedEarly", "Run", "Session"]

PACKAGE = Path(__file__).resolve().parent.parent
TAIL_BYTES = 65536
GRACE_S = 15.0
"""How long a script may take for its `finally` blocks and exit handlers after its last step."""


class EndedEarly(RunFailed):
    """The script ended by itself, without a fault, before bareloop had what it needs."""


class Run:
    """One started command: its process, the lines to its ranks, the end of what it printed."""

    def __init__(self, command: Command, participant: str, process: "subprocess.Popen[bytes]") -> None:
        self.command = command
        self.participant = participant
        self.process = process
        self.started_s = time.monotonic()
        self.ranks: dict[int, socket.socket] = {}
        self.world = 1
        self.inbox: dict[int, list[dict[str, Any]]] = {}
        self.ended_at_step: int | None = None
        self.broken: str | None = None
        """Traceback of a probe of ours that broke in one of its processes."""
        self.others = 0
        """Training processes beyond the first that are not ranks of it."""
        self.tails = {"out": bytearray(), "err": bytearray()}
        self._readers = [
            self._drain(process.stdout, self.tails["out"]),
            self._drain(process.stderr, self.tails["err"]),
        ]

    @staticmethod
    def _drain(stream: "IO[bytes] | None", tail: bytearray) -> threading.Thread:
        """Reads a pipe to its end, so that a script that prints a lot never waits for us; keeps the last 64 KiB."""
        assert stream is not None

        def read() -> None:
            while block := os.read(stream.fileno(), 65536):
                tail.extend(block)
                del tail[:-TAIL_BYTES]
            stream.close()

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        return thread

    def output(self) -> str:
        """The end of what the script printed on standard error, or on standard output when it printed nothing there."""
        for reader in self._readers:
            reader.join(timeout=1.0)
        return (bytes(self.tails["err"]) or bytes(self.tails["out"])).decode(errors="replace")

    def send(self, command: dict[str, Any]) -> None:
        """Sends a command to every rank."""
        for line in self.ranks.values():
            try:
                line.sendall(json.dumps(command).encode() + b"\n")
            except OSError:
                continue  # the rank has ended: `Session.receive` reads its exit code


class Session:
    """The lifetime of a set of runs."""

    def __init__(self, *, stdin: str | None = None) -> None:
        self.stdin = stdin
        self.folder = Path(tempfile.mkdtemp(prefix="bareloop-"))
        self.runs: list[Run] = []
        self.late: list[str] = []
        """Runs that did not end within the grace period after their last step."""
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.folder / "line"))
        self._listener.listen(64)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._buffers: dict[int, bytes] = {}

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.end()
        finally:
            self._selector.close()
            self._listener.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def launch(self, command: Command, participant: str, settings: dict[str, Any]) -> Run:
        """Starts a command; its training processes will report as `participant`."""
        path = self.folder / f"{participant}-{len(self.runs)}.json"
        path.write_text(json.dumps({**settings, "participant": str(path.stem), "socket": str(self.folder / "line")}))
        source = open(self.stdin or os.devnull, "rb")  # noqa: SIM115  closed right after Popen has duplicated it
        with source:
            process = subprocess.Popen(
                command.argv,
                env=environment(path, command),
                stdin=source,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # Not a session of its own: on Linux each session gets its own scheduling group, and torch's threads,
                # which spin while they wait for each other, then starve in turn (a first step took 8 s in place of 1).
                process_group=0,
            )
        run = Run(command, path.stem, process)
        self.runs.append(run)
        return run

    def receive(
        self, runs: list[Run], kind: str, deadline_s: float, *, confirm: bool = True
    ) -> dict[str, dict[int, dict[str, Any]]]:
        """Waits until every rank of every run has said a message of `kind`; participant -> rank -> message.

        Args:
            deadline_s: On the monotonic clock.
            confirm: Whether a fault is confirmed by running the command without us before the script is blamed.

        Raises:
            ScriptFailed: a command ended with a fault.
            EndedEarly: a command ended without one, or a rank said that its training is over.
            RunFailed: `deadline_s` (on the monotonic clock) has passed.
        """
        while True:
            if all(self._complete(run, kind) for run in runs):
                return {run.participant: {rank: _take(run.inbox[rank], kind) for rank in run.ranks} for run in runs}
            for run in runs:
                self._check(run, confirm)
            if time.monotonic() > deadline_s:
                waiting = [run for run in runs if not self._complete(run, kind)]
                raise RunFailed(_too_late(waiting[0], kind))
            self._pump(0.05)

    def start(self, runs: list[Run], deadline_s: float) -> None:
        """Waits until every run is at its first backward; each of them then waits there for `advance`."""
        self.receive(runs, "started", deadline_s)

    def advance(self, run: Run, kind: str, deadline_s: float) -> dict[int, dict[str, Any]]:
        """Lets one run go on from its first backward until its ranks say `kind`, the other runs waiting; rank -> message."""
        run.send({"command": "go"})
        return self.receive([run], kind, deadline_s)[run.participant]

    def _complete(self, run: Run, kind: str) -> bool:
        said = [rank for rank in run.ranks if any(message["type"] == kind for message in run.inbox[rank])]
        return len(said) >= run.world

    def _check(self, run: Run, confirm: bool) -> None:
        if run.broken is not None:
            raise RunFailed(_broken(run))
        code = run.process.poll()
        if run.ended_at_step is None and code is None:
            return
        if code is None:
            # A rank says it is over: the command's exit code tells whether by a fault. Its exit handlers may be slow.
            try:
                code = run.process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                code = 0
        self._pump(0.0)
        if code:
            raise self._blame(run, code, confirm)
        raise EndedEarly(_ended(run))

    def _blame(self, run: Run, code: int, confirm: bool) -> Exception:
        """Whose fault a failure is. Where frames of ours stand in what the script printed, it is run once without us."""
        output, failed = run.output(), code
        if confirm and str(PACKAGE) in output:
            self.end([run])
            patience_s = 10.0 + 2.0 * (time.monotonic() - run.started_s)
            failed, output = run_plainly(run.command, self.stdin, patience_s)
        if failed:
            return ScriptFailed(_failed(run, code), output=output, returncode=code)
        return RunFailed(
            f"{run.command.label} fails with bareloop's probes in it and not without them: a fault of bareloop's. "
            "This says nothing about the script."
        )

    def _pump(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                line, _ = self._listener.accept()
                self._buffers[line.fileno()] = b""
                self._selector.register(line, selectors.EVENT_READ, [line, None, 0])
            else:
                self._read(key.data)

    def _read(self, state: list[Any]) -> None:
        line: socket.socket = state[0]
        try:
            block = line.recv(1 << 20)
        except OSError:
            block = b""
        if not block:
            self._selector.unregister(line)
            line.close()
            return
        *lines, rest = (self._buffers[line.fileno()] + block).split(b"\n")
        self._buffers[line.fileno()] = rest
        for text in lines:
            self._said(state, json.loads(text))

    def _said(self, state: list[Any], message: dict[str, Any]) -> None:
        if message["type"] == "hello":
            run = next(run for run in self.runs if run.participant == message["participant"])
            if message["rank"] in run.ranks:
                run.others += 1
                state[0].sendall(b'{"command": "leave"}\n')
                return
            run.world = max(run.world, message["world"])
            run.ranks[message["rank"]] = state[0]
            run.inbox[message["rank"]] = []
            state[1], state[2] = run, message["rank"]
        elif state[1] is not None:
            if message["type"] == "ended":
                state[1].ended_at_step = message["step"]
            if message["type"] == "broken":
                state[1].broken = message["error"]
            state[1].inbox[state[2]].append(message)

    def stop(self, runs: list[Run]) -> None:
        """Ends runs at the step boundary they wait at, on all ranks together, with their exit handlers run."""
        for run in runs:
            run.send({"command": "stop"})
        deadline = time.monotonic() + GRACE_S
        for run in runs:
            while run.process.poll() is None and time.monotonic() < deadline:
                self._pump(0.02)
            if run.process.poll() is None:
                self.late.append(run.command.label)
        self.end(runs)

    def end(self, runs: list[Run] | None = None) -> None:
        """Ends whatever of these runs (default: all) is still alive: asks, then kills; grandchildren too."""
        ours = self.runs if runs is None else runs
        tags = {str(self.folder / f"{run.participant}.json") for run in ours}
        for stop_signal, patience_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
            alive = [run for run in ours if run.process.poll() is None]
            pids = {run.process.pid for run in alive} | set(_descendants(tags))
            if not pids:
                return
            for pid in pids:
                _signal(pid, stop_signal)
            deadline = time.monotonic() + patience_s
            while time.monotonic() < deadline and (_descendants(tags) or any(r.process.poll() is None for r in alive)):
                time.sleep(0.02)


def environment(settings: Path, command: Command) -> dict[str, str]:
    """The command's environment: the user's own, with the probes in front on PYTHONPATH."""
    own = dict(os.environ)
    injected = str(PACKAGE / "profiler" / "injected")
    own["PYTHONPATH"] = os.pathsep.join([injected, *filter(None, [own.get("PYTHONPATH")])])
    own["BARELOOP_SESSION"] = str(settings)
    own["BARELOOP_SOURCE"] = str(PACKAGE)
    own["BARELOOP_MASTER_PORT"] = str(free_port())
    # The user's folder stays as it was: no __pycache__ of a run that they did not start themselves.
    own["PYTHONDONTWRITEBYTECODE"] = "1"
    # torchrun reads its options from PET_*; two of them side by side must not ask for the same default port.
    if not any("master" in word or "rdzv" in word for word in command.argv):
        own.setdefault("PET_MASTER_PORT", str(free_port()))
    return own


def run_plainly(command: Command, stdin: str | None, patience_s: float) -> tuple[int, str]:
    """(exit code, end of standard error) of the command without probes; (0, "") when it still runs after `patience_s`."""
    own = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    with open(stdin or os.devnull, "rb") as source, tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            command.argv, env=own, stdin=source, stdout=subprocess.DEVNULL, stderr=printed, start_new_session=True
        )
        try:
            code = process.wait(patience_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            return 0, ""
        printed.seek(max(0, printed.seek(0, os.SEEK_END) - TAIL_BYTES))
        return code, printed.read().decode(errors="replace")


def free_port() -> int:
    """A TCP port that is free on the loopback address now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _take(inbox: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    return inbox.pop(next(index for index, message in enumerate(inbox) if message["type"] == kind))


def _descendants(tags: set[str]) -> list[int]:
    """Live processes that carry one of our settings files in their environment. Linux only; elsewhere none."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            values = entry.read_bytes().split(b"\0")
            state = (entry.parent / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except (OSError, IndexError):
            continue  # the process has ended meanwhile, or is not ours to read
        sessions = [value[17:].decode(errors="replace") for value in values if value.startswith(b"BARELOOP_SESSION=")]
        if state != "Z" and tags.intersection(sessions):
            found.append(int(entry.parent.name))
    return [pid for pid in found if pid != os.getpid()]


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _too_late(run: Run, kind: str) -> str:
    label = run.command.label
    if kind in ("started", "facts", "ready") and not run.ranks:
        return (
            f"{label} made no optimizer step within the budget. If it needs longer to start, raise --budget; if it "
            "trains in a process that bareloop can't see (python -S, -I or -E, a cleaned environment), start that one."
        )
    if len(run.ranks) < run.world:
        return f"{label}: only {len(run.ranks)} of {run.world} ranks reached the step where the others wait."
    return f"{label} did not come to its next step boundary within the budget; raise --budget."


def _broken(run: Run) -> str:
    assert run.broken is not None
    if os.environ.get("BARELOOP_DEBUG") == "1":
        return f"a probe of bareloop broke in {run.command.label}; this says nothing about the script.\n{run.broken}"
    last = run.broken.strip().splitlines()[-1]
    return (
        f"a probe of bareloop broke in {run.command.label} ({last}); this says nothing about the script. "
        "BARELOOP_DEBUG=1 prints where."
    )


def _ended(run: Run) -> str:
    label = run.command.label
    if os.environ.get("BARELOOP_DISABLE") == "1":
        return f"{label} was not watched, since BARELOOP_DISABLE=1 is set; unset it."
    if run.ended_at_step is None and not run.ranks:
        return (
            f"{label} ended by itself without an optimizer step that bareloop could see. It may not train, or train in "
            "a process started with -S, -I or -E, or update parameters without torch.optim."
        )
    return (
        f"{label} ended by itself after {run.ended_at_step or 'too few'} optimizer steps: too few to look at. "
        f"Give it at least {STEPS_NEEDED} steps."
    )


def _failed(run: Run, code: int) -> str:
    after = f" after {run.ended_at_step} optimizer steps" if run.ended_at_step else ""
    hint = ""
    if b"EOFError" in run.tails["err"]:
        hint = " It reads standard input: give it a file with --stdin FILE."
    return f"{run.command.label} failed by itself{after} (exit code {code}).{hint}"
