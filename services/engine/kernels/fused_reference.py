"""The small operators between the products, in plain torch: the oracle of the Triton ones, and what runs anywhere.

All compute in float32 and round once, to the type of their input.
"""

import torch

from services.engine.kernels.paging import Paging, write_kv


def add_rms_norm(
    hidden: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `services.engine.kernels.fused.add_rms_norm`."""
    total = hidden if residual is None else hidden + residual
    return _rms_norm(total, weight, eps), total


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
    heads = qkv.view(len(qkv), -1, head_dim)
    query, key, value = torch.split(heads, [heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
    if norms is not None:
        query_norm, key_norm, eps = norms
        query, key = _rms_norm(query, query_norm, eps), _rms_norm(key, key_norm, eps)
    cos, sin = (table[position_ids][:, None] for table in tables)
    write_kv(layer, _rotate(key, cos, sin), value, paging)
    return _rotate(query, cos, sin)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `services.engine.kernels.fused.silu_and_mul`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
