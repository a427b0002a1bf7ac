"""The tensors that hold keys and values, in blocks. It never decides who gets a block; `block_pool` does.

Layout, block-major: `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]` (2: keys, then values). All of a
block, over all layers, is one contiguous range of `block_bytes`, so that a transfer or a swap is one descriptor per
block.
"""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class KVShape:
    """What a cache looks like. `dtype` is the type of keys and values."""

    num_blocks: int
    num_layers: int
    num_kv_heads: int
    block_size: int  # token slots
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        slots = self.num_layers * 2 * self.num_kv_heads * self.block_size
        return slots * self.head_dim * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole cache."""
        return self.num_blocks * self.block_bytes

    def fitting(self, num_bytes: int) -> "KVShape":
        """The same shape with as many blocks as fit into `num_bytes`."""
        return replace(self, num_blocks=num_bytes // self.block_bytes)


class KVCache:
    """A view of memory given from outside (a transport may need to allocate and register it)."""

    def __init__(self, memory: torch.Tensor, shape: KVShape) -> None:
        """Lay `shape` over `memory` (uint8, 1-D, at least `shape.num_bytes`). Raises ValueError if it does not fit."""
        if memory.dtype != torch.uint8 or memory.ndim != 1 or not memory.is_contiguous():
            raise ValueError("KV memory must be a contiguous 1-D uint8 tensor")
        if memory.numel() < shape.num_bytes:
            raise ValueError(f"KV memory has {memory.numel()} bytes, {shape.num_bytes} are needed")
        self.memory = memory[: shape.num_bytes]
        self.shape = shape
        self.blocks = self.memory.view(shape.dtype).view(
            shape.num_blocks, shape.num_layers, 2, shape.num_kv_heads, shape.block_size, shape.head_dim
        )
        self._layers = self.blocks.unbind(1)

    @classmethod
    def allocate(cls, shape: KVShape, device: torch.device | str = "cpu") -> "KVCache":
        """Make a cache in memory of its own, zeroed."""
        return cls(torch.zeros(shape.num_bytes, dtype=torch.uint8, device=device), shape)

    def layer(self, index: int) -> torch.Tensor:
        """One layer: `[num_blocks, 2, num_kv_heads, block_size, head_dim]`, strided."""
        return self._layers[index]

    def zero_tail(self, block_id: int, from_slot: int) -> None:
        """Zero the slots `from_slot..block_size` of a block in every layer, so that its checksum depends on its tokens
        alone."""
        self.blocks[block_id, :, :, :, from_slot:].zero_()

    def wait_written(self) -> None:
        """Return when every kernel queued so far has written its keys and values: only then may a peer read them."""
        if self.memory.is_cuda:
            torch.cuda.current_stream(self.memory.device).synchronize()
