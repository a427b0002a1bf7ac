"""DirectoryService: workers join by a stream that lasts as long as they do, and report the prefix blocks they hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
from grpc import aio

from services.kvtransfer import codec
from services.kvtransfer.directory import Change, Membership, PrefixMap
from services.kvtransfer.transport import PeerRef
from services.runtime import log
from services.wire.pb import common_pb2, directory_pb2, directory_pb2_grpc


class DirectoryServicer(directory_pb2_grpc.DirectoryServiceServicer):
    """Tells everyone who joins and who leaves; answers who holds the longest prefix."""

    def __init__(self) -> None:
        self.membership = Membership()
        self.prefixes = PrefixMap()
        self._log = log.get_logger()

    async def Join(  # noqa: N802
        self, request: directory_pb2.JoinRequest, context: aio.ServicerContext
    ) -> AsyncIterator[directory_pb2.JoinResponse]:
        """First the whole membership, then changes. The worker leaves when the stream ends, however that comes."""
        try:
            member = codec.member_from_proto(request.member)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        changes: asyncio.Queue[Change] = asyncio.Queue()
        self.membership.join(member, changes.put_nowait)
        self._log.info("joined", role=member.role, worker=member.peer.worker_id, address=member.peer.address)
        try:
            while True:
                change = await changes.get()
                if member.peer in change.left:
                    await context.abort(grpc.StatusCode.ABORTED, "a later life of this worker has joined")
                yield codec.change_to_proto(change)
        finally:
            self.membership.leave(member, changes.put_nowait)
            if not self.membership.has(member.peer):
                self.prefixes.forget(member.peer)
                self._log.info("left", role=member.role, worker=member.peer.worker_id)

    async def ReportBlocks(  # noqa: N802
        self, request: directory_pb2.ReportBlocksRequest, context: aio.ServicerContext
    ) -> directory_pb2.ReportBlocksResponse:
        """Takes changes of a member's prefix blocks in, in order."""
        peer = _peer(request.worker)
        if not self.membership.has(peer):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{peer.worker_id} has not joined")
        taken = self.prefixes.report(peer, request.sequence_number, request.full, request.added, request.removed)
        return directory_pb2.ReportBlocksResponse(full_wanted=not taken)

    async def FindPrefix(  # noqa: N802
        self, request: directory_pb2.FindPrefixRequest, context: aio.ServicerContext
    ) -> directory_pb2.FindPrefixResponse:
        """The longest run of the chain that each worker holds, the longest first."""
        found = self.prefixes.find(request.chain)
        return directory_pb2.FindPrefixResponse(
            holders=[
                directory_pb2.PrefixHolder(worker=codec.process_id(peer), num_blocks=num_blocks)
                for peer, num_blocks in found
            ]
        )

    async def view(self) -> object:
        """The members, for /debug/members."""
        return [
            {
                "role": member.role,
                "worker_id": member.peer.worker_id,
                "epoch": member.peer.epoch,
                "address": member.peer.address,
                "transport": member.endpoint.transport,
                "num_blocks": member.endpoint.num_blocks,
            }
            for member in self.membership.all()
        ]


def _peer(process: common_pb2.ProcessId) -> PeerRef:
    return PeerRef(process.worker_id, process.epoch)
