"""Records of a torchft run, from the store that `bareloop swarm serve` keeps at the lighthouse's port + 1.

One list of keys and one get a peer per reading, under 1 ms each. The store speaks bytes: nothing is unpickled.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import DistError, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from bareloop.swarm.addresses import lighthouse
from bareloop.swarm.watch import PublishedRecord, Reading, Unreachable, parse_record, require_listener

__all__ = ["torchft_source"]

_PATIENCE = timedelta(seconds=10)
_MOST_PEERS = 10_000


class _Store:
    """A client of the store."""

    def __init__(self, run_id: str, store: TCPStore) -> None:
        self._run_id = run_id
        self._store = store

    def read(self) -> Reading:
        """What is there now.

        Raises:
            Unreachable: the store is gone.
        """
        try:
            # A record is at "RUN/PEER"; "RUN/peers" names the peers that ever were, which the keys tell as well.
            keys = [key for key in self._store.list_keys() if "/" in key and not key.endswith("/peers")][:_MOST_PEERS]
            mine = [key for key in keys if key.rpartition("/")[0] == self._run_id]
            found = {key: parse_record(self._store.get(key)) for key in mine}
        except (DistError, RuntimeError) as error:
            raise Unreachable("the store beside the lighthouse does not answer any more") from error
        records: dict[str, PublishedRecord] = {key: record for key, record in found.items() if record is not None}
        runs = tuple(sorted({key.rpartition("/")[0] for key in keys}))
        return Reading(records=records, unreadable=len(found) - len(records), runs=runs)


@contextmanager
def torchft_source(run_id: str, peers: Sequence[str]) -> Iterator[_Store]:
    """The records of `run_id` beside the lighthouse at the one address in `peers`.

    Raises:
        Unreachable: no lighthouse there, or one without a store.
    """
    host, port = lighthouse(peers)
    require_listener(host, port, "no lighthouse answers")
    without = (
        "a lighthouse answers, but there is no store for records beside it (`bareloop swarm serve --engine torchft`"
    )
    require_listener(host, port + 1, f"{without} runs both)")
    try:
        store = TCPStore(host, port + 1, is_master=False, timeout=_PATIENCE)
    except DistError as error:
        raise Unreachable(f"what listens at {host}:{port + 1} is no store for records") from error
    yield _Store(run_id, store)
