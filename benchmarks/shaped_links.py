"""Peers in network namespaces, joined by links of a chosen bandwidth and round-trip time; Linux, root, `ip` and `tc`.

    with shaped_links(4) as links:
        links.shape(mbit=100, rtt_ms=40)
        links.start(2, work, "an argument")          # work(address, "an argument") in the namespace of peer 2

Every peer has one link to a switch. Bandwidth is held by the kernel (a token bucket on each end of the link, so up and
down are full duplex). Latency is held by the switch: a process that moves frames between raw sockets and keeps each for
half a round trip, since netem is missing in many kernels. It moves whole 64 KB segments (with their virtio headers),
which leaves it idle at the rates used here; `measured` says what a bulk transfer and a handshake really get.
"""

import ctypes
import json
import multiprocessing
import os
import select
import socket
import struct
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from multiprocessing.sharedctypes import Synchronized

__all__ = ["Links", "shaped_links"]

FORK = multiprocessing.get_context("fork")
BURST_BYTES = 80_000
"""Of the token buckets: one segment of 64 KB must fit, else the kernel cuts it into frames."""
SOL_PACKET, PACKET_VNET_HDR, CLONE_NEWNET = 263, 15, 0x40000000
ETH_ALL = 3


class Links:
    """Namespaces of `peers` peers and one switch; see `shaped_links`."""

    def __init__(self, peers: int, delay_s: "Synchronized[float]") -> None:
        self.peers = peers
        self._delay_s = delay_s
        self._prefix = f"bl{os.getpid()}"
        self.switch = f"{self._prefix}-sw"

    def namespace(self, peer: int) -> str:
        """Name of a peer's network namespace."""
        return f"{self._prefix}-{peer}"

    def address(self, peer: int) -> str:
        """A peer's IPv4 address."""
        return f"10.77.0.{peer + 1}"

    def shape(self, *, mbit: float, rtt_ms: float) -> None:
        """Sets all links, while peers run: `mbit` up and down for each, `rtt_ms` between any two."""
        self._delay_s.value = rtt_ms / 2e3
        for peer in range(self.peers):
            bucket = f"root tbf rate {mbit}mbit burst {BURST_BYTES} limit {int(2e6 + mbit * 1e4)}"
            _sh(f"tc -n {self.namespace(peer)} qdisc replace dev eth0 {bucket}")
            _sh(f"tc -n {self.switch} qdisc replace dev p{peer} {bucket}")

    def sent_bytes(self) -> list[int]:
        """Bytes that each peer has put on its link so far, headers included."""
        told = subprocess.run(["ip", "-n", self.switch, "-j", "-s", "link"], capture_output=True, text=True, check=True)
        links = {link["ifname"]: link["stats64"]["rx"]["bytes"] for link in json.loads(told.stdout)}
        return [links[f"p{peer}"] for peer in range(self.peers)]

    def start(self, peer: int, work: "Callable[..., None]", *arguments: object) -> ForkProcess:
        """Forks a process that calls work(its own address, *arguments) in the namespace of `peer`."""
        process = FORK.Process(target=_inside, args=(self.namespace(peer), work, self.address(peer), *arguments))
        process.start()
        return process

    def measured(self, *, megabytes: float = 4) -> tuple[float, float]:
        """Mbit/s of a bulk transfer from peer 0 to peer 1, and milliseconds of a TCP handshake between them."""
        inbox, outbox = FORK.Pipe(duplex=False)
        receiver = self.start(1, _receive, outbox, int(megabytes * 1e6))
        assert inbox.poll(20), "the receiver did not listen"
        inbox.recv()
        sender = self.start(0, _send, self.address(1), int(megabytes * 1e6))
        assert inbox.poll(120), "the bulk transfer did not end"
        found = inbox.recv()
        sender.join(20)
        receiver.join(20)
        return found


@contextmanager
def shaped_links(peers: int) -> Iterator[Links]:
    """Makes the namespaces, and removes them with all that runs in them.

    Raises:
        PermissionError: not root.
        RuntimeError: `ip` or `tc` refused, with what they said.
    """
    if os.geteuid() != 0:
        raise PermissionError("network namespaces and tc need root: run with sudo, or in a container of your own")
    delay_s = FORK.Value("d", 0.0)
    links = Links(peers, delay_s)
    with ExitStack() as undo:
        for name in (links.switch, *map(links.namespace, range(peers))):
            _sh(f"ip netns add {name}")
            undo.callback(_remove, name)
            _sh(f"ip -n {name} link set lo up")
        for peer in range(peers):
            name = links.namespace(peer)
            _sh(f"ip -n {links.switch} link add p{peer} type veth peer name eth0 netns {name}")
            _sh(f"ip -n {name} link set eth0 address 02:00:00:00:00:{peer + 1:02x}")
            _sh(f"ip -n {name} addr add {links.address(peer)}/24 dev eth0")
            _sh(f"ip -n {name} link set eth0 up")
            _sh(f"ip -n {links.switch} link set p{peer} up")
            # The default of a machine may be another; in a namespace only a route can ask for it.
            _sh(f"ip -n {name} route replace 10.77.0.0/24 dev eth0 src {links.address(peer)} congctl cubic")
        switch = FORK.Process(target=_inside, args=(links.switch, _switch, peers, delay_s), daemon=True)
        switch.start()
        undo.callback(switch.join, 10)
        undo.callback(switch.kill)
        yield links


def _sh(command: str) -> None:
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{command!r} failed: {done.stderr.strip() or done.stdout.strip()}")


def _remove(namespace: str) -> None:
    """Kills what still runs in a namespace made here, and deletes it."""
    inside = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    for pid in inside.stdout.split():
        try:
            os.kill(int(pid), 9)
        except ProcessLookupError:
            pass
    _sh(f"ip netns del {namespace}")


def _inside(namespace: str, work: "Callable[..., None]", *arguments: object) -> None:
    with open(f"/run/netns/{namespace}", "rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns into {namespace} failed")
    work(*arguments)


def _switch(peers: int, delay_s: "Synchronized[float]") -> None:
    """Moves frames between the links, each `delay_s` after it came; the last byte of an address is the peer's number."""
    os.nice(-10)
    sockets = []
    for peer in range(peers):
        link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_ALL))
        link.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 20)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32 << 20)
        link.bind((f"p{peer}", ETH_ALL))
        link.setblocking(False)
        sockets.append(link)
    waiting: deque[tuple[float, int, bytes]] = deque()
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 1.0
        for link in select.select(sockets, [], [], timeout)[0]:
            _take(link, sockets.index(link), waiting, delay_s.value)
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, source, frame = waiting.popleft()
            _deliver(frame, source, sockets)


def _take(link: socket.socket, source: int, waiting: "deque[tuple[float, int, bytes]]", delay_s: float) -> None:
    for _ in range(64):
        try:
            frame, where = link.recvfrom(70_000)
        except BlockingIOError:
            return
        if where[2] != 4:  # 4 is PACKET_OUTGOING: what the switch itself sent
            waiting.append((time.monotonic() + delay_s, source, frame))


def _deliver(frame: bytes, source: int, sockets: "list[socket.socket]") -> None:
    """Sends a frame, its 10 bytes of virtio header in front, to whom it is for; a broadcast to all others."""
    to_all = frame[10] & 1
    for peer in range(len(sockets)) if to_all else (frame[15] - 1,):
        if peer != source and 0 <= peer < len(sockets):
            try:
                sockets[peer].send(frame)
            except OSError:  # a full queue drops, as a switch does
                pass


def _receive(address: str, report: Connection, size: int) -> None:
    with socket.create_server((address, 5001)) as server:
        report.send("listening")
        connection, _ = server.accept()
        handshake_ms = struct.unpack("d", connection.recv(8, socket.MSG_WAITALL))[0]
        left, began = size, 0.0
        while left:
            piece = len(connection.recv(1 << 20))
            assert piece, "the bulk transfer broke off"
            if not began and left < size * 0.75:  # slow start and the bucket's burst are over
                began, counted = time.monotonic(), left
            left -= piece
        report.send((8e-6 * counted / (time.monotonic() - began), handshake_ms))


def _send(_own: str, address: str, size: int) -> None:
    began = time.monotonic()
    with socket.create_connection((address, 5001)) as connection:
        connection.sendall(struct.pack("d", (time.monotonic() - began) * 1e3))
        connection.sendall(bytes(size))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
