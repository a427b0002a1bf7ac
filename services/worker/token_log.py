"""Tokens of a worker's choices, kept until their gateway acknowledged the finish, for replays. On the event loop."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from prometheus_client import Counter

from services.engine.batch import SampledToken
from services.engine.sequence import FinishReason
from services.worker.intake import Attempt, GatewayRef

REPLAYS = Counter("pdserve_worker_replays_total", "choices whose tokens were asked for again", ["answer"])
EVICTED = Counter("pdserve_worker_token_log_evicted_total", "finished choices forgotten before they were acknowledged")

SILENCE_S = 60.0  # a gateway not heard of for so long has ended
_ENTRY_BYTES = 200
_TOKEN_BYTES = 100


@dataclass(slots=True)
class Entry:
    """Output tokens from `first_index` on, and how the choice ended."""

    attempt: Attempt
    first_index: int
    tokens: list[SampledToken] = field(default_factory=list)
    finish: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        """Output tokens so far, forced ones included."""
        return self.first_index + len(self.tokens)

    @property
    def num_bytes(self) -> int:
        """About what it costs."""
        return _ENTRY_BYTES + _TOKEN_BYTES * len(self.tokens)


class TokenLog:
    """All choices that may still be asked for, within a byte limit (running ones are never dropped)."""

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._entries: OrderedDict[str, Entry] = OrderedDict()  # oldest first
        self._heard: dict[GatewayRef, float] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        """Choices kept."""
        return len(self._entries)

    def open(self, attempt: Attempt, num_forced_tokens: int) -> None:
        """Begins a choice; its first new token has index `num_forced_tokens`."""
        self.hear(attempt.gateway)
        self._entries[attempt.handoff_id] = Entry(attempt, num_forced_tokens)
        self._num_bytes += _ENTRY_BYTES

    def append(self, handoff_id: str, token: SampledToken | None, finish: FinishReason | None) -> None:
        """One more token of a choice, its end, or both."""
        if entry := self._entries.get(handoff_id):
            if token is not None:
                entry.tokens.append(token)
                self._num_bytes += _TOKEN_BYTES
            entry.finish = finish or entry.finish
            self._shrink()

    def get(self, handoff_id: str) -> Entry | None:
        """What is kept of a choice."""
        return self._entries.get(handoff_id)

    def replay(self, handoff_id: str, index: int) -> tuple[int, list[SampledToken], FinishReason | None] | None:
        """(first index, tokens, finish) from `index` on; None: unknown, or the tokens wanted are gone."""
        entry = self._entries.get(handoff_id)
        if entry is None or index < entry.first_index:
            REPLAYS.labels("unknown").inc()
            return None
        tokens = entry.tokens[index - entry.first_index :]
        REPLAYS.labels("tokens" if tokens or entry.finish else "nothing_new").inc()
        return index, tokens, entry.finish

    def forget(self, handoff_ids: Iterable[str]) -> None:
        """What its gateway has acknowledged, or what failed: nobody will ask."""
        for handoff_id in handoff_ids:
            if entry := self._entries.pop(handoff_id, None):
                self._num_bytes -= entry.num_bytes

    def hear(self, gateway: GatewayRef) -> None:
        """A gateway is alive."""
        self._heard[gateway] = self._clock()

    def sweep(self) -> None:
        """Forgets the finished choices of gateways that ended."""
        now = self._clock()
        silent = {gateway for gateway, heard_s in self._heard.items() if now - heard_s > SILENCE_S}
        for gateway in silent:
            del self._heard[gateway]
        self.forget([key for key, entry in self._entries.items() if entry.finish and entry.attempt.gateway in silent])

    def _shrink(self) -> None:
        if self._num_bytes <= self._max_bytes:
            return
        for handoff_id in [key for key, entry in self._entries.items() if entry.finish]:
            self.forget([handoff_id])
            EVICTED.inc()
            if self._num_bytes <= self._max_bytes:
                return
