"""The NATS bus: publish that never blocks a step, subscriptions that survive reconnects.

Core NATS may lose messages. What is published while the link is down is dropped and counted; replay repairs it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from prometheus_client import Counter

from services.runtime import log

PUBLISHED = Counter("pdserve_bus_published_total", "messages handed to NATS")
DROPPED = Counter("pdserve_bus_dropped_total", "messages dropped because NATS was unreachable or refused them")
RECONNECTS = Counter("pdserve_bus_reconnects_total", "times the link to NATS came back")

MAX_PAYLOAD_BYTES = 512 * 1024

Handler = Callable[[str, bytes], Awaitable[None]]


class Bus:
    """One connection to NATS, kept for the life of the process."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._closing = False
        self._on_reconnect: list[Callable[[], None]] = []
        self._log = log.get_logger()

    @classmethod
    async def connect(cls, urls: str, name: str, timeout_s: float = 30.0) -> Bus:
        """Connects to one of the comma-separated servers, retrying until `timeout_s`; raises TimeoutError."""
        client = Client()
        bus = cls(client)
        try:
            async with asyncio.timeout(timeout_s):
                await client.connect(
                    servers=urls.split(","),
                    name=name,
                    allow_reconnect=True,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=0.1,  # type: ignore[arg-type]  # seconds; only slept on
                    connect_timeout=2,
                    ping_interval=2,
                    max_outstanding_pings=2,
                    pending_size=0,
                    error_cb=bus._error,
                    reconnected_cb=bus._reconnected,
                    disconnected_cb=bus._disconnected,
                )
        except (TimeoutError, OSError, NatsError) as error:
            await client.close()
            raise TimeoutError(f"no NATS server at {urls} within {timeout_s} s") from error
        return bus

    @property
    def connected(self) -> bool:
        """Whether the link is up right now."""
        return bool(self._client.is_connected)

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Calls `callback` each time the link comes back: whatever was published meanwhile is lost."""
        self._on_reconnect.append(callback)

    async def publish(self, subject: str, payload: bytes) -> None:
        """Hands a message over; never raises and never waits for the network. Losses are counted."""
        if not self._client.is_connected:
            DROPPED.inc()
            return
        try:
            await self._client.publish(subject, payload)
            PUBLISHED.inc()
        except (NatsError, OSError, ValueError):
            DROPPED.inc()

    async def subscribe(self, subject: str, handler: Handler) -> None:
        """Calls `await handler(subject, payload)` for each message, in the order of arrival."""

        async def on_message(message: Msg) -> None:
            await handler(message.subject, message.data)

        await self._client.subscribe(subject, cb=on_message)
        await self._client.flush()

    async def close(self) -> None:
        """Sends what is buffered and leaves; idempotent."""
        if self._client.is_closed:
            return
        self._closing = True
        with contextlib.suppress(NatsError, OSError, TimeoutError):
            await asyncio.wait_for(self._client.flush(), 1.0)
        await self._client.close()

    async def _error(self, error: Exception) -> None:
        self._log.warning("bus error", error=repr(error))

    async def _disconnected(self) -> None:
        if not self._closing:
            self._log.warning("bus link lost")

    async def _reconnected(self) -> None:
        RECONNECTS.inc()
        self._log.info("bus link is back")
        for callback in self._on_reconnect:
            callback()
