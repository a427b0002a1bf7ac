"""A worker without an engine: pool, connector and gRPC server, whose inbox a test reads. In this process or its own."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import numpy as np

from services.kvtransfer.connector import Connector, ConnectorLimits, make_transport
from services.kvtransfer.fake_transport import FakeFabric, FakeTransport
from services.kvtransfer.layout import KVLayout
from services.kvtransfer.leases import LeaseClosed
from services.kvtransfer.messages import BlockPull, ReadyBlock
from services.kvtransfer.transport import PeerRef
from services.wire.rpc import RpcServer
from tests.contracts.peer import CONTEXT

LAYOUT = KVLayout("float32", 16, 2, 1, 32, 8192, weights_fingerprint="w", tokenizer_fingerprint="t")
M = TypeVar("M")


class Worker:
    """`messages`: what was posted to the inbox; `closed`: leases that ended."""

    def __init__(
        self,
        worker_id: str,
        epoch: str = "e1",
        *,
        kind: str = "fake",
        fabric: FakeFabric | None = None,
        num_blocks: int = 32,
        layout: KVLayout = LAYOUT,
        limits: ConnectorLimits | None = None,
    ) -> None:
        self.ref = PeerRef(worker_id, epoch)
        self.layout = layout
        self.limits = limits
        self.transport = (
            FakeTransport(worker_id, epoch, fabric) if fabric is not None else make_transport(kind, worker_id, epoch)
        )
        self.pool = self.transport.allocate(layout, num_blocks)
        self.blocks = self.pool.numpy().reshape(num_blocks, layout.block_bytes)
        self.messages: list[Any] = []
        self.closed: list[LeaseClosed] = []

    async def start(self, port: int = 0) -> Worker:
        self.connector = Connector(self.transport, self.pool, self.layout, self.messages.append, self.limits)
        self.server = RpcServer()
        self.connector.add_to(self.server.server)
        self.port = await self.server.start("127.0.0.1", port)
        self.ref = self.connector.start(f"127.0.0.1:{self.port}").peer
        self.offers, self.fetches = self.connector.offers, self.connector.fetches
        self._ticking = asyncio.create_task(self._tick())
        return self

    async def stop(self) -> None:
        self._ticking.cancel()
        await self.connector.close()
        await self.server.stop(0)

    async def _tick(self) -> None:
        while True:
            self.closed += self.offers.tick(time.monotonic())
            await asyncio.sleep(0.01)

    async def message(self, kind: type[M], timeout_s: float = 10.0) -> M:
        """The next message of that kind; those before it stay."""
        found = await self.some(lambda: [m for m in self.messages if isinstance(m, kind)], timeout_s, kind.__name__)
        self.messages.remove(found[0])
        return found[0]

    async def some(self, look: Callable[[], list[M]], timeout_s: float = 10.0, what: str = "") -> list[M]:
        deadline = time.monotonic() + timeout_s
        while not (found := look()):
            assert time.monotonic() < deadline, f"no {what} within {timeout_s} s; there are {self.messages}"
            await asyncio.sleep(0.005)
        return found

    async def ended(self, timeout_s: float = 10.0) -> LeaseClosed:
        """The next lease that ended."""
        return (await self.some(lambda: self.closed[:1], timeout_s, "ended lease")) and self.closed.pop(0)

    async def warm_anew(self, holder: Worker) -> str | None:
        """First contact again, whatever was made before."""
        await self.fetches.forget(holder.ref)
        return await self.fetches.warm_up(holder.ref)

    def fill(self, block_ids: Sequence[int], value: int) -> None:
        """Block i of the list is full of `value + i`."""
        for i, block_id in enumerate(block_ids):
            self.blocks[block_id] = value + i

    def bytes_of(self, block_ids: Sequence[int]) -> list[int | None]:
        """The byte each block is full of; None for several."""
        return [int(b[0]) if bool(np.all(b == b[0])) else None for b in (self.blocks[i] for i in block_ids)]

    def fetch(self, handoff_id: str, ready: Sequence[ReadyBlock], local: Sequence[int]) -> None:
        pulls = [BlockPull(b.index, b.block_id, i, b.checksum) for b, i in zip(ready, local, strict=True)]
        self.fetches.fetch(handoff_id, pulls)


def _serve(pipe: Connection, worker_id: str, options: dict[str, Any], environment: dict[str, str]) -> None:
    os.environ.update(environment)

    async def body() -> None:
        worker = await Worker(worker_id, **options).start()
        pipe.send(worker.ref)
        while True:
            try:
                path, arguments = await asyncio.to_thread(pipe.recv)
            except EOFError:
                return
            target: Any = worker
            for name in path.split("."):
                target = getattr(target, name)
            answer = target(*arguments)
            pipe.send(await answer if asyncio.iscoroutine(answer) else answer)
            if path == "stop":
                return

    asyncio.run(body())


class WorkerProcess:
    """A Worker in a process of its own; `tell("fetches.cancel", "h")` calls there."""

    def __init__(self, worker_id: str, options: dict[str, Any], environment: dict[str, str]) -> None:
        self._pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_serve, args=(theirs, worker_id, options, environment))
        self._process.start()
        theirs.close()
        self._worker_id = worker_id
        assert self._process.pid is not None
        self.pid = self._process.pid

    @cached_property
    def ref(self) -> PeerRef:
        """Who it is, once it has started."""
        assert self._pipe.poll(60), f"{self._worker_id} does not start"
        ref: PeerRef = self._pipe.recv()
        return ref

    def tell(self, path: str, *arguments: Any) -> Any:
        assert self.ref
        self._pipe.send((path, arguments))
        assert self._pipe.poll(30), f"{self.ref.worker_id} does not answer {path}"
        return self._pipe.recv()

    def leave(self, timeout_s: float) -> int | None:
        """Stops the worker; returns the exit status, None where it has not left in time."""
        self.tell("stop")
        self._process.join(timeout_s)
        return self._process.exitcode

    def end(self) -> None:
        if self._process.is_alive():
            os.kill(self.pid, signal.SIGCONT)
            with suppress(OSError, EOFError, AssertionError):
                self.tell("stop")
            self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(5)
        self._pipe.close()
