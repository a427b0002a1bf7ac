"""The books of a puller: per peer, what waits and what is in flight. Shared by the engine and the transfer thread.

A pull is *waiting*, then *posted*: from then until it is settled, its local blocks may be written. Abandoned while
posted, it is in quarantine. The lock is held for dictionary operations only; `posted` is changed by the transfer thread
alone.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.kvtransfer import metrics
from services.kvtransfer.messages import BlockPull
from services.kvtransfer.transport import PeerRef, Transfer


@dataclass(frozen=True, slots=True)
class PullLimits:
    """Bounds of what one peer may owe."""

    max_in_flight_bytes: int = 128 * 2**20  # per peer; also the most that one frozen peer can quarantine
    max_pull_bytes: int = 32 * 2**20  # larger fetches are split, so that arrivals are announced early
    overdue_s: float = 5.0  # a pull may take this long,
    slowest_bytes_per_s: float = 20e6  # plus its bytes at this speed


@dataclass(slots=True, eq=False)
class Pull:
    """One transfer: some blocks of one handoff."""

    handoff_id: str
    blocks: tuple[BlockPull, ...]
    num_bytes: int
    not_before_s: float
    posted_s: float = 0.0
    due_s: float = 0.0
    transfer: Transfer | None = None
    abandoned: bool = False
    failed: bool = False  # its failure was announced; it is only watched until it is settled

    @property
    def local_block_ids(self) -> tuple[int, ...]:
        """The blocks that it writes."""
        return tuple(block.local_block_id for block in self.blocks)


@dataclass(slots=True, eq=False)
class PeerPulls:
    """All pulls from one life of one peer, and the condition of the path to it."""

    ref: PeerRef
    waiting: deque[Pull] = field(default_factory=deque)
    posted: list[Pull] = field(default_factory=list)
    in_flight_bytes: int = 0
    connected: bool = False
    contact_wanted: bool = False  # somebody was asked to connect it
    warm_up: tuple[Transfer, float] | None = None  # and when it started
    breaker_open: bool = False
    leaving: bool = False
    path_noted: bool = False


class PullBook:
    """Every pull of one process that is not settled yet."""

    def __init__(self, limits: PullLimits, block_bytes: int) -> None:
        self._limits = limits
        self._block_bytes = block_bytes
        self._lock = threading.Lock()
        self._peers: dict[str, PeerPulls] = {}
        self._verifying: Pull | None = None

    def peer(self, ref: PeerRef) -> PeerPulls:
        """The peer's page, new where there was none."""
        with self._lock:
            return self._peers.setdefault(ref.agent_name, PeerPulls(ref))

    def known(self, ref: PeerRef) -> PeerPulls | None:
        """The peer's page, if there is one."""
        return self._peers.get(ref.agent_name)

    def peers(self) -> list[PeerPulls]:
        """All pages."""
        with self._lock:
            return list(self._peers.values())

    def drop(self, peer: PeerPulls) -> None:
        """Removes the page of a peer with nothing in flight."""
        with self._lock:
            self._peers.pop(peer.ref.agent_name, None)

    def add(self, ref: PeerRef, handoff_id: str, blocks: Sequence[BlockPull], not_before_s: float) -> None:
        """Queues a fetch, in pieces of at most `max_pull_bytes`."""
        step = max(1, self._limits.max_pull_bytes // self._block_bytes)
        waiting = self.peer(ref).waiting
        with self._lock:
            for i in range(0, len(blocks), step):
                piece = tuple(blocks[i : i + step])
                waiting.append(Pull(handoff_id, piece, len(piece) * self._block_bytes, not_before_s))

    def abandon(self, handoff_id: str) -> list[int]:
        """Gives a handoff's pulls up; returns the local blocks that may still be written. Repeated, it returns none."""
        writable: list[int] = []
        with self._lock:
            for peer in self._peers.values():
                for pull in [pull for pull in peer.waiting if pull.handoff_id == handoff_id]:
                    peer.waiting.remove(pull)
                for pull in peer.posted:
                    if pull.handoff_id == handoff_id and not pull.abandoned:
                        pull.abandoned = True
                        metrics.QUARANTINED.inc()
                        writable += pull.local_block_ids
            if self._verifying is not None and self._verifying.handoff_id == handoff_id:
                self._verifying.abandoned = True
        return writable

    def writable(self) -> dict[int, int]:
        """How many unsettled transfers may write each local block, those in quarantine included."""
        counts: dict[int, int] = {}
        with self._lock:
            for peer in self._peers.values():
                for pull in peer.posted:
                    for block_id in pull.local_block_ids:
                        counts[block_id] = counts.get(block_id, 0) + 1
        return counts

    # The transfer thread.

    def take(self, peer: PeerPulls, now: float) -> Pull | float | None:
        """Moves the next waiting pull to posted and returns it.

        Seconds where it is delayed until then; None where nothing waits, or where the cap makes it wait for others.
        """
        with self._lock:
            if not peer.waiting:
                return None
            pull = peer.waiting[0]
            if pull.not_before_s > now:
                return pull.not_before_s - now
            if peer.posted and peer.in_flight_bytes + pull.num_bytes > self._limits.max_in_flight_bytes:
                return None
            peer.waiting.popleft()
            pull.posted_s = now
            pull.due_s = now + self._limits.overdue_s + pull.num_bytes / self._limits.slowest_bytes_per_s
            peer.posted.append(pull)
            peer.in_flight_bytes += pull.num_bytes
        metrics.IN_FLIGHT_BYTES.inc(pull.num_bytes)
        return pull

    def take_waiting(self, peer: PeerPulls) -> list[Pull]:
        """All that waits, which no longer does."""
        with self._lock:
            pulls, peer.waiting = list(peer.waiting), deque()
        return pulls

    def settle(self, peer: PeerPulls, pull: Pull) -> bool:
        """Nothing of the pull can land any more. True where its blocks are still wanted: then verify, and `close`."""
        with self._lock:
            peer.posted.remove(pull)
            peer.in_flight_bytes -= pull.num_bytes
            wanted = not pull.abandoned
            self._verifying = pull if wanted else None
        metrics.IN_FLIGHT_BYTES.dec(pull.num_bytes)
        if not wanted:
            metrics.QUARANTINED.dec()
        return wanted

    def close(self, pull: Pull) -> bool:
        """The pull was verified. True where its blocks are still wanted; else they may be somebody else's by now."""
        with self._lock:
            self._verifying = None
            return not pull.abandoned
