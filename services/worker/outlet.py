"""What the engine thread hands to the event loop, once per turn: tokens to publish and attempts that ended.

The engine thread only collects; the event loop logs the tokens, encodes and publishes the messages in order and answers
the open calls. Neither waits for the other: a step's tokens are encoded while the next step's forward pass, which holds
no interpreter lock, runs.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from services.runtime.process import Identity
from services.wire.bus import Bus
from services.worker import gauges
from services.worker.publisher import Message, TokenEvent, encode
from services.worker.token_log import TokenLog


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt that did not end as it should. `code` is the name of a gRPC status."""

    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """An attempt left the worker; `outcome` is a Failure or what the role answers its call with."""

    handoff_id: str
    outcome: object
    cancelled: bool = False  # given up by its gateway, whatever the outcome says

    @property
    def label(self) -> str:
        """In a metric's words: done, cancelled, or how it failed. Of what is not done nobody will ask the tokens."""
        if isinstance(self.outcome, Failure):
            return self.outcome.code.lower()
        return "cancelled" if self.cancelled else "done"


class Outlet:
    """`token`, `end` and `flush` on the engine thread; the rest on the event loop."""

    def __init__(self, identity: Identity, log: TokenLog, loop: asyncio.AbstractEventLoop) -> None:
        self._identity = identity
        self._log = log
        self._loop = loop
        self._events: list[TokenEvent] = []
        self._ended: list[Ended] = []
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._calls: dict[str, asyncio.Future[object]] = {}

    def token(self, event: TokenEvent) -> None:
        """Something happened to a choice in this turn."""
        self._events.append(event)

    def end(self, handoff_id: str, outcome: object, *, cancelled: bool = False) -> None:
        """An attempt ended in this turn."""
        self._ended.append(Ended(handoff_id, outcome, cancelled))

    def flush(self) -> None:
        """Hands this turn's news over."""
        if not self._events and not self._ended:
            return
        events, self._events = self._events, []
        ended, self._ended = self._ended, []
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, events, ended)

    def call(self, handoff_id: str) -> asyncio.Future[object]:
        """A future for how the attempt ends."""
        future: asyncio.Future[object] = self._loop.create_future()
        self._calls[handoff_id] = future
        return future

    def hang_up(self, handoff_id: str) -> None:
        """Nobody waits for the attempt's end any more."""
        self._calls.pop(handoff_id, None)

    async def publish_forever(self, bus: Bus) -> None:
        """Publishes what is delivered, in order."""
        while True:
            message = await self._messages.get()
            await bus.publish(message.subject, message.payload)

    def _deliver(self, events: list[TokenEvent], ended: list[Ended]) -> None:
        for event in events:
            self._log.append(event.attempt.handoff_id, event.token, event.finish)
        for message in encode(self._identity, events):
            self._messages.put_nowait(message)
        for each in ended:
            gauges.ATTEMPTS.labels(each.label).inc()
            if each.label != "done":
                self._log.forget([each.handoff_id])
            future = self._calls.pop(each.handoff_id, None)
            if future is not None and not future.done():
                future.set_result(each.outcome)
