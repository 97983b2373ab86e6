"""What the commands print, from records."""

from dataclasses import replace
from typing import Any

import pytest

from bareloop.swarm.plan import Setup, plan
from bareloop.swarm.serve import Served
from bareloop.swarm.tables import follow, plan_table, served_text, text_of, watch_table
from bareloop.swarm.watch import PublishedRecord, Row, RunView

RECORD = PublishedRecord(
    peer="alpha-1",
    round=12,
    samples=2048,
    local_samples=700,
    samples_per_s=31.25,
    target=4096,
    peers=2,
    round_s=75.25,
    average_s=3.5,
    failures=2,
    lost_samples=0,
    time=1000.0,
)


def view(*rows: Row, **changes: Any) -> RunView:
    return RunView(
        **{
            "run_id": "run",
            "rows": rows,
            "round": 12,
            "samples": 2048,
            "target": 4096,
            "samples_per_s": 51.25,
            "failures": 2,
            "lost_samples": 0,
            "plain": False,
            "unreadable": 0,
            "runs": None,
            "nodes": 3,
            **changes,
        }
    )


ROWS = (
    Row(record=RECORD, age_s=0.4, stale=False),
    Row(record=replace(RECORD, peer="[b]beta[/b]", round=11, failures=0), age_s=9.0, stale=True),
)


def test_a_run_is_a_bar_and_a_row_a_peer() -> None:
    lines = text_of(watch_table(view(*ROWS)), width=80).splitlines()
    assert lines[0] == "run: round 12, 1 peer, 51.2 samples/s"
    assert lines[1] == "[############............] 2,048 of 4,096 samples"
    assert lines[5].split() == ["alpha-1", "12", "700", "31.2", "75.2", "3.50", "2", "0", "0", "s", "ago"]
    assert lines[6].startswith("[b]beta[/b]")
    assert lines[6].endswith("silent 9 s")
    assert lines[-1] == "Failed averages: 2; samples lost: 0."
    assert all(len(line) <= 80 and line.isascii() for line in lines)


def test_a_silent_peer_is_grey() -> None:
    colored = text_of(watch_table(view(*ROWS)), width=80, color=True)
    grey = [line for line in colored.splitlines() if "\x1b[2m" in line]
    assert len(grey) == 1
    assert "beta" in grey[0]


def test_a_plain_run_shows_dashes_for_what_it_does_not_tell() -> None:
    unknown = dict.fromkeys(("samples", "target", "peers", "round_s", "average_s", "failures", "lost_samples"))
    row = Row(record=replace(RECORD, **unknown), age_s=1.0, stale=False)
    text = text_of(watch_table(view(row, plain=True, target=None, failures=None, lost_samples=None)), width=80)
    assert "2,048 samples in this round; the target is not published" in text
    assert text.splitlines()[5].split()[4:8] == ["-", "-", "-", "-"]
    assert "Failed" not in text


def test_a_run_that_is_not_there_is_said_to_be_so() -> None:
    text = text_of(watch_table(view(runs=("other", "third"), nodes=None)))
    assert text == "run: no peer is seen. Runs that publish here: other, third.\n"
    assert text_of(watch_table(view(runs=(), nodes=None))) == "run: no peer is seen. No run publishes here.\n"
    assert "it can't list the names of its runs" in text_of(watch_table(view()))
    assert "2 records under this name can't be read" in text_of(watch_table(view(unreadable=2)))


def test_without_a_terminal_every_view_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    follow([view(*ROWS), view(*ROWS, round=13)])
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("run:")] == [
        "run: round 12, 1 peer, 51.2 samples/s",
        "run: round 13, 1 peer, 51.2 samples/s",
    ]


def test_a_plan_shows_its_numbers() -> None:
    setup = Setup(
        parameters=124e6,
        samples_per_s=(20.0, 20.0, 5.0),
        bandwidths=((100e6, 100e6),),
        latency_s=0.02,
        target_batch=4096,
    )
    found = plan(setup)
    text = text_of(plan_table(found), width=100)
    assert "the busiest peer sends 662 MB a round" in text
    assert f"{found.speed_up:.2f}x the fastest peer alone" in text
    assert f"{found.target_batch_for_efficiency:,.0f} or more keep 90%" in text
    assert "Extrapolated" not in text
    assert "not worth" not in text
    assert text.isascii()
    slow = plan(replace(setup, bandwidths=((1e6, 1e6),), samples_per_s=(20.0,) * 9))
    text = text_of(plan_table(slow), width=200)
    assert "Extrapolated: 9 peers (measured: 2 to 8); 1 Mbit/s (measured: 25 to 100)." in text
    assert "this swarm is not worth its network" in text


def test_an_address_comes_with_the_lines_to_paste_and_who_can_come() -> None:
    served = Served(engine="torchft", addresses=("127.0.0.1:29510",), loopback=True, records_port=29511)
    text = served_text(served)
    assert 'swarm.join("RUN", target_batch=N, engine="torchft", peers=["127.0.0.1:29510"])' in text
    assert "bareloop swarm watch RUN --engine torchft --peers 127.0.0.1:29510" in text
    assert "Only this machine" in text
    assert "OPEN: whoever reaches the port can join" in served_text(replace(served, loopback=False))
