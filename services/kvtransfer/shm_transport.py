"""Blocks between processes of one host through a mapped file in /dev/shm.

The pool is a segment that its owner creates, locks and maps; a peer maps it read-only by name and copies out of it
with memcpy, a pull or so per poll. The owner's lock (flock) lives exactly as long as the owner, whatever ends it: a
peer that can take the lock knows the owner is gone, and so does the next process that cleans up after a killed one.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
    TransferStatus,
    TransportError,
    check_blocks,
    disconnected,
    host_id,
)

SEGMENT_FOLDER = Path("/dev/shm")
SEGMENT_PREFIX = "pdserve-kv-"
BYTES_PER_POLL = 32 * 2**20  # a whole pull (PullLimits): between two polls the thread sleeps
MADV_POPULATE_WRITE = 23  # of Linux 5.14; Python has no name for it yet


@dataclass(slots=True)
class _Segment:
    """A mapped segment; `view` covers its bytes."""

    descriptor: int
    mapping: mmap.mmap
    address: int
    num_bytes: int
    num_blocks: int
    block_bytes: int

    def owner_is_gone(self) -> bool:
        """True once the owner's process ended: only then can its lock be shared."""
        return _try_lock(self.descriptor, fcntl.LOCK_SH)


@dataclass(slots=True)
class _Copy:
    segment: _Segment
    runs: list[tuple[int, int, int]]  # (local block, remote block, number of blocks), last first
    num_bytes: int
    status: TransferStatus = field(default=PENDING)


class ShmTransport:
    """A Transport for peers on the same host, with no library but the kernel."""

    name = "shm"

    def __init__(self, worker_id: str, epoch: str) -> None:
        self._me = PeerRef(worker_id, epoch)
        self._peers: dict[str, _Segment] = {}
        self._segment: _Segment | None = None
        self._layout: KVLayout | None = None
        self._path: Path | None = None
        self._moved = False

    def allocate(self, layout: KVLayout, num_blocks: int, device: str = "cpu") -> torch.Tensor:
        """The pool as a mapped segment; raises TransportError where /dev/shm has no room or the device is no CPU."""
        if device != "cpu":
            raise TransportError(f"shm moves host memory, not {device}")
        remove_stale_segments()
        num_bytes = num_blocks * layout.block_bytes
        path, descriptor = _create_segment()
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)  # a tmpfs that is full must say so now, not by SIGBUS later
            mapping = mmap.mmap(descriptor, num_bytes)
            with contextlib.suppress(OSError):
                mapping.madvise(MADV_POPULATE_WRITE)  # or the first pull into each page waits for it
        except OSError as error:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise TransportError(f"{num_bytes} bytes of {SEGMENT_FOLDER} cannot be had: {error.strerror}") from error
        address = int(np.frombuffer(mapping, np.uint8).ctypes.data)
        self._segment = _Segment(descriptor, mapping, address, num_bytes, num_blocks, layout.block_bytes)
        self._path, self._layout = path, layout
        return torch.frombuffer(mapping, dtype=torch.uint8)

    def endpoint(self, address: str) -> Endpoint:
        """How peers find the segment: by its name."""
        if self._segment is None or self._layout is None or self._path is None:
            raise TransportError("allocate the pool first")
        me = PeerRef(self._me.worker_id, self._me.epoch, address)
        name = self._path.name.encode()
        return Endpoint(me, self.name, self._layout, self._segment.num_blocks, 0, 0, "DRAM", name, host_id())

    def connect(self, remote: Endpoint) -> Transfer | None:
        """Maps the peer's segment read-only."""
        key = remote.peer.agent_name
        if key in self._peers:
            return None
        if remote.host_id != host_id():
            raise PeerUnreachableError(f"{remote.peer.worker_id} is on another host; shm cannot reach it")
        name = remote.agent_metadata.decode()
        if not name.startswith(SEGMENT_PREFIX) or "/" in name:
            raise PeerUnreachableError(f"{remote.peer.worker_id} offers no segment of pdserve")
        self._peers[key] = _map_peer(SEGMENT_FOLDER / name, remote)
        return None

    def disconnect(self, peer: PeerRef) -> None:
        """Unmaps the peer's segment."""
        segment = self._peers.pop(peer.agent_name, None)
        if segment is not None:
            segment.mapping.close()
            os.close(segment.descriptor)

    def read(self, peer: PeerRef, remote_blocks: Sequence[int], local_blocks: Sequence[int]) -> Transfer:
        """Queues the copy; `poll` does it."""
        segment = self._peers.get(peer.agent_name)
        if segment is None:
            raise PeerUnreachableError(f"{peer.worker_id} is not connected")
        if segment.owner_is_gone():
            raise PeerUnreachableError(f"{peer.worker_id} has ended")
        check_blocks(remote_blocks, segment.num_blocks, "remote")
        check_blocks(local_blocks, self._segment.num_blocks if self._segment else 0, "local")
        runs = _runs(local_blocks, remote_blocks, max(1, BYTES_PER_POLL // segment.block_bytes))
        runs.reverse()
        return _Copy(segment, runs, len(local_blocks) * segment.block_bytes)

    def poll(self, transfer: Transfer) -> TransferStatus:
        """Copies up to `BYTES_PER_POLL` more."""
        assert isinstance(transfer, _Copy) and self._segment is not None
        if transfer.status is not PENDING:
            return transfer.status
        peer, size = transfer.segment, transfer.segment.block_bytes
        budget = BYTES_PER_POLL
        while transfer.runs and budget > 0:
            local, remote, count = transfer.runs.pop()
            ctypes.memmove(self._segment.address + local * size, peer.address + remote * size, count * size)
            budget -= count * size
        self._moved = True
        if peer.owner_is_gone():
            transfer.runs.clear()
            transfer.status = disconnected("the peer's process ended")
        elif not transfer.runs:
            transfer.status = DONE
        return transfer.status

    def serve(self) -> bool | None:
        """None: the kernel does all."""
        return None

    def abandon(self, transfer: Transfer) -> bool:
        """Always true: nothing lands but by `poll`."""
        assert isinstance(transfer, _Copy)
        transfer.runs.clear()
        if transfer.status is PENDING:
            transfer.status = disconnected("abandoned")
        return True

    def active(self) -> str:
        """`shm` once bytes moved."""
        return "shm" if self._moved else "none yet"

    def close(self) -> None:
        """Unmaps peers and removes the segment's name; the memory itself goes with the last tensor on it."""
        for key in list(self._peers):
            worker_id, _, epoch = key.rpartition("+")
            self.disconnect(PeerRef(worker_id, epoch))
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None
        if self._segment is not None:
            os.close(self._segment.descriptor)  # ends the lock: peers see the owner gone
            self._segment = None


def remove_stale_segments() -> list[str]:
    """Removes the segments whose owner ended without doing so; returns their names."""
    removed = []
    for path in SEGMENT_FOLDER.glob(SEGMENT_PREFIX + "*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if _try_lock(descriptor, fcntl.LOCK_EX):
                    path.unlink()
                    removed.append(path.name)
            finally:
                os.close(descriptor)
    return removed


def _create_segment() -> tuple[Path, int]:
    """A new locked segment. A cleaner may take it for stale before it is locked: then its name is gone; try again."""
    while True:
        path = SEGMENT_FOLDER / f"{SEGMENT_PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink > 0:
            return path, descriptor
        os.close(descriptor)


def _map_peer(path: Path, remote: Endpoint) -> _Segment:
    num_bytes = remote.num_blocks * remote.layout.block_bytes
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise PeerUnreachableError(f"{remote.peer.worker_id}: segment {path.name}: {error.strerror}") from error
    if os.fstat(descriptor).st_size != num_bytes or _try_lock(descriptor, fcntl.LOCK_SH):
        os.close(descriptor)
        raise PeerUnreachableError(f"{remote.peer.worker_id}: segment {path.name} has another size or no owner")
    mapping = mmap.mmap(descriptor, num_bytes, prot=mmap.PROT_READ)
    address = int(np.frombuffer(mapping, np.uint8).ctypes.data)
    return _Segment(descriptor, mapping, address, num_bytes, remote.num_blocks, remote.layout.block_bytes)


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return True


def _runs(local: Sequence[int], remote: Sequence[int], longest: int) -> list[tuple[int, int, int]]:
    """Neighbouring blocks on both sides become one copy, at most `longest` blocks long."""
    runs: list[tuple[int, int, int]] = []
    for here, there in zip(local, remote, strict=True):
        if runs:
            first_here, first_there, count = runs[-1]
            if here == first_here + count and there == first_there + count and count < longest:
                runs[-1] = (first_here, first_there, count + 1)
                continue
        runs.append((here, there, 1))
    return runs
