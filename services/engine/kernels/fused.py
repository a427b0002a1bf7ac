"""The small operators between a decoder's products, by device: Triton on CUDA, plain torch elsewhere.

Each reads its input once and writes its output once, computes in float32, and rounds to its input's type.
"""

from types import ModuleType

import torch

from services.engine.kernels import fused_reference
from services.engine.kernels.paging import Paging

__all__ = ["add_rms_norm", "rotate_and_write", "silu_and_mul"]


def add_rms_norm(
    hidden: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns RMSNorm(hidden + residual) * weight, and hidden + residual, both `[num_tokens, size]`.

    Without `residual` the sum is `hidden` itself.
    """
    normed, total = _backend(hidden).add_rms_norm(hidden, residual, weight, eps)
    return normed, total


def rotate_and_write(
    qkv: torch.Tensor,
    layer: torch.Tensor,
    paging: Paging,
    position_ids: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
) -> torch.Tensor:
    """Rotates queries and keys, writes keys and values into the cache; returns `[num_tokens, num_heads, head_dim]`.

    `qkv` is `[num_tokens, (num_heads + 2 num_kv_heads) head_dim]`, `layer` one layer of the cache, `position_ids`
    `[num_tokens]` int64, `tables` cosines and sines `[num_positions, head_dim / 2]` in float32. `norms` (query weight,
    key weight, eps) normalises each head before it is rotated.
    """
    query: torch.Tensor = _backend(qkv).rotate_and_write(qkv, layer, paging, position_ids, tables, norms)
    return query


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns SiLU(gate) * up, `[num_tokens, size]`, of `[num_tokens, 2 size]` with the gates first."""
    product: torch.Tensor = _backend(gate_up).silu_and_mul(gate_up)
    return product


def _backend(tensor: torch.Tensor) -> ModuleType:
    if tensor.device.type != "cuda":
        return fused_reference
    from services.engine.kernels import fused_triton  # slow to import, and of no use without a GPU

    return fused_triton
