"""One streamed answer, as its bytes come in: which events carried output, when, and how it ended.

An event carries output where a choice has text, or has neither text nor anything else in it: a token whose characters
are not complete yet. The two events that carry none are the one that only names the role, which a server may send
before it has computed anything, and the one that only names the finish reason. `vllm bench serve` counts both.
"""

from dataclasses import dataclass, field
from typing import Any

import msgspec

DONE = b"[DONE]"


class Usage(msgspec.Struct):
    """What the server counted."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Delta(msgspec.Struct):
    """The new part of a chat message."""

    role: Any = None
    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Any = None


class Choice(msgspec.Struct):
    """The new part of a choice."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None


class Event(msgspec.Struct):
    """A chunk of a chat or a text completion, or an error."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None
    object: str = ""
    message: Any = None


_decode = msgspec.json.Decoder(Event).decode


@dataclass(slots=True)
class Stream:
    """Collects one answer. Times are those at which the bytes were read from the socket, in `perf_counter` seconds."""

    chunk_times_s: list[float] = field(default_factory=list)  # of events that carried output
    last_choice_s: float = 0.0  # of the last event with a choice in it: the end of the answer, as vLLM's
    num_events: int = 0
    pieces: list[str] = field(default_factory=list)
    usage: Usage | None = None
    error: str = ""
    done: bool = False  # [DONE] came
    keeps_text: bool = False
    _rest: bytes = b""  # of a line whose end has not come
    _data: list[bytes] = field(default_factory=list)  # of an event whose end has not come

    def feed(self, data: bytes, at_s: float) -> None:
        """Bytes of the body, however they are cut."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip())
            elif not line and self._data:
                self._on_event(b"\n".join(self._data), at_s)
                self._data.clear()

    def _on_event(self, data: bytes, at_s: float) -> None:
        if data == DONE:
            self.done = True
            return
        try:
            event = _decode(data)
        except msgspec.DecodeError as error:
            self.error = self.error or f"not a chunk: {error}: {data[:100]!r}"
            return
        self.num_events += 1
        if event.error is not None or event.object == "error":
            self.error = self.error or f"error event: {message_of(event.error or event.message)}"
        if event.usage is not None:
            self.usage = event.usage
        if event.choices:
            self.last_choice_s = at_s
            if any([self._carries_output(choice) for choice in event.choices]):
                self.chunk_times_s.append(at_s)

    def _carries_output(self, choice: Choice) -> bool:
        delta = choice.delta
        text = choice.text or (delta is not None and (delta.content or delta.reasoning_content or delta.reasoning))
        if text:
            if self.keeps_text:
                self.pieces.append(str(text))
            return True
        if delta is not None and delta.tool_calls:
            return True
        return choice.finish_reason is None and (delta is None or delta.role is None)


def message_of(error: Any) -> str:
    """What an error object says, cut to a line's length."""
    return str(error.get("message", error) if isinstance(error, dict) else error)[:200]
