"""The text of one choice: tokens in, deltas out. Lives here, so it survives the loss of any worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.request import Finish, Sampling, Token
from services.gateway.stop import StopMatcher
from services.gateway.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A token whose log-probabilities the client asked for."""

    token: Token
    text_offset: int  # characters of the choice before it


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of a choice since the last delta."""

    text: str
    entries: tuple[TokenEntry, ...]
    finish_reason: str | None  # set on the last
    token_ids: tuple[int, ...] = ()  # where the client asked for them; may run ahead of the text


class Choice:
    """Detokenises, applies stop strings, and ends exactly once."""

    def __init__(
        self, index: int, tokenizer: Tokenizer, sampling: Sampling, stops: Sequence[str], gives_token_ids: bool = False
    ) -> None:
        self.index = index
        self.num_tokens = 0  # as the client is charged: up to the token that ended the choice
        self.finish_reason: str | None = None
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.decode_stream()
        self._matcher = StopMatcher(stops)
        self._silent = frozenset(sampling.stop_token_ids)
        self._min_tokens = sampling.min_tokens
        self._logprobs = sampling.logprobs
        self._entries: list[TokenEntry] = []
        self._gives_token_ids = gives_token_ids
        self._fresh: list[str] = []
        self._fresh_ids: list[int] = []
        self._num_given = 0  # characters of the choice that are certain
        self._ended = False  # the last delta was taken

    def feed(self, tokens: Sequence[Token]) -> bool:
        """Takes the next tokens; True where a stop string ended the choice (what follows in `tokens` is ignored)."""
        for token in tokens:
            if self.finish_reason is not None:
                break
            self._feed(token)
        return self._matcher.stopped

    def end(self, finish: Finish) -> None:
        """The choice is over; ignored where it was. Text held back comes out, unless it completes a stop string."""
        if self.finish_reason is not None:
            return
        self._give(self._matcher.feed(self._detokenizer.flush()))
        if self._matcher.stopped:
            self._stop()
            return
        self._give(self._matcher.flush())
        self.finish_reason = finish.value

    def take(self) -> Delta | None:
        """What is new; None where nothing is."""
        if not self._fresh and not self._fresh_ids and (self.finish_reason is None or self._ended):
            return None
        text = "".join(self._fresh)
        token_ids = tuple(self._fresh_ids)
        self._fresh.clear()
        self._fresh_ids.clear()
        self._ended = self.finish_reason is not None
        return Delta(text, self._take_entries(), self.finish_reason, token_ids)

    def _feed(self, token: Token) -> None:
        self.num_tokens += 1
        if self._gives_token_ids:
            self._fresh_ids.append(token.token_id)
        if token.token_id in self._silent:
            return
        if self._logprobs and not self._tokenizer.is_special(token.token_id):
            self._entries.append(TokenEntry(token, self._detokenizer.num_characters))
        piece = self._detokenizer.feed(token.token_id)
        if self.num_tokens < self._min_tokens:
            self._give(piece)
        elif piece:
            self._give(self._matcher.feed(piece))
            if self._matcher.stopped:
                self._stop()

    def _stop(self) -> None:
        """A stop string was found: nothing from its first character on exists."""
        self.finish_reason = Finish.STOP.value
        self._entries = [entry for entry in self._entries if entry.text_offset < self._num_given]

    def _give(self, text: str) -> None:
        if text:
            self._fresh.append(text)
            self._num_given += len(text)

    def _take_entries(self) -> tuple[TokenEntry, ...]:
        """The entries of tokens whose text has begun to be given; at the end, all."""
        if not self._entries:
            return ()
        ended = self.finish_reason is not None
        ready = [entry for entry in self._entries if ended or entry.text_offset < self._num_given]
        del self._entries[: len(ready)]
        return tuple(ready)
