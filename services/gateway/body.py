"""Request bodies: read whole, within a size and a time, refused by their stated length before a byte is read."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.errors import BodyTooLargeError, SlowBodyError

SWALLOW_S = 2.0  # a refused client that still sends is listened to for so long, or its kernel may drop our answer
SWALLOW_BYTES = 256 * 2**20


async def read(request: Request, most_bytes: int, timeout_s: float) -> bytes:
    """The body. Raises BodyTooLargeError, SlowBodyError, starlette's ClientDisconnect."""
    stated = request.headers.get("content-length", "")
    if stated.isascii() and stated.isdigit() and int(stated) > most_bytes:
        raise _too_large(most_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                size += len(part)
                if size > most_bytes:
                    raise _too_large(most_bytes)
                parts.append(part)
    except TimeoutError:
        raise SlowBodyError(f"the body did not arrive within {timeout_s:g} s") from None
    return b"".join(parts)


class Refusal(Response):
    """An answer to a request whose body was not read; swallows some of it and closes the connection."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the whole answer first, then listens until the client is done or has had its time."""
        headers = [*self.raw_headers, (b"connection", b"close")]
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        if not any(name == b"expect" for name, _ in scope["headers"]):  # who asked first will not send it
            await _swallow(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _swallow(receive: Receive) -> None:
    size = 0
    try:
        async with asyncio.timeout(SWALLOW_S):
            while size < SWALLOW_BYTES:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
                size += len(message.get("body", b""))
    except TimeoutError:
        return


def _too_large(most_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the body must not be larger than {most_bytes} bytes", code="request_too_large")
