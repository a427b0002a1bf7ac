"""Paged attention in C++ on the CPU, behind the same signature as the other backends."""

import ctypes
from typing import cast

import numpy as np
import torch

from services.engine.kernels.cpu.library import AttentionStep, library
from services.engine.kernels.paging import Paging

TILE_QUERY = 48  # query rows of a tile, as in attention.h


def supports(query: torch.Tensor, layer: torch.Tensor) -> bool:
    """Whether the compiled kernel is there and takes these tensors."""
    kernels = library()
    return (
        kernels is not None
        and query.dtype in (torch.float32, torch.bfloat16)
        and layer.dtype in (torch.float32, torch.bfloat16)
        and query.shape[-1] % kernels.panel_width() == 0
        and layer.stride(-1) == 1
        and layer.stride(-2) == layer.shape[-1]
    )


def paged_attention(
    query: torch.Tensor,
    layer: torch.Tensor,
    paging: Paging,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """See `services.engine.kernels.paged_attention`; `supports` says for which tensors."""
    kernels = library()
    assert kernels is not None
    rows = query.float().contiguous()
    out = torch.empty_like(rows)
    tiles, positions = tiles_of(paging, query.shape[1] // layer.shape[2])
    step = AttentionStep(
        num_heads=query.shape[1],
        num_kv_heads=layer.shape[2],
        head_dim=query.shape[2],
        block_size=layer.shape[3],
        window=window or 0,
        scale=scale,
        softcap=softcap or 0.0,
        block_stride=layer.stride(0),
        value_offset=layer.stride(1),
        head_stride=layer.stride(2),
        block_tables=paging.block_tables.data_ptr(),
        table_stride=paging.block_tables.stride(0),
    )
    kernels.paged_attention(
        ctypes.byref(step),
        layer.data_ptr(),
        layer.dtype == torch.bfloat16,
        rows.data_ptr(),
        out.data_ptr(),
        tiles.data_ptr(),
        len(tiles),
        positions.data_ptr(),
        torch.get_num_threads(),
    )
    return out.to(query.dtype)


def tiles_of(paging: Paging, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut a step into tiles of some tokens of one sequence each.

    Returns `[num_tiles, 3]` int32 (sequence, first query row, number of rows) and `[num_tiles]` int64 (the position of
    each tile's first token). `group` query heads share a KV head.
    """
    memo_key = ("cpu tiles", group)
    if memo_key not in paging.memo:
        most = max(1, TILE_QUERY // group)
        starts = np.array(paging.host_query_starts)
        counts = -(-np.diff(starts) // most)
        seqs = np.repeat(np.arange(len(counts)), counts)
        nth = np.arange(len(seqs)) - np.repeat(np.cumsum(counts) - counts, counts)
        first = starts[seqs] + nth * most
        rows = np.minimum(most, starts[seqs + 1] - first)
        positions = np.array(paging.host_seq_lens)[seqs] - (starts[seqs + 1] - first)
        tiles = torch.from_numpy(np.stack([seqs, first, rows], axis=1).astype(np.int32))
        paging.memo[memo_key] = (tiles, torch.from_numpy(positions.astype(np.int64)))
    return cast(tuple[torch.Tensor, torch.Tensor], paging.memo[memo_key])
