"""What the fused operators must give, worked out in float64 numpy; `module` is the backend that is asked."""

from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray

from services.engine.kernels.paging import Paging

Wide = NDArray[np.float64]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def normal(rng: np.random.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)).to(dtype)


def wide(tensor: torch.Tensor) -> Wide:
    return tensor.double().numpy()


def assert_close(got: torch.Tensor, expected: Wide, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    np.testing.assert_allclose(wide(got), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def rms_norm(x: Wide, weight: Wide, eps: float) -> Wide:
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight)


def check_add_rms_norm(module: ModuleType, num_tokens: int, size: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(size)
    rows = normal(rng, num_tokens, size + 5, dtype=dtype)[:, 2 : size + 2]  # strided
    residual, weight = normal(rng, num_tokens, size, dtype=dtype), normal(rng, size, dtype=dtype)
    normed, total = module.add_rms_norm(rows, None, weight, 1e-5)
    assert_close(normed, rms_norm(wide(rows), wide(weight), 1e-5), dtype)
    assert torch.equal(total, rows)
    normed, total = module.add_rms_norm(rows, residual, weight, 0.1)
    assert_close(total, wide(rows) + wide(residual), dtype)
    assert_close(normed, rms_norm(wide(total), wide(weight), 0.1), dtype)


def check_silu_and_mul(module: ModuleType, num_tokens: int, size: int, dtype: torch.dtype) -> None:
    gate_up = normal(np.random.default_rng(size), num_tokens, 2 * size, dtype=dtype)
    gate, up = np.split(wide(gate_up), 2, axis=1)
    assert_close(module.silu_and_mul(gate_up), gate / (1 + np.exp(-gate)) * up, dtype)


def check_rotate_and_write(
    module: ModuleType, heads: tuple[int, int, int], block_size: int, dtype: torch.dtype, *, normed: bool
) -> None:
    """Tokens go to scattered slots of a cut-out layer; every other slot keeps its NaN."""
    num_heads, num_kv_heads, head_dim = heads
    rng = np.random.default_rng(head_dim)
    num_tokens, num_blocks, half = 7, 4, head_dim // 2
    qkv = normal(rng, num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    layer = torch.full((num_blocks, 3, 2, num_kv_heads, block_size, head_dim), float("nan"), dtype=dtype)[:, 1]
    slots = rng.permutation(num_blocks * block_size)[:num_tokens]
    positions = rng.integers(0, 50, num_tokens)
    angles = rng.standard_normal((50, half)).astype(np.float32)
    tables = (torch.from_numpy(np.cos(angles)), torch.from_numpy(np.sin(angles)))
    weights = [normal(rng, head_dim, dtype=dtype) for _ in range(2)]
    query = module.rotate_and_write(
        qkv, layer, paging(slots, block_size), torch.from_numpy(positions), tables, (*weights, 1e-3) if normed else None
    )
    assert query.shape == (num_tokens, num_heads, head_dim)
    each = wide(qkv).reshape(num_tokens, -1, head_dim)
    for token, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        cos, sin = (wide(table)[position] for table in tables)
        for head in range(num_heads + num_kv_heads):
            x = each[token, head]
            if normed:
                rounded = rms_norm(x, wide(weights[head >= num_heads]), 1e-3)
                x = wide(torch.from_numpy(rounded).to(dtype))
            a, b = x[:half], x[half:]
            expected = np.concatenate((a * cos - b * sin, b * cos + a * sin))
            block, place = divmod(int(slot), block_size)
            got = query[token, head] if head < num_heads else layer[block, 0, head - num_heads, place]
            assert_close(got, expected, dtype)
        for head in range(num_kv_heads):
            assert torch.equal(
                layer[block, 1, head, place].double(), torch.from_numpy(each[token, head - num_kv_heads])
            )
    assert int(torch.isfinite(layer).sum()) == num_tokens * 2 * num_kv_heads * head_dim


def check_padding_is_written_nowhere(module: ModuleType) -> None:
    """Slot -1, behind two real ones: of eight slots just those two are written, and the queries are as without it."""
    qkv = normal(np.random.default_rng(1), 5, 4 * 8)
    layer = torch.full((2, 2, 1, 4, 8), float("nan"))
    tables = (torch.ones(3, 4), torch.zeros(3, 4))
    slots, positions = np.array([6, 1, -1, -1, -1]), torch.tensor([1, 2, 0, 0, 0])
    query = module.rotate_and_write(qkv, layer, paging(slots, 4, num_padding=3), positions, tables)
    assert torch.equal(query[:2].flatten(1), qkv[:2, :16])  # not rotated: the cosine is 1
    written = torch.isfinite(layer).all(-1)[:, :, 0]  # [blocks, 2, slots]
    assert [slot.tolist() for slot in written.all(1).nonzero()] == [[0, 1], [1, 2]]
    assert int(written.sum()) == 2 * 2
    assert torch.equal(layer[1, 0, 0, 2], qkv[0, 16:24]) and torch.equal(layer[0, 1, 0, 1], qkv[1, 24:])


def paging(slots: NDArray[np.int64], block_size: int, num_padding: int = 0) -> Paging:
    """Only the slots matter here."""
    none = torch.zeros(0, dtype=torch.int32)
    at = torch.from_numpy(slots.astype(np.int64))
    return Paging(none, none, none, at, [], [], block_size, num_padding)
