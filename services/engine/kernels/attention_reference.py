"""Paged attention in plain torch: the oracle of the other backends, and the one that runs anywhere.

The decodes of a step are one gather and one attention; a prefill chunk is one of each by itself. Nothing loops over
tokens.
"""

from typing import cast

import torch
from torch.nn.functional import scaled_dot_product_attention

from services.engine.kernels.paging import Paging


def paged_attention(
    query: torch.Tensor,
    layer: torch.Tensor,
    paging: Paging,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """See `services.engine.kernels.paged_attention`."""
    out = torch.empty_like(query)
    if paging.decode_ids:
        rows = _decode_rows(paging, query.device)
        out[rows] = _decodes(query[rows], layer, paging, scale, window, softcap)
    for s in paging.chunk_ids:
        first, last = paging.host_query_starts[s], paging.host_query_starts[s + 1]
        out[first:last] = _chunk(query[first:last], layer, paging, s, scale, window, softcap)
    return out


def _decodes(
    query: torch.Tensor, layer: torch.Tensor, paging: Paging, scale: float, window: int | None, softcap: float | None
) -> torch.Tensor:
    """All sequences with one query row at once: query [n, num_heads, head_dim]."""
    num_seqs, num_heads, head_dim = query.shape
    num_kv_heads = layer.shape[2]
    tables, allowed, slots = _decode_plan(paging, window, query.device)  # [n, b], [n, c], [n, c] of context c
    heads = torch.arange(num_kv_heads, device=query.device)[:, None]
    blocks, slots = tables[:, None, :], slots[:, None, :]
    key = layer[blocks, 0, heads, slots].to(query.dtype)  # [n, num_kv_heads, c, head_dim]
    value = layer[blocks, 1, heads, slots].to(query.dtype)
    grouped = query.view(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    return _attend(grouped, key, value, allowed[:, None, None, :], scale, softcap).reshape(query.shape)


def _chunk(
    query: torch.Tensor,
    layer: torch.Tensor,
    paging: Paging,
    s: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """One sequence with several query rows: query [q, num_heads, head_dim]."""
    num_rows, num_heads, _ = query.shape
    num_kv_heads, length = layer.shape[2], paging.host_seq_lens[s]
    num_blocks = -(-length // paging.block_size)
    context = layer[paging.block_tables[s, :num_blocks].long()]  # [b, 2, num_kv_heads, block_size, head_dim]
    context = context.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length].to(query.dtype)
    groups = num_heads // num_kv_heads
    key = context[0].repeat_interleave(groups, dim=0)[None]  # [1, num_heads, length, head_dim]
    value = context[1].repeat_interleave(groups, dim=0)[None]
    rows = query.transpose(0, 1)[None]  # [1, num_heads, q, head_dim]
    if softcap is None and num_rows == length and (window is None or window >= length):
        attended = scaled_dot_product_attention(rows, key, value, is_causal=True, scale=scale)
    else:
        allowed = _chunk_mask(paging, s, window, query.device)
        attended = _attend(rows, key, value, allowed, scale, softcap)
    return attended[0].transpose(0, 1)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    allowed: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attention over `[n, heads, rows, head_dim]` where `allowed` broadcasts to [n, heads, rows, context]."""
    if softcap is None:
        return scaled_dot_product_attention(query, key, value, attn_mask=allowed, scale=scale)
    scores = (query.float() @ key.float().transpose(-1, -2)) * scale
    scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~allowed, float("-inf"))
    return (scores.softmax(-1) @ value.float()).to(query.dtype)


def _decode_rows(paging: Paging, device: torch.device) -> torch.Tensor:
    if "decode_rows" not in paging.memo:
        rows = [paging.host_query_starts[s] for s in paging.decode_ids]
        paging.memo["decode_rows"] = torch.tensor(rows, device=device)
    return cast(torch.Tensor, paging.memo["decode_rows"])


def _decode_plan(
    paging: Paging, window: int | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Block and slot of each context position of the decodes, and which positions may be seen; each [n, context]."""
    memo_key = ("decode_plan", window)
    if memo_key not in paging.memo:
        lengths = torch.tensor([paging.host_seq_lens[s] for s in paging.decode_ids], device=device)[:, None]
        positions = torch.arange(int(max(paging.host_seq_lens[s] for s in paging.decode_ids)), device=device)[None]
        allowed = positions < lengths
        if window is not None:
            allowed = allowed & (positions > lengths - 1 - window)
        seen = torch.where(allowed, positions, (lengths - 1).clamp(min=0))  # elsewhere may lie NaN, and 0 * NaN is NaN
        tables = paging.block_tables[torch.tensor(paging.decode_ids, device=device)].long()
        blocks = tables.gather(1, seen // paging.block_size)
        paging.memo[memo_key] = (blocks, allowed, seen % paging.block_size)
    return cast(tuple[torch.Tensor, torch.Tensor, torch.Tensor], paging.memo[memo_key])


def _chunk_mask(paging: Paging, s: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Which of [q, length] a chunk's rows may see: themselves and what came before, within the window."""
    memo_key = ("chunk_mask", s, window)
    if memo_key not in paging.memo:
        length = paging.host_seq_lens[s]
        num_rows = paging.host_query_starts[s + 1] - paging.host_query_starts[s]
        row = torch.arange(length - num_rows, length, device=device)[:, None]
        column = torch.arange(length, device=device)[None]
        allowed = column <= row
        if window is not None:
            allowed = allowed & (column > row - window)
        paging.memo[memo_key] = allowed
    return cast(torch.Tensor, paging.memo[memo_key])
