"""Checksums of blocks, of either kind in either memory.

| kind | host memory | device memory |
|---|---|---|
| `xxh3_64`: xxh3 of the bytes | in place, about 10 GB/s on one core | copied to the host first |
| `mix32x2`: sums of mixed words (`checksum_mix.py`) | numpy, under 1 GB/s | a kernel, 8 bytes a block to the host |

A worker has the kind that its memory is good at (`layout.checksum_for`), unless told otherwise: peers must have the
same, and where GPUs and CPUs exchange blocks one of them is slow. All run without the GIL for most of their time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import xxhash

from services.kvtransfer import checksum_mix
from services.kvtransfer.layout import CHECKSUM_MIX32X2, CHECKSUM_XXH3_64, CHECKSUMS

if TYPE_CHECKING:
    import torch


class BlockMemory:
    """The pool as blocks of bytes: uint8 `[num_blocks, block_bytes]`."""

    def __init__(self, pool: torch.Tensor, block_bytes: int, kind: str = CHECKSUM_XXH3_64) -> None:
        """`kind`: of the checksums. Raises ValueError for one that this version does not know."""
        if kind not in CHECKSUMS:
            raise ValueError(f"checksum: {kind} is unknown")
        self.blocks = pool.view(-1, block_bytes)
        self._host = self.blocks.numpy() if pool.device.type == "cpu" else None
        self._kind = kind

    def checksums(self, block_ids: Sequence[int]) -> list[int]:
        """One 64-bit number per block. Device memory is read on the current stream: after what was queued there."""
        if self._kind == CHECKSUM_MIX32X2 and self._host is None:
            from services.kvtransfer import checksum_triton  # slow to import, and of no use without a GPU

            return checksum_triton.checksums(self.blocks, block_ids)
        if self._host is None:
            return [xxhash.xxh3_64_intdigest(copy) for copy in self.blocks[list(block_ids)].cpu().numpy()]
        take = xxhash.xxh3_64_intdigest if self._kind == CHECKSUM_XXH3_64 else checksum_mix.checksum
        return [take(self._host[block_id]) for block_id in block_ids]

    def flip_byte(self, block_id: int) -> None:
        """Damages a block, for tests."""
        self.blocks[block_id, self.blocks.shape[1] // 2] ^= 0xFF
