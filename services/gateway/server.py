"""The gateway process.

1. The admin port answers at once; then load the tokenizer, join the bus, listen on HTTP. Ready once a decode worker
   is known.
2. SIGTERM: not ready any more, no new connections, running streams finish within `drain_s`; then leave.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any

import uvicorn

from services.gateway.api import make_app
from services.gateway.gateway import Gateway
from services.gateway.http_protocol import BoundedHttpProtocol
from services.gateway.settings import GatewaySettings
from services.gateway.tokenizer import Tokenizer
from services.runtime import log, model_store, process, settings
from services.runtime.admin import AdminServer
from services.wire.bus import Bus

KEEP_ALIVE_S = 120  # longer than common proxies', which otherwise send into a connection that we just closed


class _Server(uvicorn.Server):
    """A uvicorn server that says when it listens, and leaves the signals alone."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    async def run_here(self) -> None:
        """Serves until `should_exit`."""
        await self._serve()  # serve() would take over the signals


async def serve(options: GatewaySettings, life: process.Process) -> None:
    """Serves until told to drain and everything has ended. Raises ModelStoreError, TimeoutError (no NATS), OSError."""
    gateway: Gateway | None = None
    admin = AdminServer(
        options.host, options.admin_port, lambda: life.ready() or (gateway.ready() if gateway else "starting")
    )
    await admin.start()
    life.waits_for = "the tokenizer is loading"
    folder = await asyncio.to_thread(model_store.resolve, options.model)
    tokenizer = await asyncio.to_thread(Tokenizer, folder)
    life.waits_for = "NATS is unreachable"
    bus = await Bus.connect(options.nats_url, life.identity.worker_id)
    try:
        gateway = Gateway(options, life.identity, tokenizer, folder, bus)
        async with gateway.running():
            await _serve_http(options, life, gateway)
    finally:
        await bus.close()
        await admin.stop()


async def _serve_http(options: GatewaySettings, life: process.Process, gateway: Gateway) -> None:
    config = uvicorn.Config(
        make_app(gateway),
        host=options.host,
        port=options.port,
        loop="none",
        http=BoundedHttpProtocol,
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(options.drain_s)),
    )
    server = _Server(config)
    serving = asyncio.create_task(server.run_here())
    listening = asyncio.create_task(server.listening.wait())
    await asyncio.wait((serving, listening), return_when=asyncio.FIRST_COMPLETED)
    listening.cancel()
    if server.started:
        port = server.servers[0].sockets[0].getsockname()[1]
        log.get_logger().info("gateway listens", url=f"http://{options.host}:{port}", model=gateway.public_name)
        life.waits_for = None
        draining = asyncio.create_task(life.draining.wait())
        await asyncio.wait((serving, draining), return_when=asyncio.FIRST_COMPLETED)
        draining.cancel()
        gateway.draining = True
        server.should_exit = True
        leaving = asyncio.create_task(life.leave_now.wait())
        await asyncio.wait((serving, leaving), return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        server.force_exit = True
    await serving


def main() -> None:
    """`python -m services.gateway`: runs the process until SIGTERM."""
    hidden: dict[str, Any] = {"torch": None}  # transformers would load it; nothing here needs it
    sys.modules.update(hidden)
    options = settings.load(GatewaySettings, "gateway")
    process.run(options, "gateway", lambda life: serve(options, life))
