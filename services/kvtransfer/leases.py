"""How long offered blocks stay readable, and what was answered about those that no longer are.

The life of a lease:

1. the holder `open`s it when the blocks are reserved; a cancel that arrived before it wins, and nothing opens;
2. the puller renews it from the moment it hears of the handoff; a renewal counts from when it arrives;
3. it ends once: by `release` (of the puller), `close` (of the holder) or a `sweep` that finds it expired;
4. the next `sweep` reports the end once, so that the engine gives the blocks back; a tombstone keeps the answer for
   repeated calls.

The table is locked, not owned by a thread: renewals and releases are decided when they arrive, however long the
engine's current step lasts, while blocks are only given back by the engine, in its sweep.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from services.kvtransfer import metrics

LEASE_S = 5.0
TOMBSTONE_S = 60.0  # longer than every deadline of a call that may repeat


class LeaseOutcome(Enum):
    """How a lease ended."""

    RELEASED = "released"  # the puller has what it wanted
    CANCELLED = "cancelled"  # the puller gave up before all was readable, or the holder closed it
    EXPIRED = "expired"  # nobody renewed it


@dataclass(frozen=True, slots=True)
class LeaseClosed:
    """A lease that ended: its blocks are the holder's again. Corrupt ones must leave its prefix index."""

    handoff_id: str
    block_ids: tuple[int, ...]
    outcome: LeaseOutcome
    corrupt_indices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ReleaseAnswer:
    """What a release is answered, however often it is repeated."""

    held: bool  # from open to release
    since_complete_s: float | None = None  # token 0 sampled to the first release; None: it was not sampled by then


NOT_HELD = ReleaseAnswer(held=False)


@dataclass(slots=True)
class _Lease:
    block_ids: tuple[int, ...]
    expires_s: float
    complete: bool = False
    sampled_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Tombstone:
    answer: ReleaseAnswer
    until_s: float


class LeaseTable:
    """All leases of one holder. Any thread may call; times are seconds of one monotonic clock."""

    def __init__(self, lease_s: float = LEASE_S, tombstone_s: float = TOMBSTONE_S) -> None:
        self.lease_s = lease_s
        self._tombstone_s = tombstone_s
        self._lock = threading.Lock()
        self._leases: dict[str, _Lease] = {}
        self._tombstones: dict[str, _Tombstone] = {}
        self._closed: list[LeaseClosed] = []

    def open(self, handoff_id: str, block_ids: Sequence[int], now: float) -> bool:
        """False where the handoff is over already. Raises ValueError where it is open."""
        with self._lock:
            if handoff_id in self._leases:
                raise ValueError(f"handoff {handoff_id} has a lease")
            if handoff_id in self._tombstones:
                return False
            self._leases[handoff_id] = _Lease(tuple(block_ids), now + self.lease_s)
            metrics.LEASES_OPEN.inc()
            return True

    def renew(self, handoff_ids: Iterable[str], now: float) -> list[str]:
        """Extends what is open; returns those that are over. Ids never heard of may still open: they are neither."""
        over = []
        with self._lock:
            for handoff_id in handoff_ids:
                if lease := self._leases.get(handoff_id):
                    lease.expires_s = now + self.lease_s
                elif handoff_id in self._tombstones:
                    over.append(handoff_id)
        return over

    def complete(self, handoff_id: str, sampled_s: float | None = None) -> None:
        """Everything is readable: a release from now on means success, no longer a cancel. Token 0 came `sampled_s`."""
        with self._lock:
            if lease := self._leases.get(handoff_id):
                lease.complete = True
                lease.sampled_s = lease.sampled_s if sampled_s is None else sampled_s

    def release(self, handoff_id: str, corrupt_indices: Sequence[int], now: float) -> ReleaseAnswer:
        """Ends the lease for the puller, held where it was open until now; repeated, it answers the same.

        Releasing what never opened leaves a tombstone, so that it never will.
        """
        with self._lock:
            if tombstone := self._tombstones.get(handoff_id):
                return tombstone.answer
            lease = self._leases.get(handoff_id)
            outcome = LeaseOutcome.RELEASED if lease and lease.complete else LeaseOutcome.CANCELLED
            sampled_s = lease.sampled_s if lease else None
            answer = ReleaseAnswer(lease is not None, None if sampled_s is None else now - sampled_s)
            self._end(handoff_id, outcome, now, answer, tuple(corrupt_indices))
            return answer

    def close(self, handoff_id: str, now: float) -> None:
        """Ends the lease for the holder, who cannot keep what it offered; idempotent."""
        with self._lock:
            if handoff_id not in self._tombstones:
                self._end(handoff_id, LeaseOutcome.CANCELLED, now)

    def sweep(self, now: float) -> list[LeaseClosed]:
        """Every lease that ended since the last sweep, those expired by now included. The engine calls it each tick."""
        with self._lock:
            for handoff_id in [key for key, lease in self._leases.items() if lease.expires_s < now]:
                self._end(handoff_id, LeaseOutcome.EXPIRED, now)
            while self._tombstones and next(iter(self._tombstones.values())).until_s < now:
                del self._tombstones[next(iter(self._tombstones))]
            closed, self._closed = self._closed, []
        return closed

    @property
    def num_open(self) -> int:
        """Leases whose blocks someone may still read, or whose end no sweep has reported yet."""
        with self._lock:
            return len(self._leases) + len(self._closed)

    def _end(
        self,
        handoff_id: str,
        outcome: LeaseOutcome,
        now: float,
        answer: ReleaseAnswer = NOT_HELD,
        corrupt: tuple[int, ...] = (),
    ) -> None:
        self._tombstones[handoff_id] = _Tombstone(answer, now + self._tombstone_s)
        if lease := self._leases.pop(handoff_id, None):
            self._closed.append(LeaseClosed(handoff_id, lease.block_ids, outcome, corrupt))
            metrics.LEASES_OPEN.dec()
            metrics.LEASES_ENDED.labels(outcome.value).inc()
