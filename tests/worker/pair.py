"""A prefill and a decode worker in one process, over a real transport and gRPC; no NATS, no gateway, no directory."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.decode.server import add_service as add_decode
from services.decode.worker import DecodeLife
from services.engine.scheduler import Scheduler
from services.gateway.membership import Role as GatewayRole
from services.gateway.membership import WorkerInfo, WorkerKey
from services.gateway.messages import AttemptRef
from services.gateway.request import GenerationRequest, Priority, Sampling, Service
from services.gateway.workers import DecodeResult, PrefillResult, WorkerLink
from services.prefill.server import add_service as add_prefill
from services.prefill.worker import PrefillLife
from services.runtime.process import Identity, Process
from services.worker.assembly import assemble
from services.worker.engine_thread import EngineThread, Life
from services.worker.main import Role, listen, make_parts
from services.worker.settings import WorkerSettings

ROLES = {"prefill": Role("prefill", PrefillLife, add_prefill), "decode": Role("decode", DecodeLife, add_decode)}
GATEWAY = Identity("gateway", "0")


@dataclass(frozen=True, slots=True)
class Generated:
    """What became of one prompt."""

    token_ids: list[int]
    prefill: PrefillResult
    decode: DecodeResult


@dataclass(frozen=True, slots=True)
class Worker:
    """One side."""

    info: WorkerInfo
    link: WorkerLink
    scheduler: Scheduler
    engine: EngineThread
    life: Life
    model: str  # class of what computes

    async def books(self) -> dict[str, Any]:
        """Proven by the engine thread."""
        return dict(await asyncio.wrap_future(self.engine.ask(self.life.books)))  # type: ignore[call-overload]


@dataclass(frozen=True, slots=True)
class Pair:
    """Both, and the way to ask them what a gateway asks."""

    prefill: Worker
    decode: Worker

    async def generate(self, prompt: Sequence[int], num_new: int) -> Generated:
        """Greedy, to the last token; the tokens as decode replays them."""
        ref, request = ask(prompt, num_new)
        prefilled, decoded = await asyncio.gather(
            self.prefill.link.prefill(ref, request, (), self.decode.info, 60.0, lambda: None),
            self.decode.link.decode(ref, request, (), self.prefill.info, 60.0, lambda: None),
        )
        (replayed,) = await self.decode.link.replay({ref.handoff_id: 0}, 5.0)
        return Generated([token.token_id for token in replayed.event.tokens], prefilled, decoded)


def ask(prompt: Sequence[int], num_new: int) -> tuple[AttemptRef, GenerationRequest]:
    """A request under a fresh handoff id."""
    handoff_id = f"{random.getrandbits(64):x}"
    sampling = Sampling(0.0, 0, 1.0, 0.0, 1, num_new, 0, (), ignore_eos=True, logprobs=False, num_top_logprobs=0)
    service = Service("", Priority.INTERACTIVE, 0, 0, b"", "")
    return AttemptRef(handoff_id, 1, handoff_id), GenerationRequest(handoff_id, tuple(prompt), sampling, service, 60.0)


@asynccontextmanager
async def pair(folder: Path, transport: str = "nixl", **settings: object) -> AsyncIterator[Pair]:
    """Two workers of the model in `folder`, in float32."""
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(_worker(role, folder, transport, settings)) for role in ROLES]
        yield Pair(*workers)


@asynccontextmanager
async def _worker(name: str, folder: Path, transport: str, more: dict[str, object]) -> AsyncIterator[Worker]:
    chosen = {"model": str(folder), "dtype": "float32", "transport": transport, "port": 0, "renewal_s": 60, **more}
    settings = WorkerSettings.model_validate(chosen)
    process = Process(settings, name)
    assembly = await asyncio.to_thread(assemble, settings, process.identity)
    parts = make_parts(process, settings, assembly)
    rpc, address = await listen(parts, ROLES[name])
    life = ROLES[name].make_life(parts)
    crashes: list[str] = []
    engine = EngineThread(assembly.engine, life, parts.inbox, crashes.append, lambda added, removed: None)
    engine.start()
    key = WorkerKey(process.identity.worker_id, process.identity.epoch)
    info = WorkerInfo(key, GatewayRole(name), address, str(folder))
    link = WorkerLink(info, GATEWAY)
    try:
        yield Worker(info, link, assembly.scheduler, engine, life, type(assembly.engine.runner._model).__name__)  # type: ignore[attr-defined]
    finally:
        await link.close()
        await asyncio.to_thread(engine.stop)
        await rpc.stop(0)
        await parts.connector.close()
    assert not crashes, crashes
