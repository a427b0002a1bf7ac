"""The puller's side: handoffs that are followed, blocks that are pulled, what may still be written.

The life of a fetch, as the engine sees it (any thread may call):

1. `begin` when the handoff's id and holder are known, before there is room: its lease is kept from now on;
2. HandoffReady names readable blocks; reserve room, then `fetch` those wanted; HandoffComplete brings the first token;
3. BlocksFetched as they arrive verified; BlocksCorrupt, FetchFailed, HandoffFailed when not;
4. with all blocks here, `release`; Released says whether they count;
5. or `cancel`, at any moment and after every failure: it returns the local blocks that must be quarantined, each until
   a QuarantineEnded names it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from services.kvtransfer.epochs import EpochBook
from services.kvtransfer.holder_stub import LinkError, LinkLimits
from services.kvtransfer.messages import BlockPull, HandoffFailed, Released
from services.kvtransfer.peer_link import PeerLink
from services.kvtransfer.pulls import Pulls
from services.kvtransfer.transfer_thread import TransferThread
from services.kvtransfer.transport import Endpoint, PeerRef, PeerUnreachableError


class Fetches:
    """All fetches of one worker."""

    def __init__(
        self,
        pulls: Pulls,
        thread: TransferThread,
        epochs: EpochBook,
        me: Callable[[], Endpoint],
        post: Callable[[object], None],
        limits: LinkLimits,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._pulls = pulls
        self._thread = thread
        self._epochs = epochs
        self._me = me
        self._post = post
        self._limits = limits
        self._loop = loop
        self._holders: dict[str, PeerRef] = {}
        self._links: dict[str, PeerLink] = {}
        self._hanging_up: set[asyncio.Task[None]] = set()

    def begin(self, handoff_id: str, peer: PeerRef) -> None:
        """Follows the handoff at `peer` and renews its lease from now on. Raises ValueError where it was begun."""
        if handoff_id in self._holders:
            raise ValueError(f"handoff {handoff_id} was begun")
        self._holders[handoff_id] = peer
        self._call(self._begin, handoff_id, peer)

    def fetch(self, handoff_id: str, blocks: Sequence[BlockPull]) -> None:
        """Pulls blocks that HandoffReady named into local blocks reserved for them; does nothing where it ended."""
        if (peer := self._holders.get(handoff_id)) is not None and blocks:
            self._pulls.add(peer, handoff_id, blocks)
            self._thread.wake()

    def release(self, handoff_id: str, corrupt_indices: Sequence[int] = ()) -> None:
        """All wanted blocks are here, but for those named corrupt. Released follows; nothing where it ended."""
        if (peer := self._holders.pop(handoff_id, None)) is not None:
            self._call(self._release, peer, handoff_id, tuple(corrupt_indices))

    def cancel(self, handoff_id: str) -> list[int]:
        """Gives the handoff up; idempotent. Returns the local blocks that a transfer may still write: quarantine them
        until QuarantineEnded; every other one is free to reuse at once."""
        writable = self._pulls.abandon(handoff_id)
        if (peer := self._holders.pop(handoff_id, None)) is not None:
            self._call(self._cancel, peer, handoff_id)
        self._thread.wake()
        return writable

    def writable(self) -> dict[int, int]:
        """How many transfers may write each local block: what the books of RECEIVING and quarantine must contain."""
        return self._pulls.writable()

    async def warm_up(self, peer: PeerRef) -> str | None:
        """First contact with a holder, before anything is wanted of it. None where made, else why not. On the loop."""
        link = self._link(peer)
        if link is None:
            return f"epoch: {peer.epoch} of {peer.worker_id} is over"
        try:
            await asyncio.shield(link.contact())
        except LinkError as error:
            return str(error)
        return None

    async def forget(self, peer: PeerRef) -> None:
        """Hangs up on a life that is over. Quarantine of its transfers goes on until they are settled. On the loop."""
        if (link := self._links.pop(peer.agent_name, None)) is not None:
            await link.close("the holder left")
        self._thread.submit(lambda: self._pulls.forget(peer))

    def is_idle(self, peer: PeerRef) -> bool:
        """True where no handoff with that life of the peer is under way. On the loop."""
        link = self._links.get(peer.agent_name)
        return link is None or link.is_idle

    async def close(self) -> None:
        """Hangs up on everyone."""
        for link in list(self._links.values()):
            await link.close("shutting down")
        self._links.clear()
        await asyncio.gather(*self._hanging_up)

    def want_contact(self, peer: PeerRef) -> None:
        """Asked by the transfer thread: pulls wait for a path to the peer."""
        self._call(self._contact_anew, peer)

    # On the event loop.

    def _begin(self, handoff_id: str, peer: PeerRef) -> None:
        link = self._link(peer)
        if link is None:
            self._post(HandoffFailed(handoff_id, f"epoch: {peer.epoch} of {peer.worker_id} is over"))
        elif self._pulls.breaker_open(peer):
            self._post(HandoffFailed(handoff_id, f"{peer.worker_id}: a transfer from it is overdue"))
        else:
            link.begin(handoff_id)

    def _release(self, peer: PeerRef, handoff_id: str, corrupt_indices: tuple[int, ...]) -> None:
        if (link := self._link(peer)) is None:
            self._post(Released(handoff_id, held=False))
        else:
            link.release(handoff_id, corrupt_indices)

    def _cancel(self, peer: PeerRef, handoff_id: str) -> None:
        if (link := self._links.get(peer.agent_name)) is not None:
            link.cancel(handoff_id)

    def _contact_anew(self, peer: PeerRef) -> None:
        link = self._link(peer)
        if link is None:
            self._unreachable(peer, f"epoch: {peer.epoch} is over")
            return

        def made(task: asyncio.Task[None]) -> None:
            if task.cancelled():
                self._unreachable(peer, "shutting down")
            elif (error := task.exception()) is not None:
                self._unreachable(peer, str(error))

        link.contact(anew=True).add_done_callback(made)

    def _unreachable(self, peer: PeerRef, reason: str) -> None:
        self._thread.submit(lambda: self._pulls.unreachable(peer, reason))

    def _link(self, peer: PeerRef) -> PeerLink | None:
        """The link to this life of the peer; None where this life is over.

        A life that is only talked of deposes nobody: that happens when the process itself has answered (`_connect`).
        """
        if self._epochs.is_over(peer.worker_id, peer.epoch):
            return None
        link = self._links.get(peer.agent_name)
        if link is None:
            for other in self._others(peer):
                if other.is_idle and not self._epochs.is_current(peer.worker_id, other.peer.epoch):
                    self._hang_up(other)  # nobody ever answered there
            link = PeerLink(peer, self._me, self._connect, self._post, self._limits)
            self._links[peer.agent_name] = link
        return link

    def _others(self, peer: PeerRef) -> list[PeerLink]:
        """Links to other lives of the same worker."""
        return [
            link
            for link in self._links.values()
            if link.peer.worker_id == peer.worker_id and link.peer.epoch != peer.epoch
        ]

    def _hang_up(self, link: PeerLink) -> None:
        task = asyncio.create_task(self.forget(link.peer))
        self._hanging_up.add(task)
        task.add_done_callback(self._hanging_up.discard)

    async def _connect(self, endpoint: Endpoint) -> None:
        """The holder has answered, and so is alive: earlier lives of it are over. Raises TransportError."""
        peer = endpoint.peer
        if not self._epochs.admit(peer.worker_id, peer.epoch):
            raise PeerUnreachableError(f"epoch: {peer.epoch} of {peer.worker_id} is over")
        for other in self._others(peer):
            self._hang_up(other)
        await asyncio.wrap_future(self._thread.ask(lambda: self._pulls.connect(endpoint)))

    def _call(self, work: Callable[..., None], *arguments: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(work, *arguments)
