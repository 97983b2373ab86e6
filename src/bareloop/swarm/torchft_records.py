"""A peer's records on their way to `bareloop swarm watch`: a thread that sends the last one, so that nobody waits.

They are kept in a TCPStore which `bareloop swarm serve --engine torchft` runs at the lighthouse's port + 1: under
"RUN/PEER" the JSON object, under "RUN/peers" the names of all peers that ever were, one a line. Where nothing answers at
that port the run is not watched, and works.
"""

import json
import logging
import socket
import threading
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

__all__ = ["Publisher", "peers_key", "record_key", "records_address"]

_CONNECT_S = 2.0

_log = logging.getLogger(__name__)


def records_address(lighthouse_host: str, lighthouse_port: int) -> tuple[str, int]:
    """Host and port of the store of a lighthouse's run."""
    return lighthouse_host, lighthouse_port + 1


def record_key(run_id: str, peer: str) -> str:
    """Where the record of `peer` is."""
    return f"{run_id}/{peer}"


def peers_key(run_id: str) -> str:
    """Where the names of the peers are, one a line; some may be there twice."""
    return f"{run_id}/peers"


class Publisher:
    """Sends records until it is closed, or until the store does not answer any more.

    Args:
        address: host and port of the store.
        run_id: of all records.
    """

    def __init__(self, address: tuple[str, int], run_id: str) -> None:
        self._address = address
        self._run_id = run_id
        self._next: str | None = None
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="bareloop-records", daemon=True)
        self._thread.start()

    def publish(self, record: str) -> None:
        """Sends `record`, a JSON object with a "peer", soon; one that has not been sent by then is dropped."""
        self._next = record
        self._wake.set()

    def close(self) -> None:
        """Sends what is left and ends the thread."""
        self._closed = True
        self._wake.set()
        self._thread.join(2 * _CONNECT_S)

    def _run(self) -> None:
        try:
            socket.create_connection(self._address, _CONNECT_S).close()  # a TCPStore would log where nobody listens
            store: Any = TCPStore(*self._address, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_S))
            named = False
            while not self._closed:
                self._wake.wait()
                self._wake.clear()
                record, self._next = self._next, None
                if record is None:
                    continue
                peer = str(json.loads(record)["peer"])
                store.set(record_key(self._run_id, peer), record)
                if not named:
                    store.append(peers_key(self._run_id), f"{peer}\n")
                    named = True
        except (OSError, RuntimeError) as error:
            _log.info("run %r is not watched: %s", self._run_id, error)
