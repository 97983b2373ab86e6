"""Entry points: what is refused, who can reach them, and that nothing is left when they end."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bareloop.swarm.serve import DEFAULT_PORTS, ServeFailed, ServeOptions, ended_by_signal, serving

# hivemind 1.1.12, when it is imported and when it looks for its daemon.
pytestmark = [
    pytest.mark.filterwarnings("ignore:path is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]


def listening() -> dict[int, set[str]]:
    """Ports of this machine that somebody listens at, with the addresses as the kernel prints them."""
    found: dict[int, set[str]] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state = line.split()[:4]
            if state == "0A":
                address, port = local.split(":")
                found.setdefault(int(port, 16), set()).add(address)
    return found


LOOPBACK = {"0100007F"}


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"engine": "mpi"}, "engine='mpi'"),
        ({"port": -1}, "port=-1"),
        ({"port": 65536}, "port=65536: must be 0 .* to 65535"),
        ({"port": 65535, "engine": "torchft"}, "to 65534"),
        ({"host": "no such host"}, "host='no such host'"),
        ({"host": ""}, "host=''"),
        ({"announce": "0.0.0.0"}, "announce='0.0.0.0'"),
        ({"identity": Path("no/such/folder/key")}, "no such folder"),
        ({"identity": Path("key"), "engine": "torchft"}, "a lighthouse has none"),
        ({"peers": ("a:1",), "engine": "torchft"}, "one lighthouse"),
    ],
)
def test_what_can_not_be_served_is_refused(options: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ServeOptions(**options)


@pytest.mark.parametrize("engine", sorted(DEFAULT_PORTS))
def test_a_taken_port_and_an_address_of_another_machine_are_said_to_be(engine: str) -> None:
    with taken_port() as port, pytest.raises(ServeFailed, match=rf"{port}.*in use.*--port 0"):
        with serving(ServeOptions(engine=engine, port=port)):
            pass
    with pytest.raises(ServeFailed, match=r"192\.0\.2\.1.*annot assign"):
        with serving(ServeOptions(engine=engine, host="192.0.2.1")):
            pass


def test_a_taken_port_after_the_lighthouses_is_noticed_before_it_starts() -> None:
    with taken_port() as port, pytest.raises(ServeFailed, match=f"ports {port - 1} and {port}"):
        with serving(ServeOptions(engine="torchft", port=port - 1)):
            pass


def test_a_lighthouse_and_its_store_are_on_loopback_and_end() -> None:
    from datetime import timedelta

    from torchft.coordination import LighthouseClient

    with serving(ServeOptions(engine="torchft", port=0)) as served:
        assert served.loopback
        host, _, port = served.addresses[0].rpartition(":")
        assert (host, served.records_port) == ("127.0.0.1", int(port) + 1)
        there = listening()
        assert there[int(port)] == there[int(port) + 1] == LOOPBACK
        client = LighthouseClient(addr=f"http://{served.addresses[0]}", connect_timeout=timedelta(seconds=10))
        client.heartbeat("peer", timeout=timedelta(seconds=10))
    deadline = time.monotonic() + 30
    while {int(port), int(port) + 1} & set(listening()):
        assert time.monotonic() < deadline, "still listening"
        time.sleep(0.05)


def test_a_node_of_the_dht_keeps_its_address_and_takes_others_in(tmp_path: Path) -> None:
    from hivemind import DHT

    options = ServeOptions(port=0, identity=tmp_path / "key")
    with serving(options) as first:
        port = int(first.addresses[0].split("/")[4])
        assert listening()[port] == LOOPBACK
        other = DHT(initial_peers=list(first.addresses), start=True, use_relay=False, nat_port_map=False)
        assert other.store("key", "value", time.time() + 100)
        with serving(ServeOptions(port=0, peers=first.addresses)) as second:
            names = [address.rpartition("/")[2] for address in (*first.addresses, *second.addresses)]
            assert len(set(names)) == 2
        other.shutdown()
    assert (tmp_path / "key").stat().st_mode & 0o077 == 0
    with serving(ServeOptions(port=port, identity=tmp_path / "key")) as again:
        assert again.addresses == first.addresses
    assert port not in listening()


def test_signals_set_the_event_and_the_old_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    for number in (signal.SIGINT, signal.SIGTERM):
        with ended_by_signal() as ended:
            os.kill(os.getpid(), number)
            assert ended.wait(10)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("engine", "number", "to_all"),
    [("hivemind", signal.SIGINT, True), ("torchft", signal.SIGTERM, False)],
    ids=["ctrl-c", "sigterm"],
)
def test_the_command_ends_in_silence_with_all_it_started(engine: str, number: int, to_all: bool) -> None:
    """Ctrl-C in a terminal goes to every process of the group."""
    command = [sys.executable, "-m", "bareloop", "swarm", "serve", "--engine", engine, "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        guard = threading.Timer(120, process.kill)
        guard.start()
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            address = process.stdout.readline().split()[-1]
            assert address.startswith("/ip4/127.0.0.1/tcp/" if engine == "hivemind" else "127.0.0.1:")
            family = session(process.pid)
            assert len(family) == (3 if engine == "hivemind" else 1)
            (os.killpg if to_all else os.kill)(process.pid, number)
            assert process.wait(60) == 0
            assert process.stderr.read() == ""
            assert f'engine="{engine}", peers=["{address}"]' in process.stdout.read()
            assert session(process.pid) == set()
        finally:
            guard.cancel()
            for pid in session(process.pid):
                os.kill(pid, signal.SIGKILL)


def session(leader: int) -> set[int]:
    """Processes of a session that are alive."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, number = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue
        if int(number) == leader and state not in "ZX":
            found.add(int(folder.name))
    return found
