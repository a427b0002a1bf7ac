"""The least that a pull over NIXL can cost: its Python API called in a loop, with nothing of pdserve around it.

Descriptors of the whole pool are prepared once, of both ends; a pull is make_prepped_xfer, transfer, and
check_xfer_state without a pause until it is done. NIXL gets its best: memory in huge pages, and no progress thread,
which on two cores takes time from the copies (tried both ways).
"""

from __future__ import annotations

import importlib
import logging
import time
from typing import Any

import numpy as np

from bench.transfer_ends import huge_pages, random_pool
from services.kvtransfer.layout import KVLayout
from services.kvtransfer.nixl_transport import BUILDS

HOLDER, PULLER = "raw-holder", "raw-puller"


def _api() -> Any:
    """NIXL's API module, of whichever build is installed. Raises ModuleNotFoundError."""
    for build in BUILDS:
        try:
            found = importlib.import_module(f"{build}._api")
        except ModuleNotFoundError:
            continue
        for name in ("nixl", build):
            logging.getLogger(name).setLevel(logging.WARNING)
        return found
    raise ModuleNotFoundError(f"none of {', '.join(BUILDS)} is installed")


class _Agent:
    """An agent with a registered pool, and the descriptors of its blocks."""

    def __init__(self, name: str, layout: KVLayout, num_blocks: int) -> None:
        api = _api()
        strict = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        self.agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, sync_mode=strict))
        self.pool = huge_pages(num_blocks * layout.block_bytes)
        self._registered = self.agent.register_memory([self.pool])
        self._layout, self._num_blocks = layout, num_blocks

    def table(self, base: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """`[num_blocks, 3]`: address, length and device of each block of a pool."""
        size = self._layout.block_bytes
        rows = [(base + block * size, size, 0) for block in range(self._num_blocks)]
        return np.array(rows, np.uint64)


class RawHolder(_Agent):
    """Owns a pool of random bytes."""

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        super().__init__(HOLDER, layout, num_blocks)
        random_pool(self.pool, 1)

    def endpoint(self) -> tuple[bytes, int]:
        """What NIXL wants to know of it, and where the pool begins."""
        return bytes(self.agent.get_agent_metadata()), self.pool.data_ptr()

    def serve(self) -> bool:
        """Lets UCX work, as a peer's first contact needs it."""
        self.agent.get_new_notifs()
        return False


class RawPuller(_Agent):
    """Pulls from the holder, timed."""

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        super().__init__(PULLER, layout, num_blocks)
        self._mine = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", self.table(self.pool.data_ptr()), "DRAM")
        self._theirs: Any = None

    def serve(self) -> None:
        """Nobody reads from it."""

    def contact(self, endpoint: tuple[bytes, int], _keep: bool) -> float:
        """Seconds from knowing an endpoint to the first block read from it."""
        started_s = time.perf_counter()
        metadata, base = endpoint
        self.agent.add_remote_agent(metadata)
        self.agent.make_connection(HOLDER)
        self._theirs = self.agent.prep_xfer_dlist(HOLDER, self.table(base), "DRAM")
        self.pull([0], [0], None)
        return time.perf_counter() - started_s

    def pull(self, remote: list[int], local: list[int], _checksums: list[int] | None) -> tuple[float, float]:
        """Seconds of one pull, and of CPU time. Raises RuntimeError where NIXL reports an error."""
        agent, here, there = self.agent, np.array(local, np.int32), np.array(remote, np.int32)
        cpu_s, started_s = time.process_time(), time.perf_counter()
        handle = agent.make_prepped_xfer("READ", self._mine, here, self._theirs, there)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        seconds, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
        handle.release()
        if state != "DONE":
            raise RuntimeError(f"NIXL reports {state}")
        return seconds, cpu_s
