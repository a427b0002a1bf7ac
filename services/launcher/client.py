"""The OpenAI-style chat API, as `pdserve chat` and `pdserve demo` call it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2

Message = Mapping[str, str]


class ApiError(RuntimeError):
    """The server answered with an error object, broke off in mid-stream, or could not be reached."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A streamed answer, and what the client saw of it."""

    request_id: str  # as the server names it
    text: str
    num_prompt_tokens: int
    num_output_tokens: int
    first_token_s: float  # since the request was sent
    total_s: float  # until [DONE]


def stream_chat(
    base_url: str,
    model: str,
    messages: Iterable[Message],
    on_text: Callable[[str], None],
    **parameters: object,
) -> Answer:
    """Sends a chat and hands each piece of the answer to `on_text`. Raises ApiError."""
    body = {"model": model, "messages": list(messages), "stream": True, **parameters}
    body["stream_options"] = {"include_usage": True}
    pieces: list[str] = []
    first_token_s = 0.0
    request_id = ""
    usage: dict[str, int] = {}
    # no proxy from the environment: the server is on this machine; a prompt may take its time
    with httpx2.Client(timeout=httpx2.Timeout(10.0, read=600.0), trust_env=False) as client:
        with _as_api_error(base_url):
            client.get(f"{base_url}/health")  # connects, so that the clock below sees the request alone
        sent_s = time.perf_counter()
        with _as_api_error(base_url), client.stream("POST", f"{base_url}/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise ApiError(_message(response))
            for chunk in _events(response.iter_lines()):
                request_id = str(chunk["id"])
                usage = chunk.get("usage") or usage
                text = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
                if text:
                    first_token_s = first_token_s or time.perf_counter() - sent_s
                    pieces.append(text)
                    on_text(text)
            total_s = time.perf_counter() - sent_s
    counts = (usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0))
    return Answer(request_id, "".join(pieces), *counts, first_token_s, total_s)


@contextmanager
def _as_api_error(base_url: str) -> Iterator[None]:
    try:
        yield
    except httpx2.HTTPError as error:
        raise ApiError(f"the connection to {base_url} failed: {error or type(error).__name__}") from error


def served_model(base_url: str) -> str:
    """The name of the model that a server offers. Raises ApiError."""
    try:
        response = httpx2.get(f"{base_url}/v1/models", timeout=10.0, trust_env=False)
    except httpx2.HTTPError as error:
        raise ApiError(f"nothing answers at {base_url}: {error}") from error
    if response.status_code != 200:
        raise ApiError(_message(response))
    return str(response.json()["data"][0]["id"])


def _events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The JSON of each SSE event up to [DONE]. Raises ApiError at an error event, or where [DONE] is missing."""
    for line in lines:
        if not line.startswith("data: "):
            continue  # comments and blank lines
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise ApiError(str(event["error"].get("message")))
        yield event
    raise ApiError("the stream ended without [DONE]")


def _message(response: httpx2.Response) -> str:
    try:
        return f"{response.status_code}: {response.json()['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{response.status_code}: {response.text[:200]}"
