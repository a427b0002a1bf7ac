"""Answers in OpenAI's form: whole bodies and stream chunks, for chat and for text. Plain dicts, encoded by orjson."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import orjson

from services.gateway.choice import Delta, TokenEntry
from services.gateway.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
LEAST_LOGPROB = -9999.0  # JSON has no minus infinity


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request is charged for, in tokens."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int

    def view(self) -> dict[str, Any]:
        """As OpenAI's usage object."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


class Format(Protocol):
    """How one route writes its choices."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice of the first chunk, before any text."""

    def chunk(self, index: int, text: str, entries: Sequence[TokenEntry]) -> dict[str, Any]:
        """A choice with new text."""

    def closing(self, index: int, finish_reason: str, entries: Sequence[TokenEntry]) -> dict[str, Any]:
        """A choice that has ended."""

    def whole(self, index: int, delta: Delta) -> dict[str, Any]:
        """A choice in one piece."""


class ChatFormat:
    """/v1/chat/completions."""

    id_prefix: ClassVar[str] = "chatcmpl-"
    whole_object: ClassVar[str] = "chat.completion"
    chunk_object: ClassVar[str] = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._wants_logprobs = logprobs

    def opening(self, index: int) -> dict[str, Any] | None:
        """The role."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(self, index: int, text: str, entries: Sequence[TokenEntry]) -> dict[str, Any]:
        """A delta with content."""
        logprobs = self._logprobs(entries)
        return {"index": index, "delta": {"content": text}, "logprobs": logprobs, "finish_reason": None}

    def closing(self, index: int, finish_reason: str, entries: Sequence[TokenEntry]) -> dict[str, Any]:
        """An empty delta with the reason."""
        logprobs = self._logprobs(entries) if entries else None
        return {"index": index, "delta": {}, "logprobs": logprobs, "finish_reason": finish_reason}

    def whole(self, index: int, delta: Delta) -> dict[str, Any]:
        """A message."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": self._logprobs(delta.entries),
            "finish_reason": delta.finish_reason,
        }

    def _logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None
        content = []
        for entry in entries:
            tops = [self._one(token_id, logprob) for token_id, logprob in entry.token.top_logprobs]
            content.append(self._one(entry.token.token_id, entry.token.logprob) | {"top_logprobs": tops})
        return {"content": content, "refusal": None}

    def _one(self, token_id: int, logprob: float) -> dict[str, Any]:
        token = self._tokenizer.token_text(token_id)
        raw = list(self._tokenizer.token_bytes(token_id))
        return {"token": token, "logprob": max(logprob, LEAST_LOGPROB), "bytes": raw}


class TextFormat:
    """/v1/completions."""

    id_prefix: ClassVar[str] = "cmpl-"
    whole_object: ClassVar[str] = "text_completion"
    chunk_object: ClassVar[str] = "text_completion"

    def __init__(self, tokenizer: Tokenizer, num_top_logprobs: int | None) -> None:
        """`num_top_logprobs`: None where the client asked for no log-probabilities."""
        self._tokenizer = tokenizer
        self._num_top_logprobs = num_top_logprobs

    def opening(self, index: int) -> dict[str, Any] | None:
        """Text has no opening."""
        return None

    def chunk(self, index: int, text: str, entries: Sequence[TokenEntry]) -> dict[str, Any]:
        """New text."""
        return {"index": index, "text": text, "logprobs": self._logprobs(entries), "finish_reason": None}

    def closing(self, index: int, finish_reason: str, entries: Sequence[TokenEntry]) -> dict[str, Any]:
        """No text, the reason."""
        logprobs = self._logprobs(entries) if entries else None
        return {"index": index, "text": "", "logprobs": logprobs, "finish_reason": finish_reason}

    def whole(self, index: int, delta: Delta) -> dict[str, Any]:
        """The whole text."""
        logprobs = self._logprobs(delta.entries)
        return {"index": index, "text": delta.text, "logprobs": logprobs, "finish_reason": delta.finish_reason}

    def _logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, Any] | None:
        if self._num_top_logprobs is None:
            return None
        text = self._tokenizer.token_text
        tops = [
            {text(token_id): max(logprob, LEAST_LOGPROB) for token_id, logprob in entry.token.top_logprobs}
            for entry in entries
        ]
        return {
            "tokens": [text(entry.token.token_id) for entry in entries],
            "token_logprobs": [max(entry.token.logprob, LEAST_LOGPROB) for entry in entries],
            "top_logprobs": tops if self._num_top_logprobs else None,
            "text_offset": [entry.text_offset for entry in entries],
        }


class Writer:
    """Writes the answer of one request; id, time and model are the same in every part."""

    def __init__(
        self,
        form: Format,
        request_id: str,
        created: int,
        model: str,
        usage_in_stream: bool,
        gives_token_ids: bool = False,
    ) -> None:
        self._form = form
        self._gives_token_ids = gives_token_ids
        self._usage_in_stream = usage_in_stream
        self._head = {"id": form.id_prefix + request_id, "created": created, "model": model}

    def whole(self, deltas: Sequence[Delta], usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""
        choices = [self._with_ids(self._form.whole(index, delta), delta) for index, delta in enumerate(deltas)]
        return orjson.dumps(self._head | {"object": self._form.whole_object, "choices": choices, "usage": usage.view()})

    def opening(self, num_choices: int) -> bytes:
        """The first chunks of a stream."""
        openings = (self._form.opening(index) for index in range(num_choices))
        return b"".join(self._event([choice]) for choice in openings if choice is not None)

    def delta(self, index: int, delta: Delta) -> bytes:
        """A choice's new text and, in a chunk of its own, its end."""
        parts = []
        told = bool(delta.text or delta.token_ids)
        if told:
            chunk = self._form.chunk(index, delta.text, delta.entries)
            parts.append(self._event([self._with_ids(chunk, delta)]))
        if delta.finish_reason is not None:
            entries = () if told else delta.entries
            parts.append(self._event([self._form.closing(index, delta.finish_reason, entries)]))
        return b"".join(parts)

    def ending(self, usage: Usage) -> bytes:
        """The usage, if asked for, and the end of the stream."""
        return (self._event([], usage) if self._usage_in_stream else b"") + DONE

    def _with_ids(self, choice: dict[str, Any], delta: Delta) -> dict[str, Any]:
        return choice | {"token_ids": delta.token_ids} if self._gives_token_ids else choice

    def _event(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> bytes:
        chunk = self._head | {"object": self._form.chunk_object, "choices": choices}
        if self._usage_in_stream:
            chunk["usage"] = usage.view() if usage is not None else None
        return b"data: " + orjson.dumps(chunk) + b"\n\n"


def error_event(body: bytes) -> bytes:
    """An error after the headers went out. No [DONE] follows."""
    return b"data: " + body + b"\n\n"
