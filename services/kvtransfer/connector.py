"""Everything of this room that a worker holds: offers, fetches, the gRPC service, the transfer thread.

How a worker wires it, on its event loop:

1. `transport = make_transport(name, worker_id, epoch)`, then `pool = transport.allocate(layout, num_blocks, device)`;
2. `connector = Connector(transport, pool, layout, post=inbox.post)`, `connector.add_to(rpc_server.server)`;
3. the gRPC server starts, so that the address is known; `connector.start(address)`;
4. the engine thread uses `connector.offers` and `connector.fetches` and handles what they post to its inbox;
5. `await connector.close()`, after the engine has stopped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from grpc import aio

from services.kvtransfer import faults
from services.kvtransfer.checksum import BlockMemory
from services.kvtransfer.epochs import EpochBook
from services.kvtransfer.feed import OfferFeed
from services.kvtransfer.fetches import Fetches
from services.kvtransfer.holder_stub import LinkLimits
from services.kvtransfer.layout import KVLayout
from services.kvtransfer.leases import LEASE_S, LeaseTable
from services.kvtransfer.messages import ConnectorFailed
from services.kvtransfer.offers import Offers
from services.kvtransfer.pull_book import PullLimits
from services.kvtransfer.pulls import Pulls
from services.kvtransfer.serve_beat import ServeBeat
from services.kvtransfer.server import BlockTransferServicer
from services.kvtransfer.transfer_thread import TransferThread
from services.kvtransfer.transport import Endpoint, PeerRef, Transport
from services.wire.pb import block_transfer_pb2_grpc as transfer_grpc

if TYPE_CHECKING:
    import torch

TRANSPORTS = ("nixl", "shm")


def make_transport(name: str, worker_id: str, epoch: str) -> Transport:
    """The transport of that name. Raises ValueError for an unknown one, TransportError where it cannot work here."""
    if name == "nixl":
        from services.kvtransfer.nixl_transport import NixlTransport

        return NixlTransport(worker_id, epoch)
    if name == "shm":
        from services.kvtransfer.shm_transport import ShmTransport

        return ShmTransport(worker_id, epoch)
    raise ValueError(f"no such transport: {name}; there are {', '.join(TRANSPORTS)}")


@dataclass(frozen=True, slots=True)
class ConnectorLimits:
    """Every bound of the transfer of blocks."""

    lease_s: float = LEASE_S
    pulls: PullLimits = field(default_factory=PullLimits)
    link: LinkLimits = field(default_factory=LinkLimits)


class Connector:
    """One worker's part in moving blocks. Made on its event loop."""

    def __init__(
        self,
        transport: Transport,
        pool: torch.Tensor,
        layout: KVLayout,
        post: Callable[[object], None],
        limits: ConnectorLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`post` takes messages to the engine from any thread; `offers.tick` must be given times of `clock`."""
        limits = limits or ConnectorLimits()
        loop = asyncio.get_running_loop()
        self._transport = transport
        self._endpoint: Endpoint | None = None
        memory, epochs, feed = BlockMemory(pool, layout.block_bytes, layout.checksum), EpochBook(), OfferFeed()
        leases = LeaseTable(limits.lease_s)
        self._pulls = Pulls(transport, memory, post, limits.pulls, faults.from_environment(), self._want_contact)
        self._beat = ServeBeat(transport.serve, lambda: leases.num_open > 0)
        self._thread = TransferThread(self._poll, lambda reason: post(ConnectorFailed(reason)))
        self.offers = Offers(leases, feed, self._thread, memory, layout.block_size, loop, clock)
        self.fetches = Fetches(self._pulls, self._thread, epochs, self._me, post, limits.link, loop)
        self._servicer = BlockTransferServicer(self._me, leases, feed, epochs, post, self._expect_contact, clock)

    def add_to(self, server: aio.Server) -> None:
        """Serves BlockTransferService there; call before the server starts."""
        transfer_grpc.add_BlockTransferServiceServicer_to_server(self._servicer, server)

    def start(self, address: str) -> Endpoint:
        """Begins to move blocks; `address` is this worker's gRPC server as others reach it."""
        self._endpoint = self._transport.endpoint(address)
        self._thread.start()
        return self._endpoint

    @property
    def endpoint(self) -> Endpoint:
        """What the directory and peers are told of this worker; after `start`."""
        return self._me()

    def active_path(self) -> str:
        """What really carries blocks: cma, tcp, shm, rdma, cuda_ipc ..., or "none yet"."""
        return self._transport.active()

    async def close(self) -> None:
        """Hangs up, ends the transfer thread, closes the transport. The engine must have stopped."""
        await self.fetches.close()
        await asyncio.to_thread(self._thread.stop)
        self._transport.close()

    def _poll(self) -> float | None:
        """The turn of the transfer thread between jobs."""
        delays = (self._pulls.poll(), self._beat.poll())
        return min((delay for delay in delays if delay is not None), default=None)

    def _expect_contact(self) -> None:
        self._beat.expect()
        self._thread.wake()

    def _me(self) -> Endpoint:
        if self._endpoint is None:
            raise RuntimeError("the connector was not started")
        return self._endpoint

    def _want_contact(self, peer: PeerRef) -> None:
        self.fetches.want_contact(peer)
