"""Which attempts live on this worker, and who keeps them alive. On the event loop.

1. `admit` when a call arrives: refused where it was cancelled before it came, where a higher attempt fences it, or
   where its gateway's epoch is over; lower attempts of the same request are fenced, and returned for release.
2. `renew` by its gateway, batched; each attempt not renewed for `renewal_s` is returned by `sweep`, for release.
3. `end` when its sequence has left the worker. A tombstone remembers it for longer than any deadline of a late call.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from services.worker.intake import Attempt, GatewayRef

TOMBSTONE_S = 120.0


class FencedError(Exception):
    """The attempt is over before it began; the text says why."""


@dataclass(slots=True)
class _Live:
    attempt: Attempt
    renewed_s: float
    swept: bool = False


class AttemptBook:
    """All attempts of one worker."""

    def __init__(self, renewal_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._renewal_s = renewal_s
        self._clock = clock
        self._live: dict[str, _Live] = {}  # by handoff id
        self._highest: OrderedDict[str, tuple[int, float]] = OrderedDict()  # request id -> attempt, until
        self._over: OrderedDict[str, float] = OrderedDict()  # handoff id -> until
        self._heard: dict[GatewayRef, float] = {}  # lives of gateways that are not over, and when each last spoke
        self._past: OrderedDict[GatewayRef, float] = OrderedDict()

    def __len__(self) -> int:
        """Live attempts."""
        return len(self._live)

    def admit(self, attempt: Attempt) -> list[Attempt]:
        """Begins an attempt; returns the lower ones of its request, now fenced. Raises FencedError."""
        now = self._clock()
        self.hear(attempt.gateway)
        if attempt.gateway in self._past:
            raise FencedError("the gateway's epoch is over")
        if attempt.handoff_id in self._over:
            raise FencedError("cancelled before it came")
        if attempt.handoff_id in self._live:
            raise FencedError("the same attempt is running")
        highest, _ = self._highest.get(attempt.request_id, (-1, 0.0))
        if attempt.number < highest:
            raise FencedError(f"attempt {attempt.number} is fenced by attempt {highest}")
        self._highest[attempt.request_id] = (attempt.number, now + TOMBSTONE_S)
        self._highest.move_to_end(attempt.request_id)
        fenced = [
            live.attempt
            for live in self._live.values()
            if live.attempt.request_id == attempt.request_id and live.attempt.number < attempt.number
        ]
        self._live[attempt.handoff_id] = _Live(attempt, now)
        return fenced

    def hear(self, gateway: GatewayRef) -> list[Attempt]:
        """A gateway spoke. Earlier lives of it that have fallen silent are over; their attempts are returned, for
        release.

        Epochs have no order: one that still speaks is not deposed, whoever has the same name.
        """
        now = self._clock()
        if gateway in self._past:
            return []
        self._heard[gateway] = now
        silent = [
            other
            for other, heard_s in self._heard.items()
            if other.gateway_id == gateway.gateway_id and now - heard_s > self._renewal_s
        ]
        for other in silent:
            del self._heard[other]
            self._past[other] = now + TOMBSTONE_S
        return [live.attempt for live in self._live.values() if live.attempt.gateway in silent]

    def renew(self, handoff_ids: Iterable[str]) -> None:
        """Keeps attempts alive from now; unknown ids mean nothing."""
        now = self._clock()
        for handoff_id in handoff_ids:
            if live := self._live.get(handoff_id):
                live.renewed_s = now

    def cancel(self, handoff_id: str) -> Attempt | None:
        """Remembers that it is over, also where it never came; returns it where it lives, for release."""
        self._bury(handoff_id)
        live = self._live.get(handoff_id)
        return live.attempt if live else None

    def live(self) -> list[Attempt]:
        """Every attempt that has not ended."""
        return [live.attempt for live in self._live.values()]

    def end(self, handoff_id: str) -> None:
        """Its sequence has left; idempotent."""
        self._live.pop(handoff_id, None)
        self._bury(handoff_id)

    def sweep(self) -> list[Attempt]:
        """The attempts whose gateway fell silent, each once, for release; forgets old tombstones."""
        now = self._clock()
        for book in (self._over, self._past):
            while book and next(iter(book.values())) < now:
                book.popitem(last=False)
        for gateway in [each for each, heard_s in self._heard.items() if now - heard_s > TOMBSTONE_S]:
            del self._heard[gateway]
        while self._highest and next(iter(self._highest.values()))[1] < now:
            self._highest.popitem(last=False)
        silent = [live for live in self._live.values() if now - live.renewed_s > self._renewal_s and not live.swept]
        for live in silent:
            live.swept = True
        return [live.attempt for live in silent]

    def _bury(self, handoff_id: str) -> None:
        self._over[handoff_id] = self._clock() + TOMBSTONE_S
        self._over.move_to_end(handoff_id)
