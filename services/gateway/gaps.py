"""When an attempt's token stream is missing something. A gap is never silent; plain Python, no clock of its own."""

from __future__ import annotations

from dataclasses import dataclass

from services.gateway.attempt import Attempt

GAP_S = 0.05  # a gap may close by itself for so long
AHEAD_S = 0.15  # tokens a worker has made may travel for so long
REPLAY_AGAIN_S = 0.25


@dataclass(eq=False, slots=True)
class Kept:
    """An attempt and what was noticed about it."""

    attempt: Attempt
    asked_s: float  # last replay, at first the beginning
    gap_s: float | None = None  # since when a gap is known
    ahead_s: float | None = None  # since when the worker is known to be ahead
    ahead: int = 0  # of so many tokens
    num_unknown: int = 0  # renewals in a row that did not know it

    def worker_has(self, num_tokens: int, now: float) -> None:
        """The decode worker says how many output tokens it has."""
        if num_tokens > max(self.ahead, self.attempt.stream.next_index):
            self.ahead = num_tokens
            self.ahead_s = self.ahead_s or now

    def missing(self, now: float, silence_s: float) -> str | None:
        """Why a replay is due: gap, finish, renewal, silence; None where it is not."""
        stream = self.attempt.stream
        if stream.complete:
            return None
        self.gap_s = (self.gap_s or now) if stream.has_gap else None
        if stream.next_index >= self.ahead:
            self.ahead_s = None
        if now - self.asked_s < REPLAY_AGAIN_S:
            return None
        if self.gap_s is not None and now - self.gap_s >= GAP_S:
            return "finish" if self.attempt.decode_ended else "gap"
        if self.ahead_s is not None and now - self.ahead_s >= AHEAD_S:
            return "renewal"
        silent_since_s = max(self.attempt.progress_s, self.asked_s)
        return "silence" if now - silent_since_s >= silence_s else None
