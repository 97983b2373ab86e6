"""Records of a run: what is believed, how a silent peer greys and goes, and reading them from the real stores."""

import gc
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from bareloop.swarm.watch import (
    Board,
    PublishedRecord,
    Reading,
    RunView,
    Unreachable,
    WatchOptions,
    parse_record,
    views,
    watching,
)

# hivemind 1.1.12, when it is imported and when it looks for its daemon.
pytestmark = [
    pytest.mark.filterwarnings("ignore:path is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]

FIELDS = {
    "peer": "a-1",
    "round": 3,
    "samples": 96,
    "local_samples": 40,
    "samples_per_s": 12.5,
    "target": 256,
    "peers": 2,
    "round_s": 20.5,
    "average_s": 1.25,
    "failures": 1,
    "lost_samples": 8,
    "time": 1000.0,
}


def text(**changes: Any) -> str:
    return json.dumps({**FIELDS, **changes})


def record(**changes: Any) -> PublishedRecord:
    found = parse_record(text(**changes))
    assert found is not None
    return found


def test_a_record_is_read_as_the_door_writes_it() -> None:
    from bareloop.swarm.status import SwarmStatus
    from bareloop.swarm.status import record as written

    status = SwarmStatus(
        round=3,
        samples=96,
        local_samples=40,
        target=256,
        peers=2,
        round_samples=260,
        round_s=20.5,
        average_s=1.25,
        local_samples_per_s=12.5,
        failures=1,
        lost_samples=8,
    )
    found = parse_record(written("a-1", status))
    assert found is not None
    assert found == record(time=found.time)
    assert abs(found.time - time.time()) < 60


@pytest.mark.parametrize(
    "garbled",
    [
        "",
        "{",
        "[]",
        "null",
        "[" * 4000,
        text()[:-1],
        text(round=-1),
        text(round="3"),
        text(samples=float("nan")),
        text(samples=float("inf")),
        text(samples=True),
        text(peer=7),
        text(peer="x" * 5000),
        text(time=None),
        json.dumps({key: value for key, value in FIELDS.items() if key != "target"}),
        b"\xff\xfe",
    ],
)
def test_what_is_no_record_is_none(garbled: str) -> None:
    assert parse_record(garbled) is None


def test_a_name_loses_what_a_terminal_would_obey() -> None:
    assert record(peer="a\x1b[2Jb\n\u202ec").peer == "a?[2Jb??c"
    assert len(record(peer="x" * 300).peer) == 40


def test_fields_that_a_later_version_adds_are_ignored() -> None:
    assert record(colour="red") == record()


def test_sums_are_over_the_peers_that_are_not_stale() -> None:
    board = Board("run")
    there = {"a": record(), "b": record(peer="b", samples=120, samples_per_s=7.5, failures=0, lost_samples=0)}
    view = board.update(Reading(records=there), 1001.0)
    assert [row.record.peer for row in view.rows] == ["a-1", "b"]
    assert (view.live, view.round, view.samples, view.target) == (2, 3, 120, 256)
    assert (view.samples_per_s, view.failures, view.lost_samples) == (20.0, 1, 8)
    # b goes silent: its record stays in the store unchanged, or expires there.
    only_a = {"a": record(time=1007.0, round=4, samples=10)}
    view = board.update(Reading(records=only_a), 1007.0)
    assert [(row.record.peer, row.stale, row.age_s) for row in view.rows] == [("a-1", False, 0.0), ("b", True, 7.0)]
    assert (view.live, view.round, view.samples, view.samples_per_s) == (1, 4, 10, 12.5)
    view = board.update(Reading(records={"a": record(time=1040.0)}), 1040.0)
    assert [row.record.peer for row in view.rows] == ["a-1"]


def test_a_clock_that_goes_wrong_makes_a_peer_neither_young_nor_old() -> None:
    board = Board("run")
    board.update(Reading(records={"a": record(time=5000.0)}), 1000.0)
    view = board.update(Reading(records={"a": record(time=5000.0)}), 1006.0)
    assert (view.rows[0].age_s, view.rows[0].stale) == (6.0, True)
    view = board.update(Reading(records={"a": record(time=5006.0)}), 1007.0)
    assert (view.rows[0].age_s, view.rows[0].stale) == (0.0, False)
    view = Board("run").update(Reading(records={"a": record(time=10.0)}), 1000.0)
    assert view.rows == ()  # long dead, in a store that forgets nothing


def test_options_that_can_not_be_honoured_are_refused() -> None:
    for options, said in (
        ({"run_id": ""}, "run_id"),
        ({"peers": ()}, "bareloop swarm serve"),
        ({"engine": "mpi"}, "engine='mpi'"),
        ({"every_s": 0.01}, "every_s=0.01"),
        ({"peers": ("a:1",)}, "swarm serve --engine hivemind"),
        ({"engine": "torchft", "peers": ("127.0.0.1",)}, "127.0.0.1:29510"),
        ({"engine": "torchft", "peers": ("a:1", "b:2")}, "one lighthouse"),
    ):
        with pytest.raises(ValueError, match=said):
            WatchOptions(**{"run_id": "run", "peers": ("a:1",), **options})


@pytest.fixture(scope="module")
def store() -> Iterator[Any]:
    """A store beside a port that accepts, as `serve --engine torchft` has them."""
    import socket

    from torch.distributed import TCPStore

    for _ in range(50):
        lighthouse = socket.create_server(("127.0.0.1", 0))
        port = lighthouse.getsockname()[1]
        try:
            listener = socket.create_server(("127.0.0.1", port + 1))
            break
        except (OSError, OverflowError):
            lighthouse.close()
    yield TCPStore("127.0.0.1", port + 1, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    lighthouse.close()


def test_records_are_read_from_the_store_beside_a_lighthouse(store: Any) -> None:
    store.set("run/a-1", text(time=time.time()))
    store.set("run/b/c", text(peer="another run's"))
    store.set("run/x", "garbled")
    store.set("run/peers", "a-1\n")
    options = WatchOptions(run_id="run", peers=(f"127.0.0.1:{store.port - 1}",), engine="torchft", every_s=0.1)
    with watching(options) as source:
        view = next(views(options, source, threading.Event()))
    assert [row.record.peer for row in view.rows] == ["a-1"]
    assert (view.unreadable, view.runs, view.nodes) == (1, ("run", "run/b"), None)


def test_a_lighthouse_without_a_store_is_said_to_have_none(store: Any) -> None:
    options = WatchOptions(run_id="run", peers=(f"127.0.0.1:{store.port}",), engine="torchft")
    with pytest.raises(Unreachable, match="no store for records beside it"):
        with watching(options):
            pass
    with pytest.raises(Unreachable, match=r"no lighthouse answers at 127\.0\.0\.1:1:"):
        with watching(WatchOptions(run_id="run", peers=("127.0.0.1:1",), engine="torchft")):
            pass


@pytest.fixture(scope="module")
def dht() -> Iterator[Any]:
    from hivemind import DHT

    opened = DHT(start=True, use_relay=False, auto_nat=False, nat_port_map=False)
    yield opened
    opened.shutdown()


def one_view(dht: Any, run_id: str) -> RunView:
    options = WatchOptions(run_id=run_id, peers=(str(dht.get_visible_maddrs()[0]),), every_s=0.1)
    with watching(options) as source:
        return next(views(options, source, threading.Event()))


def test_records_are_read_from_a_dht(dht: Any) -> None:
    until = time.time() + 100
    assert dht.store("run.bareloop", text(time=time.time()), until, subkey=b"1")
    assert dht.store("run.bareloop", text(peer="b", time=time.time()), until, subkey=b"2")
    assert dht.store("run.bareloop", "garbled", until, subkey=b"3")
    assert dht.store("run.bareloop", [1, 2], until, subkey=b"4")
    view = one_view(dht, "run")
    assert [row.record.peer for row in view.rows] == ["a-1", "b"]
    assert (view.unreadable, view.plain, view.runs) == (2, False, None)
    assert view.nodes is not None and view.nodes >= 1


def test_what_breaks_hiveminds_own_reading_is_a_sentence() -> None:
    from concurrent.futures import Future

    from bareloop.swarm.watch_hivemind import Records

    class Broken:
        def get(self, key: str, **options: Any) -> "Future[None]":
            answer: Future[None] = Future()
            answer.set_exception(TypeError("no order"))
            return answer

    broken: Any = Broken()
    with pytest.raises(Unreachable, match=r"'run\.bareloop' can't be read by hivemind: TypeError: no order"):
        Records("run", broken).read()


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_a_run_of_plain_hivemind_shows_what_it_tells(dht: Any) -> None:
    """The progress is written by hivemind's own ProgressTracker, signed as it signs it."""
    from hivemind.optim.progress_tracker import ProgressTracker

    tracker = ProgressTracker(dht, "plainrun", target_batch_size=1000, start=True, min_refresh_period=0.1)
    try:
        tracker.report_local_progress(local_epoch=0, samples_accumulated=48)
        deadline = time.monotonic() + 60
        while dht.get("plainrun_progress", latest=True) is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        view = one_view(dht, "plainrun")
    finally:
        tracker.shutdown(10)
        tracker.join(30)
        del tracker
        gc.collect()  # its event loop is never closed: let it be said here
    assert [(row.record.local_samples, row.record.target) for row in view.rows] == [(48, None)]
    assert view.rows[0].record.peer == dht.peer_id.to_base58()[-12:]
    assert (view.plain, view.samples, view.target, view.failures, view.unreadable) == (True, 48, None, None, 0)


def test_an_address_where_nobody_is_is_said_within_seconds() -> None:
    nobody = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWL8gBR7zUU5GqSKj1ELKkkhJXMmp6SbAFFsR4ucxBRZSV"
    with pytest.raises(Unreachable, match=r"no peer of a DHT answers at 127\.0\.0\.1:1"):
        with watching(WatchOptions(run_id="run", peers=(nobody,))):
            pass
    with pytest.raises(Unreachable, match="is no address"):
        with watching(WatchOptions(run_id="run", peers=(nobody.replace("127.0.0.1", "localhost"),))):
            pass
