"""Addresses of peers and lighthouses."""

import pytest

from bareloop.swarm.addresses import checked, host_and_port, lighthouse


@pytest.mark.parametrize("address", ["127.0.0.1:29510", "[::1]:29510", "node-7.cluster:1", "localhost:65534"])
def test_a_lighthouse_is_taken_apart_and_put_together(address: str) -> None:
    host, port = lighthouse([address])
    assert "[" not in host
    assert host_and_port(host, port) == address


@pytest.mark.parametrize(
    ("engine", "peers", "named"),
    [
        ("torchft", ["127.0.0.1"], "peers has '127.0.0.1'"),
        ("torchft", ["127.0.0.1:0"], "127.0.0.1:29510"),
        ("torchft", ["127.0.0.1:65535"], "127.0.0.1:29510"),
        ("torchft", ["::1:29510"], "peers has '::1:29510'"),
        ("torchft", [7], "peers has 7"),
        ("torchft", [], "peers has 0 addresses"),
        ("torchft", "127.0.0.1:29510", "must be a list"),
        ("hivemind", ["127.0.0.1:29510"], "swarm serve --engine hivemind"),
        ("hivemind", ["/ip4/127.0.0.1/tcp/31337"], "p2p/12D3Koo"),
        ("hivemind", 7, "must be a list"),
    ],
    ids=str,
)
def test_what_is_no_address_is_refused_with_the_way_out(engine: str, peers: object, named: str) -> None:
    with pytest.raises(ValueError) as refusal:
        checked(engine, peers)
    assert named in str(refusal.value)


def test_each_engine_takes_its_own() -> None:
    multiaddress = "/ip4/10.0.0.7/tcp/31337/p2p/12D3KooWExample"
    assert checked("hivemind", (multiaddress,)) == [multiaddress]
    assert checked("hivemind", []) == []
    assert checked("torchft", ["10.0.0.7:29510"]) == ["10.0.0.7:29510"]
