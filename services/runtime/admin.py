"""The admin endpoint of a process: /metrics, /live, /ready and /debug/*, apart from the port that serves work."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

Scope = dict[str, Any]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Answer = tuple[int, str, bytes]  # status, content type, body


class AdminServer:
    """Serves a process's own state over HTTP on the running event loop."""

    def __init__(self, host: str, port: int, ready: Callable[[], str | None]) -> None:
        """`ready()` returns None when the process can work, else what it still waits for."""
        self._ready = ready
        self._debug: dict[str, Callable[[], Awaitable[object]]] = {}
        config = uvicorn.Config(
            self._app,
            host=host,
            port=port,
            log_level="warning",
            access_log=False,
            lifespan="off",
            loop="none",
            interface="asgi3",
            ws="none",
        )
        self._server = uvicorn.Server(config)
        self._server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        self._task: asyncio.Task[None] | None = None

    def debug(self, name: str, view: Callable[[], Awaitable[object]]) -> None:
        """Adds GET /debug/NAME, answering `view()` as JSON."""
        self._debug[name] = view

    async def start(self) -> int:
        """Begins to serve; returns the port really taken."""
        self._task = asyncio.create_task(self._server._serve())  # serve() would take over the signals
        while not self._server.started:
            if self._task.done():
                await self._task
                raise OSError("the admin server did not start")
            await asyncio.sleep(0.005)
        return int(self._server.servers[0].sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Ends the server; idempotent."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task

    async def _app(self, scope: Scope, receive: object, send: Send) -> None:
        status, kind, body = await self._answer(scope["method"], scope["path"])
        headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, method: str, path: str) -> Answer:
        if method not in ("GET", "HEAD"):
            return 405, "text/plain", b"only GET\n"
        if path == "/metrics":
            return 200, CONTENT_TYPE_LATEST, generate_latest()
        if path == "/live":
            return 200, "text/plain", b"alive\n"
        if path == "/ready":
            waits_for = self._ready()
            return (200, "text/plain", b"ready\n") if waits_for is None else (503, "text/plain", waits_for.encode())
        view = self._debug.get(path.removeprefix("/debug/")) if path.startswith("/debug/") else None
        if view is None:
            return 404, "text/plain", b"no such page\n"
        return 200, "application/json", json.dumps(await view()).encode()
