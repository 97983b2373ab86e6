"""One peer's place among torchft's peers: its servers, its process group, and what they do when somebody dies.

torchft's Manager opens its server on all interfaces of the machine, where anyone may ask it to end the process, and starts
an HTTP server for states that it reads with pickle. Here the server is our own, on one address, and given to the Manager
as that of another rank; states go through the process group instead, which gloo opens on the same address. A collective
that fails closes the group at once, so that a peer that still waits in it learns of it in 10 ms and not at a timeout.
"""

import logging
import os
import socket
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

_SILENT_BEFORE = "RUST_LOG" in os.environ
os.environ.setdefault("RUST_LOG", "warn")  # read when torchft is imported: else 8 lines to stderr for each quorum
from torchft.checkpointing.transport import CheckpointTransport  # noqa: E402
from torchft.coordination import ManagerServer  # noqa: E402
from torchft.manager import MANAGER_ADDR_KEY, REPLICA_ID_KEY, Manager  # noqa: E402
from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL  # noqa: E402

if not _SILENT_BEFORE:
    del os.environ["RUST_LOG"]

from bareloop.swarm.addresses import listening  # noqa: E402

__all__ = ["Membership", "bound_store"]

_RANK = 1
"""The Manager's rank in its group of one: rank 0 would start the server that listens on all interfaces."""

_CHUNK_BYTES = 1 << 20
"""A part of a state that must come within the silence: 8 Mbit/s do at 1 s, as for the 1 MB segments of gloo's all-reduce."""


def bound_store(host: str, port: int = 0) -> TCPStore:
    """A TCPStore that serves on `host` alone; torch's own would listen on all interfaces.

    Raises:
        OSError: `host` is not an address of this machine, or the port is taken.
    """
    opened = listening(host, port)
    port = opened.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=10),
        master_listen_fd=opened.detach(),
    )


class Membership:
    """What a peer needs to take part in quorums and in the collectives of their members.

    Args:
        lighthouse: its address, as HOST:PORT.
        host: address of this machine that the others reach it at; all that this opens listens there.
        device: of the gradients: gloo for the CPU, NCCL for CUDA.
        silence_s: a collective fails when nothing arrives for so long.
        connect_s: a connection to the lighthouse fails after so long.

    Raises:
        RuntimeError: the lighthouse does not answer.
    """

    def __init__(self, lighthouse: str, host: str, device: torch.device, *, silence_s: float, connect_s: float) -> None:
        silence, connect = timedelta(seconds=silence_s), timedelta(seconds=connect_s)
        self._silence = silence
        self.device = device
        self._store = bound_store(host)
        name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        bracketed = f"[{host}]" if ":" in host else host
        self._server: Any = ManagerServer(
            replica_id=name,
            lighthouse_addr=f"http://{lighthouse}",
            hostname=bracketed,
            bind=f"{bracketed}:0",
            store_addr=f"{bracketed}:{self._store.port}",
            world_size=1,
            heartbeat_interval=timedelta(milliseconds=100),
            connect_timeout=connect,
            quorum_retries=0,
        )
        self._store.set(MANAGER_ADDR_KEY, self._server.address())
        self._store.set(REPLICA_ID_KEY, name)
        self._group: Any = _BoundGloo(host, silence) if device.type == "cpu" else ProcessGroupNCCL(timeout=silence)
        self._manager: Any = Manager(
            pg=self._group,
            load_state_dict=None,
            state_dict=None,
            min_replica_size=1,
            use_async_quorum=False,
            timeout=silence,
            connect_timeout=connect,
            rank=_RANK,
            world_size=1,
            store_addr=host,
            store_port=self._store.port,
            lighthouse_addr=lighthouse,
            hostname=host,
            checkpoint_transport=_NoTransport(),
            init_sync=False,
        )
        logging.getLogger("torchft.manager").addFilter(_is_news)

    @property
    def step(self) -> int:
        """Commits that this peer's state holds, as the lighthouse is told."""
        return self._manager.current_step()

    @step.setter
    def step(self, value: int) -> None:
        self._manager.load_state_dict({"step": value, "batches_committed": 0})

    def quorum(self, seconds: float) -> tuple[int, int]:
        """Waits until all healthy peers ask for a quorum, `seconds` at most; this peer's rank in it, and its size.

        Raises:
            TimeoutError, RuntimeError: there was none in time, or its members did not reach each other.
        """
        try:
            self._manager.start_quorum(allow_heal=False, timeout=timedelta(seconds=seconds))
        except BaseException:
            # torchft asks the last quorum for its result before it begins the next one: one failure would be the last word.
            self._manager._quorum_future = None
            raise
        broken = self._manager.errored()
        if broken is not None:
            raise RuntimeError(f"the peers of the quorum did not reach each other: {broken.original_exception}")
        return self._group.parent.rank(), self._group.size()

    def sum(self, tensor: Tensor) -> None:
        """Adds up `tensor` over the members, in place.

        Raises:
            RuntimeError: somebody died, or was silent for too long; `tensor` then holds anything.
        """
        options: Any = dist.AllreduceOptions()
        options.reduceOp, options.timeout = dist.ReduceOp.SUM, self._silence
        self._group.allreduce([tensor], options).wait()

    def send(self, text: str, tensors: Sequence[Tensor], ranks: Sequence[int]) -> None:
        """Sends a text and byte tensors to each of `ranks`.

        Raises:
            RuntimeError: somebody died, or was silent for too long.
        """
        head = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        sizes = torch.tensor([head.numel(), *(t.numel() for t in tensors)])
        for rank in ranks:
            for part in (torch.tensor([sizes.numel()]), sizes, head, *tensors):
                for chunk in part.split(_CHUNK_BYTES):
                    self._group.send([chunk.to(self.device)], rank, tag=1).wait(self._silence)

    def receive(self, rank: int, *, first_s: float) -> tuple[str, list[Tensor]]:
        """What `rank` sends, for which it may take `first_s` seconds to begin.

        Raises:
            RuntimeError: somebody died, or was silent for too long.
        """

        def part(size: int, dtype: torch.dtype, wait: timedelta) -> Tensor:
            whole = torch.empty(size, dtype=dtype)
            for chunk in whole.split(_CHUNK_BYTES):
                landed = torch.empty_like(chunk, device=self.device)
                self._group.recv([landed], rank, tag=1).wait(wait)
                chunk.copy_(landed)
            return whole

        count = int(part(1, torch.int64, timedelta(seconds=first_s)).item())
        sizes = part(count, torch.int64, self._silence).tolist()
        head, *tensors = (part(size, torch.uint8, self._silence) for size in sizes)
        return head.numpy().tobytes().decode(), tensors

    def commit(self) -> bool:
        """Whether all went well since the quorum; then the step is counted."""
        return self._manager.should_commit()

    def give_up(self, error: BaseException) -> None:
        """After an error: closes the group, so that the others need not wait for this peer, and asks for another one."""
        self._manager.report_error(error if isinstance(error, Exception) else RuntimeError(repr(error)))
        self._group.abort()
        # A commit that is refused makes the lighthouse change the quorum's number, on which all build a new group.
        self._manager.should_commit()

    def close(self) -> None:
        """Ends servers, threads and connections; the lighthouse notices by the missing heartbeats."""
        self._group.abort()
        self._server.shutdown()
        self._server = None  # ends its threads, and with them a quorum that is being waited for
        self._manager.shutdown()
        vars(self._manager).clear()  # a cycle with its logger would keep its client's threads
        self._store = None


class _BoundGloo(ProcessGroupGloo):
    """Gloo on one address. torchft's own listens where the machine's name leads, or GLOO_SOCKET_IFNAME."""

    def __init__(self, host: str, timeout: timedelta) -> None:
        super().__init__(timeout)
        self._host = host

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        backend: Any = dist.ProcessGroupGloo
        options = backend._Options()
        options._devices = [backend.create_device(hostname=self._host)]
        options._timeout = self._timeout
        gloo = backend(store, rank, world_size, options)
        gloo._set_sequence_number_for_group()
        group = dist.ProcessGroup(store, rank, world_size)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        return group


class _NoTransport(CheckpointTransport[Any]):
    """In the place of torchft's HTTP server, which nothing here asks for a state."""

    def metadata(self) -> str:
        return ""

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        raise AssertionError("quorums are asked for with allow_heal=False")

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        raise AssertionError("quorums are asked for with allow_heal=False")


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line of the Manager's log says something: without NCCL one complains at each quorum that there is none."""
    return "NCCL flight recorder" not in record.getMessage()
