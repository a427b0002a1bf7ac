"""uvicorn's HTTP protocol with bounds: a head has a size and a time, and what is no HTTP gets an OpenAI error object.

A request's head is gathered here, up to its blank line, before the parser sees it; offers to upgrade (h2c, which Java
clients make on every cleartext call) are taken out of it, since the parser would stop there and lose the body.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
HEAD_S = 30.0  # from the connection, or a request's first byte, to its blank line
_END = b"\r\n\r\n"
_UPGRADE = re.compile(rb"\r\n(?:upgrade|http2-settings):[^\r\n]*", re.IGNORECASE)
_REASONS = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._head = bytearray()
        self._begun = False  # the parser is in the middle of a request
        self._num_head_bytes = -1  # of a head that the parser itself is reading; -1: it reads none
        self._overdue: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is here; its first request is due."""
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        self._head_is_here()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes came, at any border."""
        if self.transport.is_closing():
            return
        if self._begun:
            if self._num_head_bytes >= 0:
                self._num_head_bytes += len(data)
                if self._num_head_bytes > MAX_HEAD_BYTES:
                    self._refuse(431, f"the headers exceed {MAX_HEAD_BYTES} bytes")
                    return
            super().data_received(data)
            return
        if not self._head:
            self._unset_keepalive_if_required()
            self._expect_head()
        seen = max(0, len(self._head) - len(_END) + 1)
        self._head += data
        end = self._head.find(_END, seen)
        if (end if end >= 0 else len(self._head)) > MAX_HEAD_BYTES:
            self._refuse(431, f"the headers exceed {MAX_HEAD_BYTES} bytes")
        elif end >= 0:
            head, rest = bytes(self._head[:end]), bytes(self._head[end:])
            self._head.clear()
            super().data_received(_UPGRADE.sub(b"", head) + rest)
        elif not _may_be_http(self._head):
            self.send_400_response("Invalid HTTP request received.")

    def on_message_begin(self) -> None:
        """The parser has seen a request's first byte."""
        self._begun, self._num_head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The parser has seen the blank line."""
        self._num_head_bytes = -1
        self._head_is_here()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The parser has seen the request's last byte."""
        self._begun = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is refused, and the connection ends."""
        self._refuse(400, msg)

    def _refuse(self, status: int, message: str) -> None:
        self._head_is_here()
        self._head.clear()
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        body = orjson.dumps({"error": error})
        self.transport.write(
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
            % (status, _REASONS[status], len(body), body)
        )
        self.transport.close()

    def _expect_head(self) -> None:
        if self._overdue is None:
            self._overdue = self.loop.call_later(HEAD_S, self._too_late)

    def _head_is_here(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    def _too_late(self) -> None:
        self._overdue = None
        if not self.transport.is_closing():
            self._refuse(408, f"the request's headers did not come within {HEAD_S:.0f} s")


def _may_be_http(head: bytearray) -> bool:
    """False for what cannot become a request: a TLS greeting, for one, which would be waited for."""
    return all(byte in b"ABCDEFGHIJKLMNOPQRSTUVWXYZ-_ \r\n" for byte in head[:8].partition(b" ")[0])
