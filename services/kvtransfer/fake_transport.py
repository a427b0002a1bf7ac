"""A Transport inside one process, for tests: a fabric on which peers can be frozen, thawed and killed at will.

It behaves as badly as the real ones: a frozen peer's transfer stays pending, and its bytes land when the peer thaws,
even though it was abandoned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class FakeFabric:
    """All pools of one test, and the condition of their owners, by agent name."""

    pools: dict[str, torch.Tensor] = field(default_factory=dict)
    frozen: set[str] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _FakeTransfer:
    key: str
    remote: list[int]
    local: list[int]
    num_bytes: int
    status: TransferStatus = PENDING


class FakeTransport:
    """A Transport whose bytes move when it is polled."""

    name = "fake"

    def __init__(self, worker_id: str, epoch: str, fabric: FakeFabric) -> None:
        self._me = PeerRef(worker_id, epoch)
        self._fabric = fabric
        self._peers: dict[str, int] = {}
        self._pool: torch.Tensor | None = None
        self._moved = False

    def allocate(self, layout: KVLayout, num_blocks: int, device: str = "cpu") -> torch.Tensor:
        """An ordinary tensor, listed on the fabric."""
        self._layout, self._num_blocks = layout, num_blocks
        self._pool = torch.zeros(num_blocks * layout.block_bytes, dtype=torch.uint8)
        self._fabric.pools[self._me.agent_name] = self._pool
        return self._pool

    def endpoint(self, address: str) -> Endpoint:
        """Its name on the fabric is all that is needed."""
        if self._pool is None:
            raise TransportError("allocate the pool first")
        me = PeerRef(self._me.worker_id, self._me.epoch, address)
        return Endpoint(me, self.name, self._layout, self._num_blocks, 0, 0, "DRAM", b"", host_id())

    def connect(self, remote: Endpoint) -> Transfer | None:
        """Looks the peer up."""
        key = remote.peer.agent_name
        if key not in self._fabric.pools or key in self._fabric.dead:
            raise PeerUnreachableError(f"{remote.peer.worker_id} is not on the fabric")
        self._peers[key] = remote.num_blocks
        return None

    def disconnect(self, peer: PeerRef) -> None:
        """Forgets the peer."""
        self._peers.pop(peer.agent_name, None)

    def read(self, peer: PeerRef, remote_blocks: Sequence[int], local_blocks: Sequence[int]) -> Transfer:
        """Notes what to copy."""
        key = peer.agent_name
        if key not in self._peers:
            raise PeerUnreachableError(f"{peer.worker_id} is not connected")
        if key in self._fabric.dead:
            raise PeerUnreachableError(f"{peer.worker_id} is gone")
        check_blocks(remote_blocks, self._peers[key], "remote")
        check_blocks(local_blocks, self._num_blocks, "local")
        num_bytes = len(local_blocks) * self._layout.block_bytes
        return _FakeTransfer(key, list(remote_blocks), list(local_blocks), num_bytes)

    def poll(self, transfer: Transfer) -> TransferStatus:
        """Copies all at once, unless the peer is frozen or dead."""
        assert isinstance(transfer, _FakeTransfer) and self._pool is not None
        if transfer.status is not PENDING:
            return transfer.status
        if transfer.key in self._fabric.dead:
            transfer.status = disconnected("the peer was killed")
        elif transfer.key not in self._fabric.frozen:
            size = self._layout.block_bytes
            theirs = self._fabric.pools[transfer.key].view(-1, size)
            self._pool.view(-1, size)[transfer.local] = theirs[transfer.remote]
            self._moved = True
            transfer.status = DONE
        return transfer.status

    def serve(self) -> bool | None:
        """None: the reader does all."""
        return None

    def abandon(self, transfer: Transfer) -> bool:
        """As with the real ones, what was posted cannot be taken back."""
        assert isinstance(transfer, _FakeTransfer)
        return transfer.status.settled

    def active(self) -> str:
        """`fake` once bytes moved."""
        return "fake" if self._moved else "none yet"

    def close(self) -> None:
        """Leaves the fabric."""
        self._fabric.pools.pop(self._me.agent_name, None)
        self._peers.clear()
