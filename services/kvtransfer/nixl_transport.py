"""Blocks over NIXL (UCX inside): RDMA where there is some, else CUDA IPC, cross-memory attach or tcp.

Facts this file rests on (nixl 1.5.1, measured; see design/libraries.md):

- the whole pool is described once per peer as a numpy N x 3 array; a transfer then only names indices;
- the first read from a peer costs wiring up, so `connect` starts one of a few bytes, into a scratch buffer;
- a killed peer raises nixlRemoteDisconnectError from the state check; a frozen one stays in progress for ever, and its
  bytes land when it wakes, whatever was released here: so a handle is kept, and polled, until it is settled;
- over shared memory `transfer()` copies inline: it belongs on the transfer thread;
- cross-memory attach pins what it reads page by page: from huge pages it takes about half the CPU time per byte;
- NIXL's progress thread spins: an idle agent takes a whole core. It is off: `poll` and `serve` make progress instead.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from services.kvtransfer.layout import KVLayout
from services.kvtransfer.transport import (
    DONE,
    PENDING,
    Endpoint,
    PeerRef,
    PeerUnreachableError,
    Transfer,
    TransferState,
    TransferStatus,
    TransportError,
    check_blocks,
    disconnected,
    host_id,
)
from services.kvtransfer.ucx_log import UcxLog
from services.runtime import log

BUILDS = ("nixl_cu13", "nixl_cu12")  # one wheel per CUDA major version; the meta package only chooses between them
SCRATCH_BYTES = 4096
WORKED_S = 50e-6  # an empty turn takes less

_ucx_log = UcxLog()


@cache
def _library() -> tuple[Any, Any, tuple[type[Exception], ...]]:
    """NIXL's API module, its bindings, and all its exception types. Raises TransportError where none is installed."""
    for build in BUILDS:
        try:
            api = importlib.import_module(f"{build}._api")
        except ModuleNotFoundError:
            continue
        bindings = importlib.import_module(f"{build}._bindings")
        for name in ("nixl", build):
            logging.getLogger(name).setLevel(logging.WARNING)
        errors = tuple(value for name, value in vars(bindings).items() if name.endswith("Error"))
        return api, bindings, errors
    raise TransportError(f"none of {', '.join(BUILDS)} is installed")


@dataclass(slots=True)
class _Remote:
    blocks: Any  # prepared descriptors, one per block of the peer's pool
    num_blocks: int
    gone: str = ""  # why nothing more can be read


@dataclass(slots=True)
class _NixlTransfer:
    handle: Any
    key: str
    num_bytes: int
    status: TransferStatus = PENDING


class NixlTransport:
    """A Transport on one NIXL agent, named by worker and epoch."""

    name = "nixl"

    def __init__(self, worker_id: str, epoch: str) -> None:
        """Starts the agent; raises TransportError where UCX cannot."""
        self._me = PeerRef(worker_id, epoch)
        self._log = log.get_logger()
        self._peers: dict[str, _Remote] = {}
        self._pending: set[int] = set()  # id() of transfers not yet settled
        _keep_tcp()
        os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
        with _ucx_log.captured():
            api, _, errors = _library()
            strict = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            config = api.nixl_agent_config(enable_prog_thread=False, sync_mode=strict)
            try:
                self._agent = api.nixl_agent(self._me.agent_name, config)
            except errors as error:
                tls = os.environ.get("UCX_TLS", "(not set)")
                raise TransportError(f"UCX cannot start with UCX_TLS={tls}: {error}") from error
        if "UCX" not in self._agent.backends:
            raise TransportError("this build of NIXL has no UCX")
        self._errors = errors
        self._pool: torch.Tensor | None = None
        self._scratch = torch.zeros(SCRATCH_BYTES, dtype=torch.uint8)
        self._registered: list[Any] = []

    def allocate(self, layout: KVLayout, num_blocks: int, device: str = "cpu") -> torch.Tensor:
        """The pool, registered; on a CUDA device it is device memory."""
        failures: tuple[type[Exception], ...] = (OSError, RuntimeError, *self._errors)
        num_bytes = num_blocks * layout.block_bytes
        try:
            on_host = torch.device(device).type == "cpu"
            self._pool = _host_zeros(num_bytes) if on_host else torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            self._registered = [self._agent.register_memory([self._pool]), self._agent.register_memory([self._scratch])]
        except failures as error:
            raise TransportError(f"{num_bytes} bytes on {device}: {error}") from error
        self._layout, self._num_blocks = layout, num_blocks
        self._memory = "DRAM" if self._pool.device.type == "cpu" else "VRAM"
        self._device_id = max(self._pool.get_device(), 0)
        table = _descriptors(self._pool.data_ptr(), num_blocks, layout.block_bytes, self._device_id)
        self._blocks = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", table, self._memory)
        return self._pool

    def endpoint(self, address: str) -> Endpoint:
        """The agent's metadata and where the pool begins."""
        if self._pool is None:
            raise TransportError("allocate the pool first")
        me = PeerRef(self._me.worker_id, self._me.epoch, address)
        base = self._pool.data_ptr()
        metadata = bytes(self._agent.get_agent_metadata())
        return Endpoint(
            me, self.name, self._layout, self._num_blocks, base, self._device_id, self._memory, metadata, host_id()
        )

    def connect(self, remote: Endpoint) -> Transfer | None:
        """Adds the peer's agent and starts a first small read; returns it, or None where the peer was known."""
        key = remote.peer.agent_name
        if key in self._peers:
            return None
        table = _descriptors(remote.base_address, remote.num_blocks, remote.layout.block_bytes, remote.device_id)
        try:
            added = self._agent.add_remote_agent(remote.agent_metadata)
            name = added.decode() if isinstance(added, bytes) else str(added)
            if name != key:
                self._agent.remove_remote_agent(name)
                raise PeerUnreachableError(f"{remote.peer.worker_id} offers the metadata of another agent")
            self._agent.make_connection(key)
            self._peers[key] = _Remote(self._agent.prep_xfer_dlist(key, table, remote.memory), remote.num_blocks)
            return self._warm_up(remote)
        except self._errors as error:
            raise PeerUnreachableError(f"{remote.peer.worker_id}: {error}") from error

    def disconnect(self, peer: PeerRef) -> None:
        """Removes the peer's agent, so that its side is closed too."""
        remote = self._peers.pop(peer.agent_name, None)
        if remote is None:
            return
        try:
            remote.blocks.release()
            self._agent.remove_remote_agent(peer.agent_name)
        except self._errors as error:
            self._log.warning("a peer's agent was not removed", peer=peer.worker_id, error=str(error))

    def read(self, peer: PeerRef, remote_blocks: Sequence[int], local_blocks: Sequence[int]) -> Transfer:
        """Posts one READ with one descriptor per block."""
        remote = self._peers.get(peer.agent_name)
        if remote is None:
            raise PeerUnreachableError(f"{peer.worker_id} is not connected")
        if remote.gone:
            raise PeerUnreachableError(f"{peer.worker_id}: {remote.gone}")
        check_blocks(remote_blocks, remote.num_blocks, "remote")
        check_blocks(local_blocks, self._num_blocks, "local")
        here, there = np.asarray(local_blocks, np.int32), np.asarray(remote_blocks, np.int32)
        try:
            handle = self._agent.make_prepped_xfer("READ", self._blocks, here, remote.blocks, there)
        except self._errors as error:
            raise PeerUnreachableError(f"{peer.worker_id}: {error}") from error
        transfer = _NixlTransfer(handle, peer.agent_name, len(here) * self._layout.block_bytes)
        return self._post(transfer)

    def poll(self, transfer: Transfer) -> TransferStatus:
        """Asks NIXL; once settled, the handle is released and the answer kept."""
        assert isinstance(transfer, _NixlTransfer)
        if transfer.status is PENDING:
            self._settle(transfer, lambda: self._agent.check_xfer_state(transfer.handle))
        return transfer.status

    def serve(self) -> bool | None:
        """Lets UCX work off what came in. Whether there was work is told by the time it took."""
        started_s = time.perf_counter()
        self._agent.get_new_notifs()
        return time.perf_counter() - started_s > WORKED_S

    def abandon(self, transfer: Transfer) -> bool:
        """True only where the transfer is settled: UCX cannot take a read back."""
        return self.poll(transfer).settled

    def active(self) -> str:
        """The paths that UCX itself reports for reads from other processes, joined by +."""
        for problem in _ucx_log.take_problems():
            self._log.warning("ucx", problem=problem)
        return "+".join(_ucx_log.paths()) or "none yet"

    def close(self) -> None:
        """Removes every peer and deregisters; with transfers in flight it leaves all to the end of the process."""
        if self._pending:
            self._log.warning("transfers are still in flight: NIXL is left open", num_transfers=len(self._pending))
            return
        for key in list(self._peers):
            worker_id, _, epoch = key.rpartition("+")
            self.disconnect(PeerRef(worker_id, epoch))
        if self._pool is not None:
            self._blocks.release()
            for descriptors in self._registered:
                self._agent.deregister_memory(descriptors)
            self._pool = None

    def _warm_up(self, remote: Endpoint) -> Transfer:
        size = min(SCRATCH_BYTES, remote.layout.block_bytes)
        here = self._agent.get_xfer_descs([(self._scratch.data_ptr(), size, 0)], "DRAM")
        there = self._agent.get_xfer_descs([(remote.base_address, size, remote.device_id)], remote.memory)
        handle = self._agent.initialize_xfer("READ", here, there, remote.peer.agent_name)
        return self._post(_NixlTransfer(handle, remote.peer.agent_name, size))

    def _post(self, transfer: _NixlTransfer) -> _NixlTransfer:
        self._pending.add(id(transfer))
        self._settle(transfer, lambda: self._agent.transfer(transfer.handle))
        return transfer

    def _settle(self, transfer: _NixlTransfer, ask: Any) -> None:
        """Turns NIXL's answer into a status. An error that is no disconnect proves nothing: bytes may still land."""
        _, bindings, _ = _library()
        try:
            state = ask()
        except bindings.nixlRemoteDisconnectError as error:
            transfer.status = disconnected(f"the peer is gone: {error}")
            if transfer.key in self._peers:
                self._peers[transfer.key].gone = "disconnected"
        except self._errors as error:
            transfer.status = TransferStatus(TransferState.FAILED, reason=str(error))
        else:
            if state == "DONE":
                transfer.status = DONE
            elif state == "ERR":
                transfer.status = TransferStatus(TransferState.FAILED, reason="NIXL reports an error")
        if transfer.status.settled:
            self._pending.discard(id(transfer))
            self._release(transfer)

    def _release(self, transfer: _NixlTransfer) -> None:
        try:
            transfer.handle.release()
        except self._errors as error:
            self._log.warning("a transfer handle was not released", error=str(error))


def _host_zeros(num_bytes: int) -> torch.Tensor:
    """Memory in huge pages where the kernel has them, all touched: no pull waits for a page."""
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8).zero_()


def _descriptors(base: int, num_blocks: int, block_bytes: int, device_id: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """`[num_blocks, 3]`: address, length, device of each block."""
    table = np.empty((num_blocks, 3), np.uint64)
    table[:, 0] = base + np.arange(num_blocks, dtype=np.uint64) * np.uint64(block_bytes)
    table[:, 1] = block_bytes
    table[:, 2] = device_id
    return table


def _keep_tcp() -> None:
    """UCX cannot even start without tcp in a list of transports; a list that lacks it gets it."""
    listed = os.environ.get("UCX_TLS", "")
    if not listed or "all" in listed.split(","):
        return
    if listed.startswith("^"):
        if "tcp" in listed[1:].split(","):
            raise TransportError(f"UCX_TLS={listed} excludes tcp, without which UCX cannot connect")
    elif "tcp" not in listed.split(","):
        os.environ["UCX_TLS"] = f"{listed},tcp"
        log.get_logger().warning("tcp added to UCX_TLS: UCX cannot connect without it", ucx_tls=os.environ["UCX_TLS"])
