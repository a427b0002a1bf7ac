"""The interface of everything that moves blocks, and what its two ends must know of each other.

The life of a transfer:

1. the process that owns a pool allocates it through its transport, which registers it;
2. `endpoint()` says how others reach it; the puller `connect`s to a peer's endpoint, once per peer, and warms it up;
3. the puller `read`s: block ids there, block ids here;
4. it `poll`s until the transfer is *settled*: no byte of it can land any more. Until then, local blocks may be written;
5. `disconnect` forgets a peer, after its last transfer is settled.

All calls but `active` are made from one thread, the transfer thread.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from services.kvtransfer.layout import KVLayout

if TYPE_CHECKING:
    import torch


class TransportError(Exception):
    """A transport cannot do what it was asked; the text says why."""


class PeerUnreachableError(TransportError):
    """The peer is not known, gone, or cannot be reached by this transport."""


@dataclass(frozen=True, slots=True)
class PeerRef:
    """One life of one worker, and where its gRPC server listens."""

    worker_id: str
    epoch: str
    address: str = ""

    @property
    def agent_name(self) -> str:
        """The name under which a transport knows it: a restarted process can never be addressed by it."""
        return f"{self.worker_id}+{self.epoch}"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One worker's registered pool, as its transport describes it to others."""

    peer: PeerRef
    transport: str  # nixl, shm, fake
    layout: KVLayout
    num_blocks: int
    base_address: int
    device_id: int
    memory: str  # DRAM, VRAM
    agent_metadata: bytes
    host_id: str

    def refuse(self, other: Endpoint) -> str | None:
        """Why blocks cannot move between the two, naming the field; None where they can."""
        if self.transport != other.transport:
            return f"transport: {self.transport} here, {other.transport} there"
        return self.layout.mismatch(other.layout)


class TransferState(Enum):
    """Where a transfer stands."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class TransferStatus:
    """What `poll` answers. `disconnected`: it failed because the peer is gone, so nothing of it lands any more."""

    state: TransferState
    disconnected: bool = False
    reason: str = ""

    @property
    def settled(self) -> bool:
        """True once no byte of the transfer can land any more: only then are its local blocks safe to reuse."""
        return self.state is TransferState.DONE or self.disconnected


PENDING = TransferStatus(TransferState.PENDING)
DONE = TransferStatus(TransferState.DONE)


def disconnected(reason: str) -> TransferStatus:
    """A failure after which nothing lands."""
    return TransferStatus(TransferState.FAILED, disconnected=True, reason=reason)


class Transfer(Protocol):
    """A handle; what it holds is its transport's business."""

    @property
    def num_bytes(self) -> int:
        """Bytes it moves in all."""


class Transport(Protocol):
    """Moves blocks from the registered memory of a peer into that of this process."""

    name: str

    def allocate(self, layout: KVLayout, num_blocks: int, device: str = "cpu") -> torch.Tensor:
        """The pool of this process: zeroed uint8 `[num_blocks * layout.block_bytes]`, registered. Called once.

        Raises TransportError where the memory cannot be had.
        """

    def endpoint(self, address: str) -> Endpoint:
        """How others reach the pool; `address` is the owner's gRPC server. Needs `allocate` first."""

    def connect(self, remote: Endpoint) -> Transfer | None:
        """Prepares for reads from a peer; idempotent. Raises PeerUnreachableError.

        Returns a small read that warms the path up, to be polled like any other, or None where there is nothing to
        warm. Reads need not wait for it.
        """

    def disconnect(self, peer: PeerRef) -> None:
        """Forgets a peer; its transfers must be settled. Idempotent."""

    def read(self, peer: PeerRef, remote_blocks: Sequence[int], local_blocks: Sequence[int]) -> Transfer:
        """Starts to pull blocks of a connected peer into the local pool, pairwise.

        Raises PeerUnreachableError, having moved nothing, where the peer was not connected or is known to be gone.
        """

    def poll(self, transfer: Transfer) -> TransferStatus:
        """Where the transfer stands. Never blocks on the peer; may copy for some milliseconds."""

    def serve(self) -> bool | None:
        """Helps along what peers read from here. True where there was something to do; None: it is never needed."""

    def abandon(self, transfer: Transfer) -> bool:
        """Says that nobody will use the bytes. True: none will land any more. False: go on polling until settled."""

    def active(self) -> str:
        """What really carries bytes between processes: cma, tcp, shm, rdma, cuda_ipc, joined by +; or `none yet`.

        May be called from any thread.
        """

    def close(self) -> None:
        """Releases every connection and the pool; what is still in flight must not matter any more."""


@cache
def host_id() -> str:
    """Equal for processes that may share memory: one kernel boot, one /dev/shm."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    try:
        return f"{boot.read_text().strip()}:{Path('/dev/shm').stat().st_dev}"
    except OSError:
        return platform.node()


def check_blocks(blocks: Sequence[int], num_blocks: int, side: str) -> None:
    """Raises ValueError where a block id lies outside a pool: it would address somebody's memory."""
    if blocks and not (min(blocks) >= 0 and max(blocks) < num_blocks):
        raise ValueError(f"{side} block id outside 0..{num_blocks - 1}: {min(blocks)}..{max(blocks)}")
