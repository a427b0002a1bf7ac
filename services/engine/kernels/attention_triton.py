"""Paged attention in Triton: one kernel for decodes and prefill chunks, the context split where it is long.

Work is cut into tiles of query rows of one sequence and one KV head: a tile holds `BLOCK_Q` tokens times the query
heads that share that KV head, so that each block of keys is read once for all of them (grouped-query attention). A
decode is a tile with one token. Softmax is computed online (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention,
arXiv 2205.14135); with several splits each writes its unnormalised sum, its maximum and its weight in float32, and
`_combine` merges them (Flash-Decoding). Strides are taken from the tensors; offsets are 64-bit.
"""

from typing import Any, cast

import torch
import triton
import triton.language as tl

from services.engine.kernels.paging import Paging

MAX_SPLITS = 32
MIN_SPLIT_TOKENS = 256  # a shorter context is not worth a second pass
CHUNK_TILE_ROWS = 64


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _attend(  # type: ignore[no-untyped-def]  # noqa: PLR0915
    query, layer, out, partial, stats, block_tables, seq_lens, query_starts, tile_seqs, tile_offsets,
    scale, softcap, window, split_tokens,
    stride_qt, stride_qh, stride_ot, stride_oh, stride_lb, stride_lp, stride_lh, stride_ls, stride_bt,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq = tl.load(tile_seqs + tile)
    first_row = tl.load(query_starts + seq)
    num_rows = tl.load(query_starts + seq + 1) - first_row
    length = tl.load(seq_lens + seq)
    offset = tl.load(tile_offsets + tile)  # of the tile's first token among the sequence's rows

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    token = offset + m // GROUP
    live = (m < BLOCK_Q * GROUP) & (token < num_rows)
    head = kv_head * GROUP + m % GROUP
    row = (first_row + token).to(tl.int64)
    position = length - num_rows + token  # of each row's token in its sequence
    q = tl.load(
        query + row[:, None] * stride_qt + head[:, None] * stride_qh + d[None, :],
        mask=live[:, None] & (d < HEAD_DIM)[None, :],
        other=0.0,
    )

    # [start, stop): the context this program looks at
    last = tl.minimum(length - num_rows + offset + BLOCK_Q, length)
    start = split * split_tokens
    stop = tl.minimum(start + split_tokens, last)
    if HAS_WINDOW:
        start = tl.maximum(start, (length - num_rows + offset - window + 1) // BLOCK_N * BLOCK_N)
        start = tl.maximum(start, 0)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    n = tl.arange(0, BLOCK_N)
    for begin in range(start, stop, BLOCK_N):
        context = begin + n
        there = context < stop
        block = tl.load(block_tables + seq * stride_bt + context // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
        base = block * stride_lb + kv_head * stride_lh + (context % BLOCK_SIZE) * stride_ls
        wanted = there[:, None] & (d < HEAD_DIM)[None, :]
        key = tl.load(layer + base[:, None] + d[None, :], mask=wanted, other=0.0)
        scores = tl.dot(q, tl.trans(key).to(q.dtype), input_precision=PRECISION) * scale
        if HAS_SOFTCAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)  # tanh
        seen = there[None, :] & (context[None, :] <= position[:, None])
        if HAS_WINDOW:
            seen = seen & (context[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # a row that has seen nothing yet
        probability = tl.exp(scores - shift[:, None])
        decay = tl.exp(peak - shift)
        value = tl.load(layer + stride_lp + base[:, None] + d[None, :], mask=wanted, other=0.0)
        weight = weight * decay + tl.sum(probability, 1)
        total = total * decay[:, None]
        total += tl.dot(probability.to(q.dtype), value.to(q.dtype), input_precision=PRECISION)
        peak = new_peak

    if NUM_SPLITS == 1:
        target = out + row[:, None] * stride_ot + head[:, None] * stride_oh + d[None, :]
        result = total / tl.where(weight == 0.0, 1.0, weight)[:, None]
        tl.store(target, result.to(out.dtype.element_ty), mask=live[:, None] & (d < HEAD_DIM)[None, :])
    else:  # partial [tiles, kv_heads, splits, BLOCK_M, BLOCK_D], stats the same without BLOCK_D, twice
        slot = ((tile * tl.num_programs(1) + kv_head) * NUM_SPLITS + split).to(tl.int64)
        tl.store(partial + slot * BLOCK_M * BLOCK_D + m[:, None] * BLOCK_D + d[None, :], total)
        tl.store(stats + slot * 2 * BLOCK_M + m, peak)
        tl.store(stats + slot * 2 * BLOCK_M + BLOCK_M + m, weight)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _combine(  # type: ignore[no-untyped-def]
    partial, stats, out, query_starts, tile_seqs, tile_offsets, stride_ot, stride_oh,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    seq = tl.load(tile_seqs + tile)
    first_row = tl.load(query_starts + seq)
    num_rows = tl.load(query_starts + seq + 1) - first_row
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    token = tl.load(tile_offsets + tile) + m // GROUP
    live = (m < BLOCK_Q * GROUP) & (token < num_rows)

    first_slot = ((tile * tl.num_programs(1) + kv_head) * NUM_SPLITS).to(tl.int64)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for split in range(NUM_SPLITS):
        peak = tl.maximum(peak, tl.load(stats + (first_slot + split) * 2 * BLOCK_M + m))
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    weight = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for split in range(NUM_SPLITS):
        slot = first_slot + split
        factor = tl.exp(tl.load(stats + slot * 2 * BLOCK_M + m) - shift)
        weight += factor * tl.load(stats + slot * 2 * BLOCK_M + BLOCK_M + m)
        total += factor[:, None] * tl.load(partial + slot * BLOCK_M * BLOCK_D + m[:, None] * BLOCK_D + d[None, :])
    row = (first_row + token).to(tl.int64)
    target = out + row[:, None] * stride_ot + (kv_head * GROUP + m % GROUP)[:, None] * stride_oh + d[None, :]
    result = total / tl.where(weight == 0.0, 1.0, weight)[:, None]
    tl.store(target, result.to(out.dtype.element_ty), mask=live[:, None] & (d < HEAD_DIM)[None, :])


def paged_attention(
    query: torch.Tensor,
    layer: torch.Tensor,
    paging: Paging,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """See `services.engine.kernels.paged_attention`; `num_splits` forces how many programs share a decode's context."""
    if query.stride(-1) != 1 or layer.stride(-1) != 1:
        raise ValueError("the last axis of query and cache must be contiguous")
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    group = query.shape[1] // layer.shape[2]
    if paging.decode_ids:
        splits = num_splits or _choose_splits(paging, layer.shape[2], query.device)
        _launch(query, layer, out, paging, paging.decode_ids, scale, window, softcap, block_q=1, num_splits=splits)
    if paging.chunk_ids:
        _launch(
            query, layer, out, paging, paging.chunk_ids, scale, window, softcap, block_q=chunk_rows(group), num_splits=1
        )
    return out


def chunk_rows(group: int) -> int:
    """Tokens of a prefill tile: 64 rows, where each token has a row for every query head of the group."""
    return max(1, CHUNK_TILE_ROWS // int(triton.next_power_of_2(group)))


def constants(
    group: int,
    head_dim: int,
    block_size: int,
    block_q: int,
    num_splits: int,
    *,
    window: bool,
    softcap: bool,
    ieee: bool,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The compile-time constants of `_attend` and of `_combine` for one shape of work."""
    block_d = max(16, triton.next_power_of_2(head_dim))
    both = {
        "GROUP": group, "HEAD_DIM": head_dim, "BLOCK_D": block_d, "BLOCK_Q": block_q, "NUM_SPLITS": num_splits,
        "BLOCK_M": max(16, triton.next_power_of_2(block_q * group)),  # tl.dot wants 16 rows
    }  # fmt: skip
    attend = {
        "BLOCK_SIZE": block_size, "BLOCK_N": 64 if block_d <= 128 else 32, "HAS_WINDOW": window, "HAS_SOFTCAP": softcap,
        "PRECISION": "ieee" if ieee else "tf32",
    }  # fmt: skip
    return both | attend, both


def options(constants: dict[str, Any]) -> dict[str, Any]:
    """How a kernel of these constants is compiled; `python -m bench.aot` shows that none spills this way."""
    large = constants["BLOCK_M"] * constants["BLOCK_D"] > 64 * 64
    return {"enable_fp_fusion": True, "num_warps": 8 if large else 4, "num_stages": 3}


def _launch(
    query: torch.Tensor,
    layer: torch.Tensor,
    out: torch.Tensor,
    paging: Paging,
    ids: list[int],
    scale: float,
    window: int | None,
    softcap: float | None,
    *,
    block_q: int,
    num_splits: int,
) -> None:
    _, num_heads, head_dim = query.shape
    num_kv_heads = layer.shape[2]
    group = num_heads // num_kv_heads
    attend, combine = constants(
        group, head_dim, layer.shape[3], block_q, num_splits,
        window=window is not None, softcap=softcap is not None, ieee=query.dtype == torch.float32,
    )  # fmt: skip
    tile_seqs, tile_offsets = _tiles(paging, ids, block_q, query.device)
    grid = (len(tile_seqs), num_kv_heads, num_splits)
    longest = max(paging.host_seq_lens[s] for s in ids)
    split_tokens = -(-longest // (num_splits * attend["BLOCK_N"])) * attend["BLOCK_N"]
    if num_splits > 1:
        rows = attend["BLOCK_M"]
        partial = torch.empty((*grid, rows, attend["BLOCK_D"]), dtype=torch.float32, device=query.device)
        stats = torch.empty((*grid, 2, rows), dtype=torch.float32, device=query.device)
    else:
        partial = stats = out  # not touched
    _attend[grid](
        query, layer, out, partial, stats, paging.block_tables, paging.seq_lens, paging.query_starts, tile_seqs,
        tile_offsets, scale, softcap or 0.0, window or 0, split_tokens, query.stride(0), query.stride(1),
        out.stride(0), out.stride(1), layer.stride(0), layer.stride(1), layer.stride(2), layer.stride(3),
        paging.block_tables.stride(0), **options(attend), **attend,
    )  # fmt: skip
    if num_splits > 1:
        _combine[grid[:2]](
            partial, stats, out, paging.query_starts, tile_seqs, tile_offsets, out.stride(0), out.stride(1),
            **options(combine), **combine,
        )  # fmt: skip


def _tiles(paging: Paging, ids: list[int], block_q: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Which sequence each tile belongs to, and its first token's offset among that sequence's rows; both [num_tiles]
    int32."""
    memo_key = ("tiles", ids is paging.decode_ids, block_q)
    if memo_key not in paging.memo:
        starts = paging.host_query_starts
        pairs = [(s, offset) for s in ids for offset in range(0, starts[s + 1] - starts[s], block_q)]
        paging.memo[memo_key] = torch.tensor(pairs, dtype=torch.int32).t().contiguous().to(device).unbind(0)
    return cast(tuple[torch.Tensor, torch.Tensor], paging.memo[memo_key])


def _choose_splits(paging: Paging, num_kv_heads: int, device: torch.device) -> int:
    """As many splits as fill the device twice, while each still has MIN_SPLIT_TOKENS of the longest context."""
    if device.type != "cuda":
        return 1
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = -(-2 * processors // (len(paging.decode_ids) * num_kv_heads))
    longest = max(paging.host_seq_lens[s] for s in paging.decode_ids)
    return max(1, min(MAX_SPLITS, wanted, longest // MIN_SPLIT_TOKENS))
