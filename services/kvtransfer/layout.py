"""What two workers compare before a byte moves between their KV pools."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields

CHECKSUM_XXH3_64 = "xxh3_64"  # of each block's bytes, taken in host memory
CHECKSUM_MIX32X2 = "mix32x2"  # of each block's words, taken where the block lies: see checksum_mix.py
CHECKSUMS = (CHECKSUM_XXH3_64, CHECKSUM_MIX32X2)  # that this version can take of a block in any memory


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The meaning of a block's bytes. Two pools with equal layouts may exchange blocks as they are.

    A block is one contiguous range `[num_layers, 2, num_kv_heads, block_size, head_dim]` of `block_bytes` bytes.
    `checksum` is the kind that the pool's owner announces its blocks with.
    """

    dtype: str
    block_size: int  # token slots
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_bytes: int
    checksum: str = CHECKSUM_XXH3_64
    weights_fingerprint: str = ""
    tokenizer_fingerprint: str = ""
    quantization: str = "none"

    def __post_init__(self) -> None:
        """Raises ValueError where the checksum cannot be taken of blocks of that size."""
        if self.checksum == CHECKSUM_MIX32X2 and self.block_bytes % 4:
            raise ValueError(f"checksum: {self.checksum} wants whole words of 4 bytes, not {self.block_bytes} a block")

    def mismatch(self, other: KVLayout) -> str | None:
        """The first field in which `other` differs, with both values; None where blocks may be exchanged."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs:
                return f"{field.name}: {mine} here, {theirs} there"
        return None

    def fingerprint(self) -> str:
        """32 hex digits, equal exactly where `mismatch` is None."""
        text = "\n".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def checksum_for(device: str, block_bytes: int) -> str:
    """The kind that blocks in a device's memory are announced with: the one that need not copy them to the host."""
    on_host = device.partition(":")[0] == "cpu"
    return CHECKSUM_XXH3_64 if on_host or block_bytes % 4 else CHECKSUM_MIX32X2
