"""A process that holds one end of a transport and does what a test tells it, one command at a time."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from services.kvtransfer.fake_transport import FakeFabric, FakeTransport
from services.kvtransfer.layout import KVLayout
from services.kvtransfer.transport import Endpoint, PeerRef, Transport

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["services.kvtransfer.shm_transport", "services.kvtransfer.connector"])

BLOCK_BYTES = 256 * 1024
LAYOUT = KVLayout("float32", 16, 2, 4, 256, BLOCK_BYTES)


def make(kind: str, worker_id: str, epoch: str, fabric: FakeFabric | None) -> Transport:
    if kind == "nixl":
        from services.kvtransfer.nixl_transport import NixlTransport

        return NixlTransport(worker_id, epoch)
    if kind == "shm":
        from services.kvtransfer.shm_transport import ShmTransport

        return ShmTransport(worker_id, epoch)
    assert fabric is not None
    return FakeTransport(worker_id, epoch, fabric)


class End:
    """One end of a transport, in terms that can cross a pipe."""

    def __init__(self, kind: str, me: PeerRef, num_blocks: int, fabric: FakeFabric | None = None) -> None:
        self.transport = make(kind, me.worker_id, me.epoch, fabric)
        self.pool = self.transport.allocate(LAYOUT, num_blocks).numpy().reshape(num_blocks, BLOCK_BYTES)
        self.transfers: list[Any] = []

    def endpoint(self) -> Endpoint:
        return self.transport.endpoint("")

    def fill(self, value: int, blocks: list[int] | None = None) -> None:
        """Each block gets its own bytes: (value + block) % 251 everywhere."""
        for block in range(len(self.pool)) if blocks is None else blocks:
            self.pool[block] = (value + block) % 251

    def set_bytes(self, blocks: list[int], value: int) -> None:
        self.pool[blocks] = value

    def bytes_of(self, blocks: list[int]) -> list[int | None]:
        """The byte that each block is full of; None for a block of several values."""
        values = []
        for block in blocks:
            first = int(self.pool[block, 0])
            values.append(first if bool(np.all(self.pool[block] == first)) else None)
        return values

    def connect(self, endpoint: Endpoint) -> None:
        warm_up = self.transport.connect(endpoint)
        if warm_up is not None:
            self.transfers.append(warm_up)
            self.wait(len(self.transfers) - 1, 10.0)

    def disconnect(self, peer: PeerRef) -> None:
        self.transport.disconnect(peer)

    def read(self, peer: PeerRef, remote: list[int], local: list[int]) -> int:
        self.transfers.append(self.transport.read(peer, remote, local))
        return len(self.transfers) - 1

    def num_bytes(self, transfer: int) -> int:
        return int(self.transfers[transfer].num_bytes)

    def wait(self, transfer: int, timeout_s: float) -> tuple[str, bool, bool]:
        """(state, disconnected, settled), at the latest after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.transport.poll(self.transfers[transfer])
            if status.state.value != "pending" or time.monotonic() > deadline:
                return status.state.value, status.disconnected, status.settled
            time.sleep(0.001)

    def abandon(self, transfer: int) -> bool:
        return self.transport.abandon(self.transfers[transfer])

    def active(self) -> str:
        return self.transport.active()

    def pool_size(self) -> int:
        return int(self.pool.size)

    def close(self) -> None:
        self.transport.close()


def _serve(pipe: Connection, kind: str, me: PeerRef, num_blocks: int, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    end = End(kind, me, num_blocks)
    pipe.send(None)
    while True:
        try:
            while not pipe.poll(0.0005):
                end.transport.serve()
            name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((getattr(end, name)(*arguments), None))
        except Exception as error:  # noqa: BLE001
            pipe.send((None, error))
        if name == "close":
            return


class RemoteEnd:
    """An `End` in a process of its own."""

    def __init__(self, kind: str, me: PeerRef, num_blocks: int, environment: dict[str, str] | None = None) -> None:
        self.me = me
        self._pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_serve, args=(theirs, kind, me, num_blocks, environment or {}))
        self._process.start()
        theirs.close()
        self._started = False

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self._wait_for_start()
            self._pipe.send((name, arguments))
            assert self._pipe.poll(30), f"{self.me.worker_id} does not answer {name}"
            answer, error = self._pipe.recv()
            if error is not None:
                raise error
            return answer

        return call

    def _wait_for_start(self) -> None:
        if not self._started:
            assert self._pipe.poll(60), f"{self.me.worker_id} does not start"
            self._pipe.recv()
            self._started = True

    def freeze(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(10)

    def end(self) -> None:
        """Whatever state it is in, it is gone afterwards; idempotent."""
        if self._pipe.closed:
            return
        if self._process.is_alive():
            self.thaw()
            with contextlib.suppress(OSError, EOFError):
                self.close()
            self._process.join(5)
        if self._process.is_alive():
            self.kill()
        self._process.close()
        self._pipe.close()


class LocalEnd(End):
    """An `End` in this process, whose freezing and killing the fabric plays."""

    def __init__(self, me: PeerRef, num_blocks: int, fabric: FakeFabric) -> None:
        super().__init__("fake", me, num_blocks, fabric)
        self.me = me
        self._fabric = fabric

    def freeze(self) -> None:
        self._fabric.frozen.add(self.me.agent_name)

    def thaw(self) -> None:
        self._fabric.frozen.discard(self.me.agent_name)

    def kill(self) -> None:
        self._fabric.dead.add(self.me.agent_name)

    def end(self) -> None:
        self.close()
