"""The small operators between the products, in Triton: each reads its input once and writes its output once.

One program works on one row (a token, or a head of a token) in float32. Offsets are 64-bit.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from services.engine.kernels.paging import Paging

SILU_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _add_rms_norm(  # type: ignore[no-untyped-def]
    hidden, residual, total, out, weight, eps, stride_h, stride_r,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    there = n < SIZE
    x = tl.load(hidden + row * stride_h + n, mask=there, other=0.0)
    if HAS_RESIDUAL:
        x = (x.to(tl.float32) + tl.load(residual + row * stride_r + n, mask=there, other=0.0).to(tl.float32)).to(
            x.dtype
        )
        tl.store(total + row * SIZE + n, x, mask=there)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    normed = wide * scale * tl.load(weight + n, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + n, normed.to(out.dtype.element_ty), mask=there)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _rotate_and_write(  # type: ignore[no-untyped-def]
    qkv, query, layer, cos, sin, position_ids, slot_mapping, query_norm, key_norm, eps,
    stride_x, stride_lb, stride_lp, stride_lh, stride_ls,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)  # query heads, then key heads, then value heads
    n = tl.arange(0, BLOCK_HALF)
    there = n < HALF
    source = qkv + token * stride_x + head * HEAD_DIM
    first = tl.load(source + n, mask=there, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + n, mask=there, other=0.0).to(tl.float32)
    if head < NUM_HEADS + NUM_KV_HEADS:
        if HAS_NORM:
            norm = query_norm if head < NUM_HEADS else key_norm
            scale = tl.rsqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / HEAD_DIM + eps)
            # rounded as the model's own normalisation rounds, before the rotation
            first = first * scale * tl.load(norm + n, mask=there, other=0.0).to(tl.float32)
            second = second * scale * tl.load(norm + HALF + n, mask=there, other=0.0).to(tl.float32)
            first = first.to(query.dtype.element_ty).to(tl.float32)
            second = second.to(query.dtype.element_ty).to(tl.float32)
        position = tl.load(position_ids + token)
        c = tl.load(cos + position * HALF + n, mask=there, other=0.0)
        s = tl.load(sin + position * HALF + n, mask=there, other=0.0)
        rotated = first * c - second * s
        second = second * c + first * s
        first = rotated
    if head < NUM_HEADS:
        target = query + (token * NUM_HEADS + head) * HEAD_DIM
        tl.store(target + n, first.to(query.dtype.element_ty), mask=there)
        tl.store(target + HALF + n, second.to(query.dtype.element_ty), mask=there)
    else:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        is_value = head >= NUM_HEADS + NUM_KV_HEADS
        kv_head = head - NUM_HEADS - tl.where(is_value, NUM_KV_HEADS, 0)
        target = layer + slot // BLOCK_SIZE * stride_lb + slot % BLOCK_SIZE * stride_ls + kv_head * stride_lh
        target += tl.where(is_value, stride_lp, 0)
        there = there & (slot >= 0)  # padding is written nowhere
        tl.store(target + n, first.to(layer.dtype.element_ty), mask=there)
        tl.store(target + HALF + n, second.to(layer.dtype.element_ty), mask=there)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _silu_and_mul(gate_up, out, stride_x, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = n < SIZE
    gate = tl.load(gate_up + row * stride_x + n, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride_x + SIZE + n, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + n, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=there)


def norm_constants(size: int, *, has_residual: bool) -> dict[str, Any]:
    """The compile-time constants of `_add_rms_norm`."""
    return {"SIZE": size, "BLOCK": triton.next_power_of_2(size), "HAS_RESIDUAL": has_residual}


def rotate_constants(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, *, has_norm: bool
) -> dict[str, Any]:
    """The compile-time constants of `_rotate_and_write`."""
    half = head_dim // 2
    return {
        "NUM_HEADS": num_heads, "NUM_KV_HEADS": num_kv_heads, "HEAD_DIM": head_dim, "HALF": half,
        "BLOCK_HALF": triton.next_power_of_2(half), "BLOCK_SIZE": block_size, "HAS_NORM": has_norm,
    }  # fmt: skip


def silu_constants(size: int) -> dict[str, Any]:
    """The compile-time constants of `_silu_and_mul`."""
    return {"SIZE": size, "BLOCK": min(SILU_BLOCK, triton.next_power_of_2(size))}


def add_rms_norm(
    hidden: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `services.engine.kernels.fused.add_rms_norm`."""
    num_tokens, size = hidden.shape
    out = torch.empty((num_tokens, size), dtype=hidden.dtype, device=hidden.device)
    total = hidden if residual is None else torch.empty_like(out)
    before = hidden if residual is None else residual
    _add_rms_norm[(num_tokens,)](
        hidden, before, total, out, weight, eps, hidden.stride(0), before.stride(0),
        **norm_constants(size, has_residual=residual is not None),
    )  # fmt: skip
    return out, total


def rotate_and_write(
    qkv: torch.Tensor,
    layer: torch.Tensor,
    paging: Paging,
    position_ids: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
) -> torch.Tensor:
    """See `services.engine.kernels.fused.rotate_and_write`."""
    num_kv_heads, head_dim = layer.shape[2], layer.shape[4]
    num_all = qkv.shape[1] // head_dim
    num_heads = num_all - 2 * num_kv_heads
    query = torch.empty((len(qkv), num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    query_norm, key_norm, eps = norms if norms is not None else (qkv, qkv, 0.0)
    _rotate_and_write[(len(qkv), num_all)](
        qkv, query, layer, *tables, position_ids, paging.slot_mapping, query_norm, key_norm, eps,
        qkv.stride(0), layer.stride(0), layer.stride(1), layer.stride(2), layer.stride(3),
        **rotate_constants(num_heads, num_kv_heads, head_dim, layer.shape[3], has_norm=norms is not None),
    )  # fmt: skip
    return query


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `services.engine.kernels.fused.silu_and_mul`."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    constants = silu_constants(size)
    grid = (num_tokens, triton.cdiv(size, constants["BLOCK"]))
    _silu_and_mul[grid](gate_up, out, gate_up.stride(0), **constants)
    return out
