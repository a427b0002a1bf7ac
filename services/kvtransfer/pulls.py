"""The puller's transfers, moved on by the transfer thread.

The life of a pull:

1. `add`ed by the engine, it waits while its peer is not connected, or owes as many bytes as it may;
2. the transfer thread posts it (`read`) and polls it;
3. DONE: its blocks are verified and announced as BlocksFetched or BlocksCorrupt;
4. overdue: FetchFailed, and the peer's breaker opens: its other pulls fail at once, until its overdue ones are settled;
5. abandoned by the engine while posted: its blocks are in quarantine until it is *settled* (DONE, or the peer's
   disconnect), then QuarantineEnded. Silence is not exit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from services.kvtransfer import metrics
from services.kvtransfer.checksum import BlockMemory
from services.kvtransfer.faults import Faults
from services.kvtransfer.messages import BlockPull, BlocksCorrupt, BlocksFetched, FetchFailed, QuarantineEnded
from services.kvtransfer.pull_book import PeerPulls, Pull, PullBook, PullLimits
from services.kvtransfer.transport import (
    Endpoint,
    PeerRef,
    PeerUnreachableError,
    TransferState,
    TransferStatus,
    Transport,
)

BUSY_POLL_S = 0.0002  # between polls while something is awaited
QUIET_POLL_S = 0.05  # while only failed or quarantined transfers are left
WARM_UP_S = 2.0  # how long a first contact is awaited eagerly


class Pulls:
    """All pulls of one process."""

    def __init__(
        self,
        transport: Transport,
        memory: BlockMemory,
        post: Callable[[object], None],
        limits: PullLimits,
        faults: Faults,
        want_contact: Callable[[PeerRef], None],
    ) -> None:
        self._transport = transport
        self._memory = memory
        self._block_bytes = int(memory.blocks.shape[1])
        self._book = PullBook(limits, self._block_bytes)
        self._post = post
        self._faults = faults
        self._want_contact = want_contact

    # Any thread.

    def add(self, peer: PeerRef, handoff_id: str, blocks: Sequence[BlockPull]) -> None:
        """Queues a fetch; wake the transfer thread afterwards."""
        self._book.add(peer, handoff_id, blocks, time.monotonic() + self._faults.slow_transfer_s)

    def abandon(self, handoff_id: str) -> list[int]:
        """Gives a handoff's pulls up; returns the local blocks that may still be written. Repeated, it returns none."""
        return self._book.abandon(handoff_id)

    def breaker_open(self, ref: PeerRef) -> bool:
        """True while a transfer from the peer is overdue: nothing new should be asked of it."""
        peer = self._book.known(ref)
        return peer is not None and peer.breaker_open

    def writable(self) -> dict[int, int]:
        """How many unsettled transfers may write each local block, those in quarantine included."""
        return self._book.writable()

    # The transfer thread.

    def connect(self, endpoint: Endpoint) -> None:
        """Makes a peer readable; idempotent. Raises PeerUnreachableError, also while a lost path is not settled."""
        peer = self._book.peer(endpoint.peer)
        peer.leaving = peer.contact_wanted = False
        if peer.connected:
            return
        if peer.posted or peer.warm_up:
            raise PeerUnreachableError(f"{peer.ref.worker_id}: transfers over the lost path are not settled yet")
        self._transport.disconnect(endpoint.peer)
        started_s = time.monotonic()
        warm_up = self._transport.connect(endpoint)
        peer.connected = True
        if warm_up is None:
            metrics.CONTACT_SECONDS.observe(time.monotonic() - started_s)
        else:
            peer.warm_up = (warm_up, started_s)

    def unreachable(self, ref: PeerRef, reason: str) -> None:
        """The peer could not be connected: what waits for it fails."""
        if peer := self._book.known(ref):
            peer.contact_wanted = False
            self._fail_waiting(peer, reason)

    def forget(self, ref: PeerRef) -> None:
        """Drops a peer whose life is over, once nothing of it is in flight; what waits fails."""
        if peer := self._book.known(ref):
            peer.leaving = True

    def poll(self) -> float | None:
        """Moves every pull on by what can be done now; returns the seconds until the next poll is due."""
        now = time.monotonic()
        delays = [delay for peer in self._book.peers() if (delay := self._poll_peer(peer, now)) is not None]
        return min(delays, default=None)

    def _poll_peer(self, peer: PeerPulls, now: float) -> float | None:
        if peer.warm_up is not None:
            self._poll_warm_up(peer)
        for pull in list(peer.posted):
            self._poll_pull(peer, pull, now)
        if peer.leaving:
            self._leave(peer)
        peer.breaker_open = any(pull.due_s < now for pull in peer.posted)
        if peer.breaker_open and peer.waiting:
            self._fail_waiting(peer, "an earlier transfer from this peer is overdue")
        if peer.waiting and not peer.connected:
            self._ask_contact(peer)
        wait_s = self._post_waiting(peer)
        if any(not pull.failed for pull in peer.posted):
            return BUSY_POLL_S
        if peer.warm_up is not None:
            return BUSY_POLL_S if now - peer.warm_up[1] < WARM_UP_S else QUIET_POLL_S
        return QUIET_POLL_S if peer.posted else wait_s

    def _poll_warm_up(self, peer: PeerPulls) -> None:
        assert peer.warm_up is not None
        transfer, started_s = peer.warm_up
        status = self._transport.poll(transfer)
        if status.state is TransferState.PENDING:
            return
        peer.warm_up = None
        if status.state is TransferState.DONE:
            metrics.CONTACT_SECONDS.observe(time.monotonic() - started_s)
            self._note_path(peer)
        else:
            self._lost(peer)

    def _post_waiting(self, peer: PeerPulls) -> float | None:
        """Posts what the cap allows; returns the seconds until a delayed pull may go."""
        while peer.connected:
            now = time.monotonic()
            pull = self._book.take(peer, now)
            if not isinstance(pull, Pull):
                return pull
            try:
                remote = [block.remote_block_id for block in pull.blocks]
                pull.transfer = self._transport.read(peer.ref, remote, pull.local_block_ids)
            except (PeerUnreachableError, ValueError) as error:
                self._fail(pull, str(error))
                self._settle(peer, pull)
                if isinstance(error, PeerUnreachableError):
                    self._lost(peer)
            else:
                self._poll_pull(peer, pull, now)  # some transports copy while posting
        return None

    def _ask_contact(self, peer: PeerPulls) -> None:
        """Asks, once, that a peer be connected for which pulls wait."""
        if not peer.contact_wanted:
            peer.contact_wanted = True
            self._want_contact(peer.ref)

    def _poll_pull(self, peer: PeerPulls, pull: Pull, now: float) -> None:
        assert pull.transfer is not None
        abandoned = pull.abandoned and self._transport.abandon(pull.transfer)
        status = self._transport.poll(pull.transfer)
        if abandoned and status.state is not TransferState.DONE:
            self._settle(peer, pull)
        elif status.state is TransferState.DONE:
            seconds = time.monotonic() - pull.posted_s
            self._note_path(peer)
            if pull.abandoned:
                metrics.LATE_BLOCKS.inc(len(pull.blocks))
            if self._settle(peer, pull) and not pull.failed:
                self._verify(pull, seconds)
        elif status.state is TransferState.FAILED:
            self._failed(peer, pull, status)
        elif pull.due_s < now:
            self._fail(pull, "the transfer is overdue")

    def _failed(self, peer: PeerPulls, pull: Pull, status: TransferStatus) -> None:
        """An error that is no disconnect proves nothing about late bytes: then the pull stays, watched and overdue."""
        self._fail(pull, status.reason)
        if status.settled:
            self._settle(peer, pull)
            self._lost(peer)
        else:
            pull.due_s = 0.0

    def _settle(self, peer: PeerPulls, pull: Pull) -> bool:
        """Nothing of the pull can land any more. True where its blocks are still wanted."""
        wanted = self._book.settle(peer, pull)
        if not wanted:
            self._post(QuarantineEnded(pull.local_block_ids))
        return wanted

    def _verify(self, pull: Pull, seconds: float) -> None:
        if (position := self._faults.corrupted(len(pull.blocks))) is not None:
            self._memory.flip_byte(pull.blocks[position].local_block_id)
        with metrics.VERIFY_SECONDS.time():
            found = self._memory.checksums(pull.local_block_ids)
        if not self._book.close(pull):
            return
        metrics.PULL_SECONDS.observe(seconds)
        pairs = list(zip(pull.blocks, found, strict=True))
        bad = tuple(block.index for block, checksum in pairs if checksum != block.checksum)
        good = tuple(block.index for block, checksum in pairs if checksum == block.checksum)
        if bad:
            metrics.VERIFY_FAILURES.inc(len(bad))
            self._post(BlocksCorrupt(pull.handoff_id, bad))
        if good:
            num_bytes = len(good) * self._block_bytes
            metrics.PULLED_BLOCKS.labels(self._transport.name).inc(len(good))
            metrics.PULLED_BYTES.labels(self._transport.name).inc(num_bytes)
            self._post(BlocksFetched(pull.handoff_id, good, num_bytes, seconds))

    def _note_path(self, peer: PeerPulls) -> None:
        if not peer.path_noted:
            peer.path_noted = True
            metrics.TRANSPORT_INFO.labels(self._transport.name, self._transport.active()).set(1)

    def _fail(self, pull: Pull, reason: str) -> None:
        if not pull.failed:
            pull.failed = True
            metrics.PULL_FAILURES.labels("overdue" if "overdue" in reason else "error").inc()
            if not pull.abandoned:
                self._post(FetchFailed(pull.handoff_id, reason))

    def _fail_waiting(self, peer: PeerPulls, reason: str) -> None:
        for pull in self._book.take_waiting(peer):
            self._fail(pull, reason)

    def _leave(self, peer: PeerPulls) -> None:
        self._fail_waiting(peer, "the peer left")
        if not peer.posted and peer.warm_up is None:
            self._transport.disconnect(peer.ref)
            self._book.drop(peer)

    def _lost(self, peer: PeerPulls) -> None:
        """The path is poisoned: it must be connected anew when somebody next wants something of the peer."""
        if peer.connected:
            peer.connected = False
            self._fail_waiting(peer, "the peer disconnected")
