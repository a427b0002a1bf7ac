"""The gateway's parts, joined: what routes are served from."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from services.gateway.census import Census
from services.gateway.dispatch import Dispatcher
from services.gateway.intake import Limits
from services.gateway.keeper import Keeper
from services.gateway.membership import Membership, Role
from services.gateway.messages import parse_token_batch
from services.gateway.settings import GatewaySettings
from services.gateway.timeline import Timelines
from services.gateway.tokenizer import Tokenizer
from services.runtime import model_store
from services.runtime.process import Identity
from services.wire import subjects
from services.wire.bus import Bus


class Gateway:
    """One gateway's state. Nothing runs before `running()`."""

    def __init__(
        self, settings: GatewaySettings, identity: Identity, tokenizer: Tokenizer, folder: Path, bus: Bus
    ) -> None:
        self.settings = settings
        self.identity = identity
        self.tokenizer = tokenizer
        self.public_name = settings.public_name
        self.timelines = Timelines(settings.num_timelines)
        self.draining = False
        self.num_live = 0  # generations in flight
        self.created = int(time.time())
        self._bus = bus
        self._model = model_store.read_model_info(folder)
        fingerprint = model_store.tokenizer_fingerprint(folder)
        self.membership = Membership(
            settings.model, fingerprint, time.monotonic, lambda: bus.connected, settings.heartbeat_silence_s
        )
        self._keeper = Keeper(identity, settings, self.membership, time.monotonic)
        self._census = Census(self.membership, identity, settings.renew_deadline_s)
        self.dispatcher = Dispatcher(settings, self.membership, self._keeper, self._census)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Listens to the bus and looks after workers and attempts while the body runs."""
        await self._bus.subscribe(subjects.token_subject(self.identity.worker_id, self.identity.epoch), self._tokens)
        self._bus.on_reconnect(self._keeper.replay_all)
        await self._census.listen(self._bus)
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(self._keeper.run())
            asking = tasks.create_task(self._census.run())
            try:
                yield
            finally:
                await self._keeper.close()
                keeping.cancel()
                asking.cancel()

    def ready(self) -> str | None:
        """None where work can be taken, else what is missing."""
        if self.draining:
            return "draining"
        if not self._bus.connected:
            return "NATS is unreachable"
        if not any(not info.draining for info in self.membership.workers(Role.DECODE)):
            return "no decode worker is known"
        return None

    def limits(self) -> Limits:
        """What the pools can hold now. The context is the workers' (the model's own, before any was seen)."""
        pools = [info.load.num_blocks for info in self.membership.workers(Role.DECODE)]
        context = self.membership.max_model_len or self._model.max_model_len
        return Limits(context, max(pools, default=0) * self.settings.block_size, self._model.vocab_size)

    async def _tokens(self, _: str, payload: bytes) -> None:
        batch = parse_token_batch(payload)
        if batch is not None:
            self._keeper.deliver(batch)
