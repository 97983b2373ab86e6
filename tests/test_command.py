"""The command and the Python surface, with the diagnosis replaced by fakes; and the words that become a command."""

import os
import runpy
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import bareloop
from bareloop.__main__ import app
from bareloop.profiler.command import Command, command_from_side, command_from_words
from bareloop.profiler.failures import RunFailed, ScriptFailed, UsageError
from bareloop.profiler.options import Options
from bareloop.renderers.json import read

RECORDS = runpy.run_path(str(Path(__file__).parent / "renderers" / "records.py"))
SOURCE = str(Path(bareloop.__file__).parents[1])


class Calls:
    """What the fakes were called with, and what they do."""

    def __init__(self) -> None:
        self.commands: tuple[Command, ...] = ()
        self.options = Options()
        self.error: BaseException | None = None
        self.records: dict[str, Any] = {"explain": RECORDS["diagnosis"](), "compare": RECORDS["comparison"]()}

    def answer(self, name: str, *commands: Command, options: Options, progress: Callable[[str], None]) -> Any:
        self.commands, self.options = commands, options
        progress("working")
        if self.error is not None:
            raise self.error
        return self.records[name]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Calls:
    """Fakes in place of the diagnosis, in a folder that holds a.py, b.py and an empty in.txt."""
    seen = Calls()
    explain, compare = (types.ModuleType(f"bareloop.diagnosis.{name}") for name in ("explain", "compare"))
    explain.explain = lambda command, options, *, progress: seen.answer(  # type: ignore[attr-defined]
        "explain", command, options=options, progress=progress
    )
    compare.compare = lambda a, b, options, *, progress: seen.answer(  # type: ignore[attr-defined]
        "compare", a, b, options=options, progress=progress
    )
    for module in (explain, compare):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(tmp_path)
    for name in ("a.py", "b.py", "in.txt"):
        (tmp_path / name).write_text("")
    return seen


def run(*words: str) -> int:
    """Exit code of `bareloop WORDS`."""
    with pytest.raises(SystemExit) as ended:
        app(list(words), prog_name="bareloop")
    return int(ended.value.code or 0)


def test_everything_after_the_script_is_the_scripts(calls: Calls) -> None:
    rest = ("--steps", "9", "--json", "x", "-m", "--", "--quiet", "--help", "--fail_on=slower")
    assert run("explain", "--steps", "3", "--fail_on", "finding", "--no_ablate", "a.py", *rest) == 1
    assert calls.commands[0].argv == (sys.executable, "a.py", *rest)
    assert calls.commands[0].script == "a.py"
    assert (calls.options.steps, calls.options.ablate) == (3, False)


def test_everything_after_a_module_is_the_modules(calls: Calls) -> None:
    assert run("explain", "--warmup", "2", "-m", "pkg.train", "--steps", "9", "-x") == 0
    assert calls.commands[0].argv == (sys.executable, "-m", "pkg.train", "--steps", "9", "-x")
    assert (calls.options.steps, calls.options.warmup) == (None, 2)


def test_a_launchers_line_follows_the_dashes(calls: Calls) -> None:
    assert run("explain", "--", "python", "-u", "a.py", "--", "x") == 0
    assert calls.commands[0].argv[1:] == ("-u", "a.py", "--", "x")
    assert os.path.dirname(calls.commands[0].argv[0]) == os.path.dirname(sys.executable)
    assert calls.commands[0].label == "python -u a.py -- x"


def test_every_flag_is_an_option(calls: Calls) -> None:
    flags = "--steps 5 --warmup 6 --budget 7.5 --launches 8 --no-ablate --stdin in.txt --seed 9 --quiet"
    expected = Options(
        steps=5,
        warmup=6,
        budget_s=7.5,
        launches=8,
        ablate=False,
        stdin=os.path.realpath("in.txt"),
        seed=9,
    )
    assert run("compare", *flags.split(), "a.py --lr 1", "b.py") == 0
    assert calls.options == expected
    assert [command.label for command in calls.commands] == ["a.py --lr 1", "b.py"]
    assert run("explain", *flags.split(), "a.py") == 0
    assert calls.options == expected
    assert run("explain", "a.py") == 0
    assert calls.options == Options()


def test_the_report_is_printed_and_stored(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("compare", "--json", "out.json", "a.py", "b.py") == 0
    printed = capsys.readouterr()
    assert "DIFFERENT MATH" in printed.out
    assert printed.err == ""
    assert read("out.json") == calls.records["compare"]
    assert run("show", "out.json") == 0
    assert capsys.readouterr().out == printed.out


@pytest.mark.parametrize(
    ("conditions", "code"),
    [
        ("--fail-on slower", 0),
        ("--fail-on slower --fail-on unequal-math", 1),
        ("--fail-on unequal_work", 0),
        ("--fail-on finding", 1),
    ],
)
def test_conditions_decide_the_exit_code(calls: Calls, conditions: str, code: int) -> None:
    assert run("compare", *conditions.split(), "a.py", "b.py") == code


def test_an_undecided_condition_has_its_own_exit_code(calls: Calls) -> None:
    calls.records["compare"] = RECORDS["unequal_comparison"]()
    assert run("compare", "--fail-on", "slower", "a.py", "b.py") == 5


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("explain no.py", "no such script: 'no.py'"),
        ("explain -- torchrun --nproc-per-node 2 no.py", "no such script: 'no.py'"),
        ("explain no-such-program", "no such program or script: 'no-such-program'"),
        ("explain --steps 0 a.py", "steps must be at least 1, got 0"),
        ("explain --budget 0 a.py", "budget must be more than 0 seconds"),
        ("explain --launches 1 a.py", "launches must be at least 2"),
        ("explain --json no/x.json a.py", "does not exist"),
        ("explain --stdin no.txt a.py", "no.txt"),
        ("explain --fail-on slower a.py", "slower"),
        ("explain -m", "Missing argument"),
        ("explain", "Missing argument"),
        ("explain --nonsense a.py", "--nonsense"),
        ("compare a.py", "Missing argument"),
        ("compare --fail-on nonsense a.py b.py", "nonsense"),
        ("compare a.py no.py", "no such script: 'no.py'"),
        ("show no.json", "no.json"),
        ("show a.py", "is not JSON"),
    ],
)
def test_usage_is_refused_in_a_sentence(
    calls: Calls, words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words.split()) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert printed.out == ""
    assert calls.commands == ()


def test_a_failing_script_speaks_first(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    calls.error = ScriptFailed("a.py ended with exit code 1 at step 3", output="Traceback ...\nKeyError: 'x'\n")
    assert run("explain", "a.py") == 4
    error = capsys.readouterr().err
    assert error == "Traceback ...\nKeyError: 'x'\nbareloop: a.py ended with exit code 1 at step 3\n"


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (RunFailed("no training step in 120 s"), 3, "bareloop: no training step in 120 s\n"),
        (UsageError("steps can't be that"), 2, "bareloop: steps can't be that\n"),
        (KeyboardInterrupt(), 130, "bareloop: interrupted; what was started is stopped, no report was made\n"),
    ],
)
def test_each_failure_has_its_exit_code(
    calls: Calls, error: BaseException, code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    calls.error = error
    assert run("compare", "a.py", "b.py") == code
    assert capsys.readouterr().err == sentence


def test_our_own_mistake_is_no_claim_about_the_script(
    calls: Calls, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BARELOOP_DEBUG", raising=False)
    calls.error = KeyError("oops")
    assert run("explain", "a.py") == 3
    error = capsys.readouterr().err
    assert error.startswith("bareloop failed: KeyError: 'oops' (this says nothing about the script)")
    assert "Traceback" not in error
    monkeypatch.setenv("BARELOOP_DEBUG", "1")
    assert run("explain", "a.py") == 3
    assert "Traceback" in capsys.readouterr().err


def test_a_full_disk_still_prints_the_report(tmp_path: Path) -> None:
    """The kernel refuses files over 1,000 bytes in this process; the record has more."""
    program = f"""
import resource, runpy, sys, types
fake = types.ModuleType("bareloop.diagnosis.explain")
record = runpy.run_path({str(Path(__file__).parent / "renderers" / "records.py")!r})["diagnosis"]()
fake.explain = lambda command, options, *, progress: record
sys.modules[fake.__name__] = fake
from bareloop.__main__ import app
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
app(["explain", "--json", "out.json", "a.py"])
"""
    (tmp_path / "a.py").write_text("")
    ended = _python("-c", program, folder=tmp_path)
    assert ended.returncode == 3
    assert "A step takes 7.40 ms" in ended.stdout
    assert ended.stderr.startswith("bareloop: the report was made, but 'out.json' could not be written: ")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.py"]


def test_a_reader_that_has_seen_enough_is_no_error(calls: Calls, tmp_path: Path) -> None:
    assert run("explain", "--json", "out.json", "a.py") == 0
    command = [sys.executable, "-m", "bareloop", "show", "out.json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=_environment()) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 0


def test_a_terminal_without_unicode_gets_the_report(calls: Calls, tmp_path: Path) -> None:
    calls.records["explain"] = replace(calls.records["explain"], script="tra\u00efn.py")
    assert run("explain", "--json", "out.json", "a.py") == 0
    environment = {**_environment(), "PYTHONIOENCODING": "ascii"}
    ended = _python("-m", "bareloop", "show", "out.json", folder=tmp_path, environment=environment)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "tra\\xefn.py" in ended.stdout


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"bareloop {bareloop.__version__}\n"


def test_python_surface_takes_paths_and_whole_commands(calls: Calls) -> None:
    heard: list[str] = []
    record = bareloop.explain("a.py", ["--lr", "1"], progress=heard.append, budget_s=5.0)
    assert record is calls.records["explain"]
    assert heard == ["working"]
    assert calls.commands[0].argv == (sys.executable, "a.py", "--lr", "1")
    assert calls.options == Options(budget_s=5.0)
    bareloop.explain(["-m", "pkg.train"], ["--lr", "1"])
    assert calls.commands[0].argv == (sys.executable, "-m", "pkg.train", "--lr", "1")
    assert bareloop.compare("a.py --lr '1 2'", ["b.py", "x y"], launches=3) is calls.records["compare"]
    assert [command.argv[1:] for command in calls.commands] == [("a.py", "--lr", "1 2"), ("b.py", "x y")]
    with pytest.raises(TypeError, match="stepz"):
        bareloop.explain("a.py", stepz=3)


def test_importing_loads_no_torch() -> None:
    modules = "bareloop bareloop.trace bareloop.benchmark bareloop.diagnosis.evidence bareloop.profiler.command"
    modules += " bareloop.renderers.terminal bareloop.renderers.json bareloop.renderers.progress bareloop.__main__"
    program = (
        f"import importlib, sys\nfor name in {modules.split()!r}: importlib.import_module(name)\n"
        "print(sorted({'torch', 'numpy', 'scipy', 'transformers', 'accelerate', 'lightning'} & set(sys.modules)))"
    )
    ended = _python("-c", program)
    assert (ended.stdout, ended.stderr) == ("[]\n", "")


def test_the_package_itself_loads_only_the_standard_library() -> None:
    program = (
        "import sys\nbefore = set(sys.modules)\nimport bareloop\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new - sys.stdlib_module_names))"
    )
    ended = _python("-c", program)
    assert (ended.stdout, ended.stderr) == ("['bareloop']\n", "")


# The words that become a command.


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "my train.py").write_text("")
    (tmp_path / "noending").write_text("")
    program = tmp_path / "launch.sh"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "argv", "script"),
    [
        (("train.py", "--lr", "1"), (sys.executable, "train.py", "--lr", "1"), "train.py"),
        (("--", "train.py", "--", "x"), (sys.executable, "train.py", "--", "x"), "train.py"),
        (("noending", "x"), (sys.executable, "noending", "x"), "noending"),
        (("./launch.sh", "train.py"), ("./launch.sh", "train.py"), "train.py"),
        (("-m", "pkg", "x.py"), (sys.executable, "-m", "pkg", "x.py"), None),
        ((sys.executable, "-c", "pass", "x.py"), (sys.executable, "-c", "pass", "x.py"), None),
        ((sys.executable, "-m", "torch.distributed.run", "x.py"), None, None),
        ((sys.executable, "train.py", "--out", "made.py"), None, "train.py"),
    ],
)
def test_words_become_a_command(
    folder: Path, words: tuple[str, ...], argv: tuple[str, ...] | None, script: str | None
) -> None:
    command = command_from_words(words)
    assert command.argv == (argv or words)
    assert command.script == script


def test_a_program_beside_this_python_wins_over_the_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {}
    for place in ("env", "path"):
        (folder / place).mkdir()
        for name in ("python", "torchrun") if place == "env" else ("torchrun", "other"):
            places[place, name] = folder / place / name
            places[place, name].write_text("#!/bin/sh\n")
            places[place, name].chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(places["env", "python"]))
    monkeypatch.setenv("PATH", str(folder / "path"))
    assert command_from_words(("torchrun", "train.py")).argv[0] == str(places["env", "torchrun"])
    assert command_from_words(("python", "train.py")).argv[0] == str(places["env", "python"])
    assert command_from_words(("other", "train.py")).argv[0] == str(places["path", "other"])
    with pytest.raises(UsageError, match=r"'absent'.*PATH"):
        command_from_words(("absent", "train.py"))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "nothing to run"),
        (("--",), "nothing to run"),
        (("",), "nothing to run"),
        (("-m",), "-m needs"),
        (("gone.py",), "no such script: 'gone.py'"),
        (("./gone",), "no such program: './gone'"),
        ((sys.executable, "gone.py"), "no such script: 'gone.py'"),
    ],
)
def test_what_can_not_be_run_is_refused(folder: Path, words: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence.replace(".", r"\.")):
        command_from_words(words)


def test_a_side_is_split_as_a_shell_does(folder: Path) -> None:
    assert command_from_side("train.py --name 'a b'").argv[1:] == ("train.py", "--name", "a b")
    assert command_from_side("my train.py").argv[1:] == ("my train.py",)
    assert command_from_side("-m pkg.train x").argv[1:] == ("-m", "pkg.train", "x")
    with pytest.raises(UsageError, match="quotes"):
        command_from_side("train.py 'open")
    with pytest.raises(UsageError, match="nothing to run"):
        command_from_side("  ")


def test_a_label_is_short(folder: Path) -> None:
    command = command_from_words(("train.py", *("--word" for _ in range(50))))
    assert len(command.label) == 60
    assert command.label.startswith("train.py --word")
    assert command.label.endswith("...")
    assert len(command.argv) == 52


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": SOURCE, "PYTHONDONTWRITEBYTECODE": "1"}


def _python(
    *words: str, folder: Path | None = None, environment: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, *words]
    env = environment or _environment()
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env, timeout=60)
