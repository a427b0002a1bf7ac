"""The calls a puller makes to one life of one holder, in this room's own words. On the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass

import grpc
from grpc import aio

from services.kvtransfer import codec
from services.kvtransfer.feed import Progress
from services.kvtransfer.leases import NOT_HELD, ReleaseAnswer
from services.kvtransfer.transport import Endpoint, PeerRef
from services.wire import rpc
from services.wire.pb import block_transfer_pb2 as transfer_pb
from services.wire.pb import block_transfer_pb2_grpc as transfer_grpc

RETRY_S = 0.05


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Deadlines of the conversation with a holder, in seconds."""

    hello_s: float = 5.0
    renew_s: float = 1.0  # at most a third of the holder's leases
    silence_s: float = 5.0  # without an answered renewal, as long as a lease
    refollow_s: float = 1.0
    release_s: float = 3.0
    call_s: float = 1.0  # one attempt at a renewal or a release
    unknown_s: float = 10.0  # how long a handoff may be unknown to its holder


class LinkError(Exception):
    """A call failed; the text says why. `refused`: the holder will never answer otherwise."""

    def __init__(self, reason: str, *, refused: bool = False) -> None:
        super().__init__(reason)
        self.refused = refused


@dataclass(frozen=True, slots=True)
class FollowWish:
    """One word on the Follow stream: tell of a handoff, or no longer."""

    handoff_id: str
    stop: bool = False


class HolderStub:
    """One channel to one holder. Every call raises LinkError, but `release`, which is answered in any case."""

    def __init__(self, peer: PeerRef, me: Callable[[], Endpoint], limits: LinkLimits) -> None:
        self._peer = peer
        self._me = me
        self._limits = limits
        self._channel = rpc.channel(peer.address)
        self._stub = transfer_grpc.BlockTransferServiceStub(self._channel)

    async def hello(self) -> Endpoint:
        """The holder's endpoint, after both sides have compared layouts."""
        mine = self._me()
        request = transfer_pb.HelloRequest(caller=codec.endpoint_to_proto(mine))
        try:
            response = await self._stub.Hello(request, timeout=self._limits.hello_s)
            theirs = codec.endpoint_from_proto(response.callee)
        except aio.AioRpcError as error:
            raise _link_error(error) from error
        except ValueError as error:
            raise LinkError(str(error), refused=True) from error
        if (theirs.peer.worker_id, theirs.peer.epoch) != (self._peer.worker_id, self._peer.epoch):
            raise LinkError(f"epoch: {self._peer.epoch} of {self._peer.worker_id} is over", refused=True)
        if (why := mine.refuse(theirs)) is not None:
            raise LinkError(why, refused=True)
        return theirs

    async def follow(self, wishes: asyncio.Queue[FollowWish]) -> AsyncIterator[tuple[Progress, float]]:
        """One Follow stream: news of every handoff wished for, with the length of the holder's leases in seconds.

        Ends where the holder ends it.
        """

        async def requests() -> AsyncIterator[transfer_pb.FollowRequest]:
            caller = codec.process_id(self._me().peer)
            while True:
                wish = await wishes.get()
                yield transfer_pb.FollowRequest(
                    caller=caller, handoff_id=wish.handoff_id, stop=wish.stop, wait_s=self._limits.unknown_s
                )

        try:
            async for message in self._stub.Follow(requests()):
                yield codec.progress_from_proto(message), message.lease_s
        except aio.AioRpcError as error:
            raise _link_error(error) from error

    async def renew(self, handoff_ids: Iterable[str]) -> list[str]:
        """Renews leases; returns those that are over."""
        request = transfer_pb.RenewLeasesRequest(caller=codec.process_id(self._me().peer), handoff_ids=handoff_ids)
        try:
            response = await self._stub.RenewLeases(request, timeout=self._limits.call_s)
        except aio.AioRpcError as error:
            raise _link_error(error) from error
        return list(response.expired_handoff_ids)

    async def release(self, handoff_id: str, corrupt_indices: Iterable[int] = ()) -> ReleaseAnswer:
        """Whether the lease held, asked again while no answer comes; not held where none comes in time."""
        request = transfer_pb.ReleaseRequest(
            caller=codec.process_id(self._me().peer),
            handoff_id=handoff_id,
            holder_epoch=self._peer.epoch,
            corrupt_indices=corrupt_indices,
        )
        now = asyncio.get_running_loop().time
        deadline_s = now() + self._limits.release_s
        while now() < deadline_s:
            try:
                response = await self._stub.Release(request, timeout=self._limits.call_s)
                since_s = response.since_complete_s if response.HasField("since_complete_s") else None
                return ReleaseAnswer(response.held, since_s)
            except aio.AioRpcError as error:
                if _link_error(error).refused:
                    return NOT_HELD
                await asyncio.sleep(RETRY_S)
        return NOT_HELD

    async def close(self) -> None:
        """Ends the channel and every call on it."""
        await self._channel.close()


def _link_error(error: aio.AioRpcError) -> LinkError:
    refused = error.code() is grpc.StatusCode.FAILED_PRECONDITION
    return LinkError(f"{error.code().name.lower()}: {error.details()}", refused=refused)
