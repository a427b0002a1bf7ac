"""Keeps the membership true: brings it the heartbeats, and asks over gRPC where they leave doubt."""

from __future__ import annotations

import asyncio

from services.gateway.membership import Membership, WorkerInfo
from services.gateway.messages import parse_heartbeat
from services.gateway.workers import who_is_at
from services.runtime.process import Identity
from services.wire import subjects
from services.wire.bus import Bus

ASK_EVERY_S = 0.5


class Census:
    """Asks on its own account and on that of callers with a doubt."""

    def __init__(self, membership: Membership, identity: Identity, deadline_s: float) -> None:
        self._membership = membership
        self._identity = identity
        self._deadline_s = deadline_s

    async def listen(self, bus: Bus) -> None:
        """Subscribes to heartbeats."""
        await bus.subscribe(subjects.HEARTBEATS, self._heard)
        bus.on_reconnect(self._membership.thaw)

    async def run(self) -> None:
        """Works until cancelled."""
        while True:
            await asyncio.sleep(ASK_EVERY_S)
            await asyncio.gather(*(self.ask(info) for info in self._membership.asking()))

    async def ask(self, info: WorkerInfo) -> bool:
        """Whether the worker is alive, as this very process; what is found is noted in the membership."""
        answer = await who_is_at(info, self._identity, self._deadline_s)
        self._membership.settle(info, answer)
        return answer == info.key

    async def _heard(self, _: str, payload: bytes) -> None:
        info = parse_heartbeat(payload)
        if info is not None:
            self._membership.observe(info)
