"""hivemind 1.1.12: an authorizer guards the DHT's calls and none of the averagers'.

    python hivemind_authorizer_scope.py

A peer has an authorizer that lets nobody in. A stranger without a token is refused by its DHT, and downloads the
parameters from its averager: `DecentralizedAverager` adds its handlers without the authorizer. The same holds for joining a
group and for sending data into an all-reduce.
"""

import asyncio
import logging

import hivemind
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.dht.protocol import DHTProtocol
from hivemind.p2p import P2P, PeerID
from hivemind.proto import averaging_pb2, dht_pb2
from hivemind.utils.auth import AuthorizerBase


class NobodyEnters(AuthorizerBase):
    async def sign_request(self, request: object, service_public_key: object) -> None: ...

    async def validate_request(self, request: object) -> bool:
        return False

    async def sign_response(self, response: object, request: object) -> None: ...

    async def validate_response(self, response: object, request: object) -> bool:
        return True


async def stranger(addresses: list[str], guarded: PeerID) -> tuple[str, int]:
    p2p = await P2P.create(initial_peers=addresses, nat_port_map=False)
    try:
        answer = await DHTProtocol.get_stub(p2p, guarded).rpc_ping(dht_pb2.PingRequest())
        dht = "answered" if answer.ListFields() else "refused (an empty answer)"
    except Exception as error:
        dht = f"refused ({type(error).__name__})"
    stream = await DecentralizedAverager.get_stub(p2p, guarded, namespace="guarded").rpc_download_state(
        averaging_pb2.DownloadRequest()
    )
    tensors = [message async for message in stream]
    await p2p.shutdown()
    return dht, len(tensors)


def main() -> None:
    logging.getLogger("hivemind").setLevel(logging.CRITICAL)
    dht = hivemind.DHT(start=True, nat_port_map=False, authorizer=NobodyEnters())
    averager = DecentralizedAverager([torch.ones(4), torch.ones(4)], dht, prefix="guarded", start=True)
    answer, tensors = asyncio.run(stranger([str(a) for a in dht.get_visible_maddrs()], dht.peer_id))
    averager.shutdown()
    dht.shutdown()
    print(f"a stranger's call of the DHT was {answer}; of the averager's state it got {tensors} of 2 tensors")
    print("fault: present" if tensors else "fault: gone")


if __name__ == "__main__":
    main()
