"""HTTP/1.1 connections that cost little: made before they are needed, no copy of what they read, httptools to parse.

A general client (httpx2) spends several times as long on each event. On a machine that the server shares, that is time
taken from the server; on any machine, events that wait for the client look late.
"""

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from typing import cast
from urllib.parse import urlsplit

import httptools

FRESH_S = 2.0  # a connection unused for longer may be about to be closed by the server (uvicorn: after 5 s)
MOST_ERROR_BYTES = 4096
OnBody = Callable[[bytes, float], None]


class WireError(Exception):
    """The connection broke, or what came over it is not HTTP."""


class Target:
    """Where requests go, and how they begin. Raises ValueError where the URL is not one of HTTP."""

    def __init__(self, base_url: str, endpoint: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not the URL of a server: {base_url!r}")
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        own = {
            "host": parts.netloc.rpartition("@")[2],
            "content-type": "application/json",
            "accept": "text/event-stream",
        }
        merged = own | {name.lower(): value for name, value in headers.items()}
        if any(mark in text for pair in merged.items() for text in pair for mark in "\r\n"):
            raise ValueError("a header must be one line")
        lines = [
            f"POST {parts.path.rstrip('/')}{endpoint} HTTP/1.1",
            *(f"{key}: {value}" for key, value in merged.items()),
        ]
        self._head = "\r\n".join(lines).encode("latin-1")

    def request(self, body: bytes) -> bytes:
        """All bytes of a request."""
        return self._head + b"\r\ncontent-length: %d\r\n\r\n" % len(body) + body


class Connection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self) -> None:
        self.closed = False
        self.reusable = True
        self.last_used_s: float | None = None
        self.sent_s: float | None = None  # of the last request: just before its bytes went to the socket
        self.status = 0
        self.error_body = b""
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._on_body: OnBody | None = None
        self._ended: asyncio.Future[None] | None = None
        self._now_s = 0.0

    async def exchange(self, request: bytes, on_body: OnBody) -> None:
        """Sends a request; returns at the end of the answer. Raises WireError.

        `on_body(bytes, time)` gets the body of a 200; of any other answer the beginning is in `error_body`.
        """
        self.sent_s, self.status, self.error_body, self.reusable = None, 0, b"", False
        if self.closed or self._transport is None:
            raise WireError("the connection was closed before the request was sent")
        self._parser = httptools.HttpResponseParser(self)
        self._on_body = on_body
        self._ended = asyncio.get_running_loop().create_future()
        self.sent_s = time.perf_counter()
        self._transport.write(request)
        try:
            await self._ended
        finally:
            self._parser = self._on_body = self._ended = None
            self.last_used_s = time.perf_counter()

    def close(self) -> None:
        """Closes at once."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        self._transport = cast(asyncio.Transport, transport)  # of a socket; uvloop's has another base class

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        self._now_s = time.perf_counter()
        if self._parser is None:
            self.close()  # bytes that nobody asked for
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(WireError(f"not an HTTP answer: {error}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        self.closed = True
        when = f"in the middle of the answer (status {self.status})" if self.status else "before an answer"
        self._end(WireError(f"the server hung up {when}" + (f": {exc}" if exc else "")))

    # httptools

    def on_headers_complete(self) -> None:
        """Called by httptools."""
        assert self._parser is not None
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Called by httptools."""
        if self.status == 200 and self._on_body is not None:
            self._on_body(body, self._now_s)
        elif len(self.error_body) < MOST_ERROR_BYTES:
            self.error_body += body

    def on_message_complete(self) -> None:
        """Called by httptools."""
        assert self._parser is not None
        if 100 <= self.status < 200:
            return  # the answer is still to come
        self.reusable = self._parser.should_keep_alive()
        self._end(None)

    def _end(self, error: WireError | None) -> None:
        if self._ended is None or self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)


class Pool:
    """Idle connections to one target; the one used last is taken first."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._idle: list[Connection] = []

    async def connect(self) -> Connection:
        """A new connection, with TLS where the target wants it. Raises OSError."""
        loop = asyncio.get_running_loop()
        target = self.target
        name = target.host if target.tls else None
        made = await loop.create_connection(Connection, target.host, target.port, ssl=target.tls, server_hostname=name)
        return made[1]

    async def warm(self, num_connections: int) -> None:
        """Connects until so many are idle. Raises OSError."""
        self._idle = [connection for connection in self._idle if not connection.closed]
        while len(self._idle) < num_connections:
            self._idle.insert(0, await self.connect())

    def take(self) -> Connection | None:
        """An idle connection that the server will not be about to close; None where there is none."""
        while self._idle:
            connection = self._idle.pop()
            if connection.closed:
                continue
            if connection.last_used_s is None or time.perf_counter() - connection.last_used_s < FRESH_S:
                return connection
            connection.close()
        return None

    def give(self, connection: Connection) -> None:
        """Back after use; closed where it cannot serve again."""
        if connection.reusable and not connection.closed:
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Closes what is idle."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
