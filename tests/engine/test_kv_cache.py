import pytest
import torch

from services.engine.kv_cache import KVCache, KVShape

SHAPE = KVShape(num_blocks=5, num_layers=3, num_kv_heads=2, block_size=4, head_dim=8, dtype=torch.float32)


def test_a_block_is_one_contiguous_range() -> None:
    assert SHAPE.block_bytes == 3 * 2 * 2 * 4 * 8 * 4
    memory = torch.zeros(SHAPE.num_bytes + 100, dtype=torch.uint8)
    cache = KVCache(memory, SHAPE)
    cache.blocks[2] = 1.0
    touched = memory.nonzero()[:, 0]
    assert int(touched.min()) >= 2 * SHAPE.block_bytes
    assert int(touched.max()) < 3 * SHAPE.block_bytes
    assert memory[2 * SHAPE.block_bytes : 3 * SHAPE.block_bytes].view(torch.float32).eq(1.0).all()


def test_layer_is_a_view() -> None:
    cache = KVCache.allocate(SHAPE)
    cache.layer(1)[3, 0, 1, 2] = 7.0
    assert cache.blocks[3, 1, 0, 1, 2].eq(7.0).all()
    assert cache.blocks.sum() == 7.0 * 8


def test_zero_tail_leaves_the_rest() -> None:
    cache = KVCache.allocate(SHAPE)
    cache.blocks.fill_(1.0)
    cache.zero_tail(4, 3)
    cache.zero_tail(0, 4)  # nothing
    expected = torch.ones(5, 3, 2, 2, 4, 8)
    expected[4, :, :, :, 3] = 0
    assert torch.equal(cache.blocks, expected)


def test_how_many_blocks_fit() -> None:
    assert SHAPE.fitting(SHAPE.block_bytes * 7 + 1).num_blocks == 7
    assert SHAPE.fitting(SHAPE.block_bytes - 1).num_blocks == 0


@pytest.mark.parametrize(
    "memory",
    [
        torch.zeros(SHAPE.num_bytes - 1, dtype=torch.uint8),
        torch.zeros(SHAPE.num_bytes, dtype=torch.int8),
        torch.zeros(2, SHAPE.num_bytes, dtype=torch.uint8),
        torch.zeros(2 * SHAPE.num_bytes, dtype=torch.uint8)[::2],
    ],
    ids=["small", "dtype", "2-D", "strided"],
)
def test_unfit_memory_is_refused(memory: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="KV memory"):
        KVCache(memory, SHAPE)
