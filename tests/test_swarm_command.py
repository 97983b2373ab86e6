"""The commands of the swarm: words in, sentences and exit codes out; and that their flags stay what they are."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import typer

from bareloop.__main__ import app
from bareloop.swarm import watch
from bareloop.swarm.watch import PublishedRecord, Reading, Unreachable, WatchOptions

PLAN = "swarm plan --parameters 124M --samples-per-s 20x2,5 --bandwidth 200Mbit/100Mbit --target-batch 4k"
FLAGS = {
    "serve": "--announce --engine --host --identity --peers --port",
    "watch": "--engine --every --json --once --peers",
    "plan": "--bandwidth --compression --efficiency --engine --json --latency --parameters --samples-per-s"
    " --target-batch",
}


def run(words: str) -> int:
    """Exit code of `bareloop WORDS`."""
    with pytest.raises(SystemExit) as ended:
        app(words.split(), prog_name="bareloop")
    return int(ended.value.code or 0)


def test_the_flags_stay_what_they_are() -> None:
    group = typer.main.get_command(app).commands["swarm"]  # type: ignore[attr-defined]
    assert set(group.commands) == set(FLAGS)
    for name, command in group.commands.items():
        flags = {flag for parameter in command.params for flag in parameter.opts if flag.startswith("--")}
        assert sorted(flags) == FLAGS[name].split()


def test_a_plan_is_printed_and_comes_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(PLAN) == 0
    assert "3 peers, 45 samples/s together; engine hivemind" in capsys.readouterr().out
    assert run(f"{PLAN} --json --latency 5ms --compression 8bit --efficiency 0.5") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["setup"] == {
        "parameters": 124e6,
        "samples_per_s": [20, 20, 5],
        "bandwidths": [[2e8, 1e8]],
        "latency_s": 0.005,
        "target_batch": 4000,
        "engine": "hivemind",
        "compression": "8bit",
        "efficiency": 0.5,
    }


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (f"{PLAN} --latency 20", "latency='20': must be a time with its unit, such as 20ms"),
        (f"{PLAN} --engine torchft --compression fp16", "torchft engine sends gradients as they are"),
        (f"{PLAN} --engine mpi", "mpi"),
        ("swarm plan", "Missing option"),
        ("swarm watch run", "Missing option '--peers'"),
        ("swarm watch run --engine torchft --peers localhost", "127.0.0.1:29510"),
        ("swarm serve --port 70000", "port=70000"),
        ("swarm serve --engine torchft --identity key", "a lighthouse has none"),
    ],
)
def test_usage_is_refused_in_a_sentence(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""


def test_nobody_at_the_address_is_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("swarm watch run --engine torchft --peers 127.0.0.1:1 --once") == 3
    assert capsys.readouterr().err == "bareloop: no lighthouse answers at 127.0.0.1:1: Connection refused\n"


class Source:
    """Gives a reading a look, then says that nobody answers."""

    def __init__(self, *readings: Reading) -> None:
        self.readings = list(readings)

    def read(self) -> Reading:
        if not self.readings:
            raise Unreachable("the store is gone")
        return self.readings.pop(0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the command asked to watch, first the options; a source of two readings answers."""
    seen: list[Any] = []
    numbers = dict.fromkeys(
        ("samples", "local_samples", "samples_per_s", "target", "peers", "round_s", "average_s"), 8.0
    )
    record = PublishedRecord(peer="a", round=2, failures=0, lost_samples=0, time=time.time(), **numbers)

    @contextmanager
    def fake(options: WatchOptions) -> Iterator[Source]:
        seen.append(options)
        yield Source(Reading(records={"a": record}), Reading(records={}, runs=("other",)))

    monkeypatch.setattr(watch, "watching", fake)
    return seen


def test_one_look_is_a_table_or_an_object(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    a, b, c = (f"/ip4/127.0.0.1/tcp/{port}/p2p/Qm" for port in (1, 2, 3))
    assert run(f"swarm watch run --peers {a},{b} --peers {c} --once") == 0
    assert capsys.readouterr().out.startswith("run: round 2, 1 peer, 8 samples/s\n[########################] 8 of 8")
    assert asked[0] == WatchOptions(run_id="run", peers=(a, b, c))
    assert run("swarm watch run --engine torchft --peers a:1 --once --json") == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["record"]["peer"] == "a"


def test_no_peer_is_an_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    @contextmanager
    def fake(options: WatchOptions) -> Iterator[Source]:
        yield Source(Reading(records={}, runs=("other",)))

    monkeypatch.setattr(watch, "watching", fake)
    assert run("swarm watch run --engine torchft --peers a:1 --once") == 1
    assert capsys.readouterr().out == "run: no peer is seen. Runs that publish here: other.\n"


@pytest.mark.parametrize("engine", ["hivemind", "torchft"])
def test_an_address_that_is_none_is_an_error_of_the_command_line(
    engine: str, asked: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(f"swarm watch run --engine {engine} --peers bad --once") == 2
    assert "peers has 'bad'" in capsys.readouterr().err
    assert asked == []


def test_looks_follow_each_other_until_nobody_answers(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("swarm watch run --peers /ip4/127.0.0.1/tcp/1/p2p/Qm --every 0.1 --json") == 3
    printed = capsys.readouterr()
    assert [len(json.loads(line)["rows"]) for line in printed.out.splitlines()] == [1, 1]
    assert printed.err == "bareloop: the store is gone\n"


def test_an_engine_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    for name in ("bareloop.swarm.watch_hivemind", "bareloop.swarm.watch_torchft"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "hivemind", None)
    assert run("swarm serve --port 0") == 3
    assert "engine='hivemind' needs hivemind, which is not installed: pip install 'bareloop[swarm]'" in (
        capsys.readouterr().err
    )
