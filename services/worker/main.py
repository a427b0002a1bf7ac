"""The life of a worker process, the same for both roles.

1. Assemble: load the model, allocate and register KV memory. Not ready yet, but alive.
2. Listen: gRPC (the role's service, block transfer, health), admin pages, NATS.
3. Join: the directory (where there is one) introduces the peers; heartbeats begin; ready.
4. Drain on SIGTERM: take no more, finish what runs, stay until leases are released; what outlasts `drain_s` is handed
   back to its gateways.
5. Leave: say so, stop the engine, hang up.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from services.engine.inbox import Inbox
from services.kvtransfer.connector import Connector, ConnectorLimits
from services.kvtransfer.directory_client import DirectoryClient
from services.runtime import log
from services.runtime.admin import AdminServer
from services.runtime.process import Process
from services.wire.bus import Bus
from services.wire.rpc import RpcServer
from services.worker import gauges
from services.worker.assembly import Assembly, assemble
from services.worker.attempts import AttemptBook
from services.worker.desk import Desk
from services.worker.drain import drain
from services.worker.engine_thread import EngineThread, Life
from services.worker.heartbeat import Heartbeat
from services.worker.outlet import Outlet
from services.worker.settings import WorkerSettings
from services.worker.token_log import TokenLog

SWITCH_INTERVAL_S = 0.0005  # an I/O thread must not hold the interpreter for 5 ms while a step waits for it


@dataclass(frozen=True, slots=True)
class Parts:
    """What a role builds its life and its service on."""

    process: Process
    settings: WorkerSettings
    assembly: Assembly
    connector: Connector
    inbox: Inbox
    outlet: Outlet
    desk: Desk
    tokens: TokenLog


@dataclass(frozen=True, slots=True)
class Role:
    """How the two kinds of worker differ, seen from outside."""

    name: str
    make_life: Callable[[Parts], Life]
    add_service: Callable[[Parts, RpcServer], None]


async def serve(process: Process, settings: WorkerSettings, role: Role) -> None:
    """Runs a worker until it has drained. Raises what keeps it from starting, or what ended a part of it."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    admin = AdminServer(settings.host, settings.admin_port, process.ready)
    await admin.start()
    process.waits_for = "loading the model"
    assembly = await asyncio.to_thread(assemble, settings, process.identity)
    parts = make_parts(process, settings, assembly)
    rpc, address = await listen(parts, role)
    crash: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    life = role.make_life(parts)
    directory = DirectoryClient(settings.directory, role.name, parts.connector) if settings.directory else None
    on_blocks = directory.report if directory is not None else _nobody
    engine = EngineThread(assembly.engine, life, parts.inbox, _crasher(crash), on_blocks)
    admin.debug("blocks", lambda: asyncio.wrap_future(engine.ask(life.books)))
    process.waits_for = "connecting to NATS"
    bus = await Bus.connect(settings.nats_url, process.identity.worker_id)
    heartbeat = Heartbeat(process, settings.served_model or settings.model, address, assembly, engine.pulse, bus)
    engine.start()
    await _work(parts, rpc, bus, heartbeat, directory, crash)
    await heartbeat.publish(leaving=True)
    await asyncio.to_thread(engine.stop)
    await rpc.stop(0.5)
    await parts.connector.close()
    await bus.close()
    await admin.stop()
    if crash.done():
        log.get_logger().error("leaving after a crash", reason=crash.result())
        os._exit(1)  # the state of a dead thread is unknown; a new epoch ends all


def make_parts(process: Process, settings: WorkerSettings, assembly: Assembly) -> Parts:
    """What lies between an assembly and its role. On the event loop."""
    inbox = Inbox()
    tokens = TokenLog(settings.token_log_mb * 2**20)
    outlet = Outlet(process.identity, tokens, asyncio.get_running_loop())
    limits = ConnectorLimits(lease_s=settings.lease_s)
    connector = Connector(assembly.transport, assembly.kv_cache.memory, assembly.layout, inbox.post, limits)
    desk = Desk(process, AttemptBook(settings.renewal_s), tokens, outlet, inbox.post)
    return Parts(process, settings, assembly, connector, inbox, outlet, desk, tokens)


async def listen(parts: Parts, role: Role) -> tuple[RpcServer, str]:
    """The gRPC server, and the address that others reach it at."""
    settings, assembly = parts.settings, parts.assembly
    rpc = RpcServer()
    parts.connector.add_to(rpc.server)
    role.add_service(parts, rpc)
    port = await rpc.start(settings.host, settings.port)
    address = f"{settings.advertised_host}:{port}"
    parts.connector.start(address)
    gauges.INFO.labels(role.name, settings.model, assembly.dtype, settings.transport).set(1)
    log.get_logger().info("listening", address=address, dtype=assembly.dtype, blocks=assembly.pool.num_blocks)
    return rpc, address


async def _work(
    parts: Parts,
    rpc: RpcServer,
    bus: Bus,
    heartbeat: Heartbeat,
    directory: DirectoryClient | None,
    crash: asyncio.Future[str],
) -> None:
    """Serves until draining has ended, or the engine died. Raises what ended a background task."""
    process, settings = parts.process, parts.settings
    work: list[Coroutine[Any, Any, None]] = [
        parts.desk.sweep_forever(),
        parts.outlet.publish_forever(bus),
        heartbeat.run(),
    ]
    if directory is not None:
        work.append(directory.run())
    tasks = [asyncio.create_task(part) for part in work]
    draining: asyncio.Future[Any] = asyncio.create_task(process.draining.wait())
    waited = [draining, *tasks]
    try:
        await rpc.set_serving(True)
        process.waits_for = None
        log.get_logger().info("ready")
        await asyncio.wait([crash, *waited], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():  # none of them ends by itself
                task.result()
        if not crash.done():
            await rpc.set_serving(False)
            await heartbeat.publish()
            await drain(parts.desk, parts.connector.offers, settings.drain_s, process.leave_now)
    finally:
        for each in waited:
            each.cancel()
        await asyncio.gather(*waited, return_exceptions=True)


def _nobody(added: list[bytes], removed: list[bytes]) -> None:
    """Without a directory nobody asks who holds which prefix."""


def _crasher(crash: asyncio.Future[str]) -> Callable[[str], None]:
    loop = asyncio.get_running_loop()

    def note(reason: str) -> None:
        if not crash.done():
            crash.set_result(reason)

    def on_crash(reason: str) -> None:
        loop.call_soon_threadsafe(note, reason)

    return on_crash
