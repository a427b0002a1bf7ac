"""The processes that `bench.transfer` measures: holders and pullers of each transport, and a plain memcpy.

CPU time is that of a whole process, user and system: of the puller during the pull, of the holder while it serves.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import multiprocessing
import os
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from services.kvtransfer.checksum import BlockMemory
from services.kvtransfer.connector import make_transport
from services.kvtransfer.layout import KVLayout
from services.kvtransfer.pulls import BUSY_POLL_S
from services.kvtransfer.serve_beat import ServeBeat
from services.kvtransfer.transport import Endpoint, PeerRef, Transfer, TransferState, Transport

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["services.kvtransfer.connector", "services.kvtransfer.shm_transport"])
TIMEOUT_S = 120.0


def random_pool(pool: torch.Tensor, seed: int) -> None:
    """Fills a pool with bytes that no memory system can shorten."""
    pool.copy_(torch.randint(0, 256, (pool.numel(),), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))


def huge_pages(num_bytes: int) -> torch.Tensor:
    """Zeroed private memory, touched, in huge pages where there are some: a peer gets what our pools get."""
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8).zero_()


class Holder:
    """Owns a pool of random bytes and serves while it waits for commands."""

    def __init__(self, kind: str, layout: KVLayout, num_blocks: int) -> None:
        self._kind, self._layout = kind, layout
        self.transport = make_transport(kind, "holder", "0")
        pool = self.transport.allocate(layout, num_blocks)
        random_pool(pool, 1)
        self._memory = BlockMemory(pool, layout.block_bytes)
        self._others: list[Transport] = []

    def endpoint(self) -> Endpoint:
        """How the puller reaches it."""
        return self.transport.endpoint("")

    def checksums(self, block_ids: list[int]) -> tuple[list[int], float]:
        """The checksums and the seconds they took."""
        started_s = time.perf_counter()
        checksums = self._memory.checksums(block_ids)
        return checksums, time.perf_counter() - started_s

    def stranger(self, number: int) -> Endpoint:
        """Another agent in this process, whom nobody has met yet; the last one is gone."""
        for other in self._others:
            other.close()
        self._others = [make_transport(self._kind, "stranger", str(number))]
        self._others[0].allocate(self._layout, 1)
        return self._others[0].endpoint("")

    def serve(self) -> bool | None:
        """One turn of what the transfer thread does for peers."""
        turns = [transport.serve() for transport in (self.transport, *self._others)]
        return None if None in turns else any(turns)


class Puller:
    """Pulls from the holder, timed."""

    def __init__(self, kind: str, layout: KVLayout, num_blocks: int) -> None:
        self.transport = make_transport(kind, "puller", "0")
        self._memory = BlockMemory(self.transport.allocate(layout, num_blocks), layout.block_bytes)

    def serve(self) -> bool | None:
        """Nobody reads from it."""
        return None

    def contact(self, remote: Endpoint, keep: bool) -> float:
        """Seconds from knowing an endpoint to the first byte read from it."""
        started_s = time.perf_counter()
        warm_up = self.transport.connect(remote)
        if warm_up is None:  # nothing was read yet
            warm_up = self.transport.read(remote.peer, [0], [0])
        self._wait(warm_up)
        seconds = time.perf_counter() - started_s
        if not keep:
            self.transport.disconnect(remote.peer)
        return seconds

    def pull(self, remote: list[int], local: list[int], checksums: list[int] | None) -> tuple[float, float]:
        """Seconds of one pull, and of CPU time; with checksums, until they are verified.

        Raises RuntimeError where they are wrong.
        """
        cpu_s, started_s = time.process_time(), time.perf_counter()
        self._wait(self.transport.read(PeerRef("holder", "0"), remote, local))
        if checksums is not None and self._memory.checksums(local) != checksums:
            raise RuntimeError("a checksum is wrong")
        return time.perf_counter() - started_s, time.process_time() - cpu_s

    def path(self) -> str:
        """What carried the bytes."""
        return self.transport.active()

    def _wait(self, transfer: Transfer) -> None:
        while (status := self.transport.poll(transfer)).state is TransferState.PENDING:
            time.sleep(BUSY_POLL_S)
        if status.state is not TransferState.DONE:
            raise RuntimeError(status.reason)


class Memcpy:
    """The yardstick: the same blocks copied within one process, one memcpy per block, in memory as malloc gives it.

    `huge`: between huge pages, which /dev/shm does not have as it is commonly mounted.
    """

    def __init__(self, huge: bool, layout: KVLayout, num_blocks: int) -> None:
        self._size = layout.block_bytes
        make = huge_pages if huge else partial(torch.zeros, dtype=torch.uint8)
        self._source, self._target = (make(num_blocks * self._size) for _ in range(2))
        random_pool(self._source, 1)
        self._memory = BlockMemory(self._target, self._size)

    def serve(self) -> bool | None:
        """Nobody reads from it."""
        return None

    def pull(self, remote: list[int], local: list[int], checksums: list[int] | None) -> tuple[float, float]:
        """Seconds of the copies, and of CPU time; with checksums, until those are taken again and compared."""
        source, target, size = self._source.data_ptr(), self._target.data_ptr(), self._size
        cpu_s, started_s = time.process_time(), time.perf_counter()
        for there, here in zip(remote, local, strict=True):
            ctypes.memmove(target + here * size, source + there * size, size)
        if checksums is not None and self._memory.checksums(local) != checksums:
            raise RuntimeError("a checksum is wrong")
        return time.perf_counter() - started_s, time.process_time() - cpu_s


def _run(pipe: Connection, make: Callable[..., Any], arguments: tuple[Any, ...], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    end = make(*arguments)
    gc.freeze()
    pipe.send(None)
    serving = False
    beat = ServeBeat(end.serve, lambda: True)
    while True:
        while serving and not pipe.poll(beat.poll()):
            pass
        with contextlib.suppress(EOFError):
            name, arguments = pipe.recv()
            if name == "serving":
                serving = arguments[0]
                pipe.send(time.process_time())
            else:
                pipe.send(getattr(end, name)(*arguments))
            continue
        return


class End:
    """One of the above in a process of its own."""

    def __init__(self, make: Callable[..., Any], *arguments: Any, environment: dict[str, str] | None = None) -> None:
        self._pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_run, args=(theirs, make, arguments, environment or {}), daemon=True)
        self._process.start()
        theirs.close()
        self._answer()

    def tell(self, name: str, *arguments: Any) -> Any:
        """Calls a method there; returns its answer. Raises RuntimeError where the process died or hangs."""
        self._pipe.send((name, arguments))
        return self._answer()

    def end(self) -> None:
        """Ends the process."""
        self._pipe.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(5)

    def _answer(self) -> Any:
        if not self._pipe.poll(TIMEOUT_S):
            raise RuntimeError("a measured process hangs")
        try:
            return self._pipe.recv()
        except EOFError as error:
            raise RuntimeError("a measured process died; see its traceback above") from error


def scattered(num_blocks: int, count: int, seed: int) -> list[int]:
    """`count` of `num_blocks` block ids in random order, as in a pool that has been in use."""
    return [int(i) for i in np.random.default_rng(seed).permutation(num_blocks)[:count]]
