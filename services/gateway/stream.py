"""The tokens of one attempt in order, from events that may be lost, repeated or reordered.

Events are keyed by index. What is contiguous is handed on once; what lies beyond a gap waits; what was handed on
before is ignored, since emitted tokens never change. The end is an index too, so a finish that overtakes its tokens
waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.membership import WorkerKey
from services.gateway.request import Finish, Token


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A run of tokens of one choice, and perhaps its end. A finish alone has first_index = number of output tokens."""

    handoff_id: str
    choice: int
    first_index: int
    tokens: Sequence[Token]
    finish: Finish | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """What one worker published in one message."""

    worker: WorkerKey
    events: Sequence[TokenEvent]


class TokenStream:
    """Puts one choice's tokens in order. Indices count from the request's first output token, forced ones included."""

    def __init__(self, first_index: int) -> None:
        """`first_index`: the first token that this attempt has to deliver."""
        self.next_index = first_index  # [0, next_index)  contiguous
        self.end_index: int | None = None  # number of output tokens, once known
        self.finish: Finish | None = None
        self._ready: list[Token] = []  # contiguous, not taken yet
        self._beyond: dict[int, Token] = {}  # behind a gap

    @property
    def complete(self) -> bool:
        """Whether every token up to the end has arrived."""
        return self.end_index is not None and self.next_index >= self.end_index

    @property
    def has_gap(self) -> bool:
        """Whether something is known to be missing."""
        return bool(self._beyond) or (self.end_index is not None and self.next_index < self.end_index)

    def add(self, first_index: int, tokens: Sequence[Token], finish: Finish | None = None) -> bool:
        """Takes a run of tokens; True where it brought something new."""
        before = self.next_index
        num_beyond = len(self._beyond)
        for index, token in enumerate(tokens, first_index):
            if index == self.next_index:
                self._ready.append(token)
                self.next_index += 1
                while self._beyond and (following := self._beyond.pop(self.next_index, None)) is not None:
                    self._ready.append(following)
                    self.next_index += 1
            elif index > self.next_index:
                self._beyond.setdefault(index, token)
        ended = finish is not None and self.end_at(first_index + len(tokens), finish)
        return ended or self.next_index > before or len(self._beyond) > num_beyond

    def end_at(self, end_index: int, finish: Finish) -> bool:
        """The choice has `end_index` output tokens; the first to say so is believed. True where that is new."""
        if self.end_index is not None:
            return False
        self.end_index, self.finish = end_index, finish
        return True

    def take(self) -> list[Token]:
        """The contiguous tokens not taken before, none from beyond the end."""
        ready, self._ready = self._ready, []
        if self.end_index is not None and self.next_index > self.end_index:
            del ready[len(ready) - (self.next_index - self.end_index) :]
            self.next_index = self.end_index
        return ready
