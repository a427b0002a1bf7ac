"""An OpenAI-compatible server that computes nothing: each streamed answer is a script of waits, bytes and hang-ups."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

HANG_UP = object()
Step = float | bytes | object
Script = Sequence[Step] | tuple[int, bytes]  # or (status, body)


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(piece: str, finish_reason: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": piece, "finish_reason": finish_reason}], usage=None)


def usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    return event(choices=[], usage={"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens})


DONE = b"data: [DONE]\n\n"


def answer(first_s: float, gap_s: float, num_tokens: int, prompt_tokens: int = 7) -> list[Step]:
    """A whole answer: a token after `first_s`, the others `gap_s` apart."""
    steps: list[Step] = [first_s, text("a")]
    for _ in range(num_tokens - 1):
        steps += [gap_s, text("b")]
    return [*steps, text("", "length"), usage(prompt_tokens, num_tokens), DONE]


class FakeServer:
    """Listens on loopback in a thread of its own; keeps what it was sent and the most it had to do at one time."""

    def __init__(self, script: Callable[[int, dict[str, Any]], Script], vocabulary: int) -> None:
        self._script, self._vocabulary = script, vocabulary
        self.bodies: list[dict[str, Any]] = []  # of streamed requests, in order of their arrival
        self.heads: list[str] = []
        self.num_connections = 0
        self.num_active = 0
        self.most_active = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self.url = ""

    async def serve(self, started: threading.Event, stop: asyncio.Event) -> None:
        server = await asyncio.start_server(self._on_connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        await stop.wait()
        server.close()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0.05)

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._writers.add(writer)
        try:
            while await self._on_request(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _on_request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lines = head.lower().split("\r\n")
        length = next((int(line.split(":")[1]) for line in lines if line.startswith("content-length:")), 0)
        body = json.loads(await reader.readexactly(length) or b"{}")
        if not body.get("stream"):
            writer.write(self._plain(head, body))
            return True
        self.heads.append(head)
        self.bodies.append(body)
        self.num_active += 1
        self.most_active = max(self.most_active, self.num_active)
        try:
            return await self._play(self._script(len(self.bodies) - 1, body), writer)
        finally:
            self.num_active -= 1

    def _plain(self, head: str, body: dict[str, Any]) -> bytes:
        if head.startswith("GET /v1/models "):
            return _whole(200, b'{"object":"list","data":[{"id":"fake","object":"model"}]}')
        if isinstance(body.get("prompt"), list) and max(body["prompt"]) < self._vocabulary:
            return _whole(200, b'{"choices":[{"text":"x"}]}')
        return _whole(400, b'{"error":{"message":"no such token"}}')

    async def _play(self, script: Script, writer: asyncio.StreamWriter) -> bool:
        if isinstance(script, tuple):
            writer.write(_whole(*script))
            return True
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for step in script:
            if step is HANG_UP:
                await writer.drain()
                return False
            if isinstance(step, bytes):
                writer.write(b"%x\r\n%s\r\n" % (len(step), step))
            else:
                assert isinstance(step, float)
                await asyncio.sleep(step)
        writer.write(b"0\r\n\r\n")
        return True


def _whole(status: int, body: bytes) -> bytes:
    head = b"HTTP/1.1 %d Whatever\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


@contextmanager
def fake_server(script: Callable[[int, dict[str, Any]], Script], vocabulary: int = 1000) -> Iterator[FakeServer]:
    """`script(n, body)` is the answer to the n-th streamed request; prompts of ids below `vocabulary` are taken."""
    server = FakeServer(script, vocabulary)
    started, stop, loop = threading.Event(), asyncio.Event(), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(server.serve(started, stop),))
    thread.start()
    try:
        assert started.wait(10)
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
