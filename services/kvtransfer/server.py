"""BlockTransferService: what a holder answers to the workers that pull from it. Runs on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
from grpc import aio

from services.kvtransfer import codec
from services.kvtransfer.epochs import EpochBook
from services.kvtransfer.feed import OfferFeed, Progress
from services.kvtransfer.leases import LeaseTable
from services.kvtransfer.messages import LeasesChanged
from services.kvtransfer.transport import Endpoint
from services.wire.pb import block_transfer_pb2 as transfer_pb
from services.wire.pb import block_transfer_pb2_grpc as transfer_grpc
from services.wire.pb import common_pb2


class BlockTransferServicer(transfer_grpc.BlockTransferServiceServicer):
    """Compares layouts, tells progress, keeps leases. Never waits for the engine."""

    def __init__(
        self,
        me: Callable[[], Endpoint],
        leases: LeaseTable,
        feed: OfferFeed,
        epochs: EpochBook,
        post: Callable[[object], None],
        expect_contact: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._me = me
        self._leases = leases
        self._feed = feed
        self._epochs = epochs
        self._post = post
        self._expect_contact = expect_contact
        self._clock = clock

    async def Hello(  # noqa: N802
        self, request: transfer_pb.HelloRequest, context: aio.ServicerContext
    ) -> transfer_pb.HelloResponse:
        """Answers with this worker's endpoint; FAILED_PRECONDITION names the field in which the two differ."""
        try:
            caller = codec.endpoint_from_proto(request.caller)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if not self._epochs.admit(caller.peer.worker_id, caller.peer.epoch):
            await _refuse(context, f"epoch: {caller.peer.epoch} of {caller.peer.worker_id} is over")
        mine = self._me()
        if (why := mine.refuse(caller)) is not None:
            await _refuse(context, why)
        self._expect_contact()
        return transfer_pb.HelloResponse(callee=codec.endpoint_to_proto(mine))

    async def Follow(  # noqa: N802
        self, request_iterator: AsyncIterator[transfer_pb.FollowRequest], context: aio.ServicerContext
    ) -> AsyncIterator[transfer_pb.FollowResponse]:
        """Streams the progress of every handoff that the caller names, until it closes its side."""
        news: asyncio.Queue[Progress | str | None] = asyncio.Queue()
        followed: set[str] = set()
        reader = asyncio.create_task(self._read_follows(request_iterator, news, followed))
        try:
            while (progress := await news.get()) is not None:
                if isinstance(progress, str):
                    await _refuse(context, progress)
                else:
                    yield codec.progress_to_proto(progress, self._leases.lease_s)
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            for handoff_id in followed:
                self._feed.unfollow(handoff_id, news.put_nowait)

    async def RenewLeases(  # noqa: N802
        self, request: transfer_pb.RenewLeasesRequest, context: aio.ServicerContext
    ) -> transfer_pb.RenewLeasesResponse:
        """Renews on arrival; names those that are over."""
        await self._check(request.caller, context)
        over = self._leases.renew(request.handoff_ids, self._clock())
        return transfer_pb.RenewLeasesResponse(expired_handoff_ids=over)

    async def Release(  # noqa: N802
        self, request: transfer_pb.ReleaseRequest, context: aio.ServicerContext
    ) -> transfer_pb.ReleaseResponse:
        """Ends a lease and says whether it held; the engine takes the blocks back in its next tick."""
        await self._check(request.caller, context)
        if request.holder_epoch != self._me().peer.epoch:
            await _refuse(context, f"holder_epoch: {request.holder_epoch} is over")
        answer = self._leases.release(request.handoff_id, request.corrupt_indices, self._clock())
        self._post(LeasesChanged())
        return transfer_pb.ReleaseResponse(held=answer.held, since_complete_s=answer.since_complete_s)

    async def _read_follows(
        self,
        requests: AsyncIterator[transfer_pb.FollowRequest],
        news: asyncio.Queue[Progress | str | None],
        followed: set[str],
    ) -> None:
        async for request in requests:
            if self._epochs.is_over(request.caller.worker_id, request.caller.epoch):
                news.put_nowait(f"epoch: {request.caller.epoch} is over")
                return
            if request.stop:
                followed.discard(request.handoff_id)
                self._feed.unfollow(request.handoff_id, news.put_nowait)
            else:
                followed.add(request.handoff_id)
                self._feed.follow(request.handoff_id, news.put_nowait, request.wait_s)
        news.put_nowait(None)

    async def _check(self, caller: common_pb2.ProcessId, context: aio.ServicerContext) -> None:
        if self._epochs.is_over(caller.worker_id, caller.epoch):
            await _refuse(context, f"epoch: {caller.epoch} of {caller.worker_id} is over")


async def _refuse(context: aio.ServicerContext, why: str) -> None:
    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, why)
