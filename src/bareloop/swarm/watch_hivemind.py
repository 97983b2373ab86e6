"""Records of a hivemind run, from its DHT, which is joined as a client: nothing is stored here for others.

Peers of `swarm.join` publish under "RUN.bareloop". A plain hivemind.Optimizer publishes its progress under
"RUN_progress", with a signature that is checked here as its peers check it; that knows neither target nor failures.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hivemind import DHT
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.p2p import PeerID
from hivemind.utils import ValueWithExpiration
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.multiaddr import Multiaddr

from bareloop.swarm.watch import PublishedRecord, Reading, Unreachable, is_number, parse_record, require_listener

__all__ = ["AsideDHT", "Records", "hivemind_source", "progress_record"]

_PATIENCE_S = 10.0


class AsideDHT(DHT):
    """A DHT whose processes do not hear Ctrl-C in the terminal: who started it ends them, in order and without noise."""

    def run(self) -> None:
        """Serves until it is shut down."""
        os.setpgid(0, 0)
        super().run()


class Records:
    """A client of the DHT."""

    def __init__(self, run_id: str, dht: DHT) -> None:
        self._run_id = run_id
        self._dht = dht

    def read(self) -> Reading:
        """What is there now.

        Raises:
            Unreachable: the DHT does not answer.
        """
        texts = self._get(f"{self._run_id}.bareloop")
        if texts:
            parsed = {str(key): _parsed(value) for key, value in texts.items()}
        else:
            progress = self._get(f"{self._run_id}_progress")
            parsed = {str(key): progress_record(value) for key, value in progress.items() if value is not None}
        records = {key: record for key, record in parsed.items() if record is not None}
        return Reading(
            records=records,
            plain=not texts and bool(parsed),
            unreadable=len(parsed) - len(records),
            nodes=self._nodes(),
        )

    def _nodes(self) -> int:
        answer: Any = self._dht.run_coroutine(_known, return_future=True)
        return answer.result(_PATIENCE_S)

    def _get(self, key: str) -> Mapping[Any, Any]:
        """Subkey to value; empty where the key is not there, or has no subkeys."""
        try:
            answer: Any = self._dht.get(key, latest=True, return_future=True)
            found = answer.result(_PATIENCE_S)
        except TimeoutError as error:
            raise Unreachable(f"the DHT did not answer in {_PATIENCE_S:g} s") from error
        except Exception as error:  # what a stranger stored can make hivemind's own reading fail, in any way
            raise Unreachable(
                f"what is stored under {key!r} can't be read by hivemind: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(found, ValueWithExpiration) or not isinstance(found.value, Mapping):
            return {}
        return {subkey: one.value for subkey, one in found.value.items()}


def progress_record(value: Any) -> PublishedRecord | None:
    """What hivemind's ProgressTracker stores for a peer, as a record; None when it is not that."""
    names = {
        "round": "epoch",
        "local_samples": "samples_accumulated",
        "samples_per_s": "samples_per_second",
        "time": "time",
    }
    if not isinstance(value, Mapping) or not isinstance(value.get("peer_id"), bytes):
        return None
    if not all(is_number(value.get(name)) for name in names.values()):
        return None
    unknown = ("samples", "target", "peers", "round_s", "average_s", "failures", "lost_samples")
    return PublishedRecord(
        peer=PeerID(value["peer_id"]).to_base58()[-12:],
        **{ours: value[theirs] for ours, theirs in names.items()},
        **dict.fromkeys(unknown, None),
    )


@contextmanager
def hivemind_source(run_id: str, peers: Sequence[str]) -> Iterator[Records]:
    """The records of `run_id` in the DHT that `peers` are a part of.

    Raises:
        Unreachable: none of them answers.
    """
    use_hivemind_log_handler("nowhere")
    _require_one(peers)
    try:
        dht = AsideDHT(
            initial_peers=list(peers),
            start=True,
            client_mode=True,
            use_relay=False,
            auto_nat=False,
            nat_port_map=False,
            startup_timeout=_PATIENCE_S,
            record_validators=[RSASignatureValidator()],
        )
    except Exception as error:  # hivemind hands on what its child raised, of any kind
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise Unreachable(f"no peer of a DHT answers at {', '.join(peers)}: {said[:300]}") from error
    try:
        yield Records(run_id, dht)
    finally:
        dht.shutdown()


def _require_one(peers: Sequence[str]) -> None:
    """Finds out within seconds that nothing listens, which takes libp2p half a minute."""
    failed: Unreachable | None = None
    for peer in peers:
        parts = dict(part.split("/") for part in _pairs(peer))
        if "tcp" not in parts:
            return
        host = next((parts[kind] for kind in ("ip4", "ip6", "dns", "dns4", "dns6") if kind in parts), None)
        if host is None:
            return
        try:
            require_listener(host, int(parts["tcp"]), "no peer of a DHT answers")
            return
        except Unreachable as error:
            failed = error
    if failed is not None:
        raise failed


def _pairs(address: str) -> list[str]:
    try:
        words = str(Multiaddr(address)).strip("/").split("/")
    except ValueError as error:
        raise Unreachable(f"{address!r} is no address: hivemind's look like /ip4/HOST/tcp/PORT/p2p/ID") from error
    return [f"{name}/{value}" for name, value in zip(words[::2], words[1::2], strict=False)]


async def _known(dht: DHT, node: Any) -> int:
    return len(node.protocol.routing_table.uid_to_peer_id)


def _parsed(value: Any) -> PublishedRecord | None:
    return parse_record(value) if isinstance(value, str | bytes) else None
