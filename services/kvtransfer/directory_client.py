"""A worker's tie to the directory: it joins, hears of others, warms up the path to them, and reports its blocks.

The life of the tie:

1. `run` joins and keeps joining: whenever the stream breaks, it tries again, ever less often. Meanwhile the worker goes
   on with the peers it knows;
2. a decode worker makes first contact with every prefill worker as soon as it hears of it, so that no request pays;
3. who left, and stays away, is hung up on, once no handoff with it is under way;
4. prefix blocks that came and went are reported in batches; after a gap the whole is.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterable
from typing import Any

from grpc import aio

from services.kvtransfer import codec, metrics
from services.kvtransfer.connector import Connector
from services.kvtransfer.directory import Change, Member
from services.kvtransfer.transport import PeerRef
from services.runtime import log
from services.wire import rpc
from services.wire.pb import directory_pb2, directory_pb2_grpc

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0
REPORT_S = 0.5  # between reports
CALL_S = 2.0
AWAY_S = 30.0  # how long a peer may be gone from the directory before it is hung up on
WARM_UP_TRIES = 3


class DirectoryClient:
    """One worker's membership. Made on its event loop; `report` may be called from any thread."""

    def __init__(self, address: str, role: str, connector: Connector, away_s: float = AWAY_S) -> None:
        self._address = address
        self._role = role
        self._connector = connector
        self._away_s = away_s
        self._loop = asyncio.get_running_loop()
        self._log = log.get_logger()
        self._peers: dict[str, Member] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._pending: dict[bytes, bool] = {}  # True: came; what is not told yet
        self._held: set[bytes] = set()
        self._sequence_number = 0
        self._full = True
        self.connected = False

    @property
    def peers(self) -> list[Member]:
        """Everyone known, also while the directory is away."""
        return list(self._peers.values())

    def report(self, added: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Notes prefix blocks (chain keys) that came and went; they are told in the next batch."""
        item = (tuple(added), tuple(removed))
        if (item[0] or item[1]) and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._note, *item)

    async def run(self) -> None:
        """Keeps the membership until cancelled."""
        backoff_s = FIRST_BACKOFF_S
        try:
            while True:
                if await self._membership():
                    backoff_s = FIRST_BACKOFF_S
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(backoff_s * 2, MAX_BACKOFF_S)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _note(self, added: tuple[bytes, ...], removed: tuple[bytes, ...]) -> None:
        self._held.difference_update(removed)
        self._held.update(added)
        if self.connected and not self._full:
            self._pending |= dict.fromkeys(removed, False) | dict.fromkeys(added, True)

    async def _membership(self) -> bool:
        """One stream, from joining to its end. True where the directory answered at all."""
        member = Member(self._role, self._connector.endpoint)
        async with rpc.channel(self._address) as channel:
            stub = directory_pb2_grpc.DirectoryServiceStub(channel)
            reporting = asyncio.create_task(self._report_forever(stub))
            try:
                request = directory_pb2.JoinRequest(member=codec.member_to_proto(member))
                async for message in stub.Join(request):
                    change = codec.change_from_proto(message)
                    if not self.connected:
                        self._connected(True)
                        self._note_absent(change)
                    self._changed(change)
            except aio.AioRpcError as error:
                if self.connected:
                    self._log.warning("the directory is away", reason=str(error.details()))
            finally:
                reporting.cancel()
                await asyncio.gather(reporting, return_exceptions=True)
                was_connected = self.connected
                self._connected(False)
        return was_connected

    def _connected(self, connected: bool) -> None:
        self.connected = connected
        self._full, self._pending = True, {}  # the directory may be a new one, which knows nothing
        metrics.DIRECTORY_CONNECTED.set(connected)

    def _changed(self, change: Change) -> None:
        for member in change.joined:
            if member.peer.worker_id == self._connector.endpoint.peer.worker_id:
                continue
            self._peers[member.peer.worker_id] = member
            if self._role == "decode" and member.role == "prefill":
                self._spawn(self._warm_up(member.peer))
        for peer in change.left:
            self._left(peer)

    def _note_absent(self, first: Change) -> None:
        """Peers known from before that a directory does not name may only be late to join it again."""
        named = {member.peer.agent_name for member in first.joined}
        for member in self.peers:
            if member.peer.agent_name not in named:
                self._spawn(self._hang_up_later(member.peer))

    def _left(self, peer: PeerRef) -> None:
        self._spawn(self._hang_up_later(peer))

    async def _hang_up_later(self, peer: PeerRef) -> None:
        """Drops a peer that stays away, waiting for its handoffs; one that returns is kept."""
        left = self._peers.pop(peer.worker_id, None)
        if left is not None and left.peer.epoch != peer.epoch:
            self._peers[peer.worker_id] = left  # a later life
        await asyncio.sleep(self._away_s)
        while not self._is_back(peer):
            if self._connector.fetches.is_idle(peer):
                await self._connector.fetches.forget(peer)
                return
            await asyncio.sleep(1.0)

    def _is_back(self, peer: PeerRef) -> bool:
        known = self._peers.get(peer.worker_id)
        return known is not None and known.peer.epoch == peer.epoch

    async def _warm_up(self, peer: PeerRef) -> None:
        for attempt in range(WARM_UP_TRIES):
            reason = await self._connector.fetches.warm_up(peer)
            if reason is None:
                self._log.info("peer is ready", peer=peer.worker_id)
                return
            self._log.warning("no contact with a peer", peer=peer.worker_id, reason=reason)
            await asyncio.sleep(0.5 * (attempt + 1))

    async def _report_forever(self, stub: directory_pb2_grpc.DirectoryServiceStub) -> None:
        while True:
            if self.connected and (self._pending or (self._full and self._held)):
                await self._report(stub)
            await asyncio.sleep(REPORT_S)

    async def _report(self, stub: directory_pb2_grpc.DirectoryServiceStub) -> None:
        changes, self._pending = self._pending, {}
        full, self._full = self._full, False  # what is noted from here on belongs to the next report
        request = directory_pb2.ReportBlocksRequest(
            worker=codec.process_id(self._connector.endpoint.peer),
            sequence_number=self._sequence_number,
            full=full,
            added=self._held if full else [key for key, there in changes.items() if there],
            removed=[] if full else [key for key, there in changes.items() if not there],
        )
        self._sequence_number += 1
        try:
            response = await stub.ReportBlocks(request, timeout=CALL_S)
            self._full |= response.full_wanted
        except aio.AioRpcError:
            self._full = True  # whether it was taken is unknown

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
