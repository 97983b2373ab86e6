"""Garbage for the ports of a run: what a scanner, a wrong client or a broken peer sends."""

import os
import random
import socket
import struct
from collections.abc import Iterable

import psutil

__all__ = ["GARBAGE", "attack", "listening"]

GARBAGE: dict[str, bytes] = {
    "random bytes": random.Random(0).randbytes(4096),
    "a truncated protobuf": b"\x00\x00\x00\x00\x40\x0a\x7f\x12\x05peer",
    "HTTP": b"GET /checkpoint/metadata/full HTTP/1.1\r\nHost: x\r\n\r\n",
    "HTTP, a huge body announced": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999\r\n\r\n{",
    "a huge length, big endian": struct.pack(">Q", 2**62) + b"x" * 64,
    "a huge length, little endian": struct.pack("<Q", 2**62) + b"x" * 64,
    "a huge varint": b"\xff" * 9 + b"\x01" + b"/multistream/1.0.0\n",
    "multistream, then garbage": b"\x13/multistream/1.0.0\n" + b"\xff" * 512,
    "HTTP/2 preface, then garbage": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 512,
    "store: a query of an unknown kind": b"\xee" * 16,
    "store: an announced key of 2**60 bytes": b"\x01" + struct.pack("<Q", 2**60) + b"k",
    "nothing": b"",
}
"""Name and bytes; after them the connection is closed in half the cases and reset in the others."""


def listening(groups: Iterable[int]) -> list[tuple[str, int]]:
    """(host, port) of each TCP socket that processes of these process groups listen on."""
    wanted, found = set(groups), set()
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) in wanted:
                found |= {c.laddr for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue
    return sorted(
        {("127.0.0.1" if address.ip in ("0.0.0.0", "::", "::1") else address.ip, address.port) for address in found}
    )


def attack(ports: Iterable[tuple[str, int]]) -> int:
    """Sends all garbage to all ports; returns how many connections were taken."""
    taken = 0
    for number, (address, message) in enumerate((port, m) for port in ports for m in GARBAGE.values()):
        try:
            with socket.create_connection(address, timeout=2) as connection:
                taken += 1
                connection.sendall(message)
                connection.settimeout(0.02)
                try:
                    connection.recv(65536)
                except TimeoutError:
                    pass
                if number % 2:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except OSError:
            continue  # refused, or reset by who was attacked
    return taken
