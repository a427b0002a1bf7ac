"""Greedy choice and Gumbel-max draw in Triton: one pass over the logits, nothing sorted.

The oracle is `services/engine/sampling.py`, whose noise this repeats: the same integer hash of the same two halves of a
row's key, the same 23-bit uniform, logarithms that are accurate near 1 (libdevice's, not the hardware's `lg2.approx`).
So tokens differ only where two candidates are closer than a rounding of the logarithm. A row's vocabulary is cut into
tiles, one program each; `_choose` leaves every tile's best value and token id, `_pick` the row's. Of equal values the
lowest token id wins, as with torch's argmax, and NaN beats everything. Rows with min_p need their largest logit first:
`_peaks` reads them once more. Rows with top_k or top_p are not for here. Offsets are 64-bit. Never run on a GPU yet.
"""

from collections.abc import Sequence as Items
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

TILE = 2048  # tokens of the vocabulary that one program looks at
ROW_FIELDS = 5  # of the int32 table: row of the logits, two halves of the key, bits of temperature and of log(min_p)


class Draw(NamedTuple):
    """One row's wish. Temperature 0 is greedy; `log_min_p` is -inf where min_p is off."""

    row: int
    key: int  # 64 bits: what sampling.py mixes of seed, choice and index
    temperature: float
    log_min_p: float


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _load_tile(logits, row, tile, stride_row, vocab_size, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Token ids of a tile and their logits: -inf behind the vocabulary's end, +inf for NaN."""
    token = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row.to(tl.int64) * stride_row + token, mask=token < vocab_size, other=float("-inf"))
    return token, tl.where(x == x, x, float("inf"))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _lowbias32(x):  # type: ignore[no-untyped-def]
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _peaks(  # type: ignore[no-untyped-def]
    logits, table, peaks, stride_row, vocab_size, num_tiles, ROW_FIELDS: tl.constexpr, TILE: tl.constexpr
):
    """The largest logit of each tile, peaks [rows, num_tiles], of the rows that have a min_p."""
    nth, tile = tl.program_id(0), tl.program_id(1)
    if tl.load(table + nth * ROW_FIELDS + 4).to(tl.float32, bitcast=True) > float("-inf"):
        _, x = _load_tile(logits, tl.load(table + nth * ROW_FIELDS), tile, stride_row, vocab_size, TILE)
        tl.store(peaks + nth * num_tiles + tile, tl.max(x, 0))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _choose(  # type: ignore[no-untyped-def]
    logits, table, peaks, best_values, best_tokens, stride_row, vocab_size, num_tiles,
    ROW_FIELDS: tl.constexpr, TILE: tl.constexpr, BLOCK_TILES: tl.constexpr,
):  # fmt: skip
    nth, tile = tl.program_id(0), tl.program_id(1)
    fields = table + nth * ROW_FIELDS
    temperature = tl.load(fields + 3).to(tl.float32, bitcast=True)
    token, value = _load_tile(logits, tl.load(fields), tile, stride_row, vocab_size, TILE)
    if temperature > 0.0:
        value = tl.div_rn(value, temperature)
        log_min_p = tl.load(fields + 4).to(tl.float32, bitcast=True)
        if log_min_p > float("-inf"):
            n = tl.arange(0, BLOCK_TILES)
            peak = tl.max(tl.load(peaks + nth * num_tiles + n, mask=n < num_tiles, other=float("-inf")), 0)
            value = tl.where(value < tl.div_rn(peak, temperature) + log_min_p, float("-inf"), value)
        low = tl.load(fields + 1).to(tl.uint32, bitcast=True)
        high = tl.load(fields + 2).to(tl.uint32, bitcast=True)
        hashed = _lowbias32(token.to(tl.uint32) * 0x9E3779B9 + low)
        hashed = _lowbias32(hashed ^ high)
        uniform = ((hashed >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2**-23; inside (0, 1), exact
        value += -tl.log(-tl.log(uniform))
    best = tl.max(value, 0)
    tl.store(best_values + nth * num_tiles + tile, best)
    tl.store(best_tokens + nth * num_tiles + tile, tl.min(tl.where(value == best, token, 0x7FFFFFFF), 0))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _pick(  # type: ignore[no-untyped-def]
    table, best_values, best_tokens, chosen, num_tiles, ROW_FIELDS: tl.constexpr, BLOCK_TILES: tl.constexpr
):
    """The best of a row's tiles into chosen [rows of the logits], int64."""
    nth = tl.program_id(0)
    n = tl.arange(0, BLOCK_TILES)
    there = n < num_tiles
    value = tl.load(best_values + nth * num_tiles + n, mask=there, other=float("-inf"))
    token = tl.load(best_tokens + nth * num_tiles + n, mask=there, other=0x7FFFFFFF)
    token = tl.min(tl.where(value == tl.max(value, 0), token, 0x7FFFFFFF), 0)
    tl.store(chosen + tl.load(table + nth * ROW_FIELDS), token.to(tl.int64))


def constants(vocab_size: int) -> dict[str, Any]:
    """The compile-time constants of `_choose`; `_peaks` and `_pick` take some of them."""
    tile = min(TILE, triton.next_power_of_2(vocab_size))
    return {
        "ROW_FIELDS": ROW_FIELDS,
        "TILE": tile,
        "BLOCK_TILES": triton.next_power_of_2(triton.cdiv(vocab_size, tile)),
    }


def choose(logits: torch.Tensor, draws: Items[Draw], chosen: torch.Tensor) -> None:
    """Put a token id into `chosen[draw.row]` for every draw.

    `logits` is float32 `[num_rows, vocab_size]` with any row stride, `chosen` int64 `[num_rows]`, contiguous; rows that
    no draw names are left alone. Raises ValueError for other types and strides.
    """
    if logits.dtype != torch.float32 or logits.stride(1) != 1 or chosen.dtype != torch.int64:
        raise ValueError("logits must be float32 with a contiguous last axis, and tokens int64")
    device, vocab_size = logits.device, logits.shape[1]
    table = _table(draws).to(device, non_blocking=True)
    both = constants(vocab_size)
    num_tiles = triton.cdiv(vocab_size, both["TILE"])
    grid = (len(draws), num_tiles)
    best_values = torch.empty(grid, dtype=torch.float32, device=device)
    best_tokens = torch.empty(grid, dtype=torch.int32, device=device)
    peaks = best_values  # not read where no row has a min_p
    only = {name: both[name] for name in ("ROW_FIELDS", "TILE")}
    if any(draw.log_min_p > float("-inf") and draw.temperature > 0 for draw in draws):
        peaks = torch.empty(grid, dtype=torch.float32, device=device)
        _peaks[grid](logits, table, peaks, logits.stride(0), vocab_size, num_tiles, **only)
    _choose[grid](
        logits, table, peaks, best_values, best_tokens, logits.stride(0), vocab_size, num_tiles, **both
    )  # fmt: skip
    only = {name: both[name] for name in ("ROW_FIELDS", "BLOCK_TILES")}
    _pick[grid[:1]](table, best_values, best_tokens, chosen, num_tiles, **only)


def _table(draws: Items[Draw]) -> torch.Tensor:
    """`[num_draws, ROW_FIELDS]` int32, one copy to the device."""
    table = np.empty((len(draws), ROW_FIELDS), np.uint32)
    table[:, 0] = [draw.row for draw in draws]
    table[:, 1] = [draw.key >> 32 for draw in draws]  # the half that the noise calls low
    table[:, 2] = [draw.key & 0xFFFFFFFF for draw in draws]
    table[:, 3] = np.array([draw.temperature for draw in draws], np.float32).view(np.uint32)
    table[:, 4] = np.array([draw.log_min_p for draw in draws], np.float32).view(np.uint32)
    return torch.from_numpy(table.view(np.int32))
