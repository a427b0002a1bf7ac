"""`mix32x2` on a GPU: the sums of `checksum_mix.py` over listed blocks of a pool, 8 bytes a block to the host.

Programs of a block add their parts to its two sums atomically: of integers, in any order the same. Each word is read
once. Never run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
import triton
import triton.language as tl

from services.kvtransfer import checksum_mix as mix

TILE = 2048  # words at a time
TILES = 8  # of one program
CONSTANTS = {
    "STEP_A": mix.STEP_A, "START_A": mix.START_A, "STEP_B": mix.STEP_B, "START_B": mix.START_B,
    "MULTIPLIER_1": mix.MULTIPLIER_1, "MULTIPLIER_2": mix.MULTIPLIER_2, "TILE": TILE, "TILES": TILES,
}  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _mix32(x, MULTIPLIER_1: tl.constexpr, MULTIPLIER_2: tl.constexpr):  # type: ignore[no-untyped-def]
    x ^= x >> 16
    x *= MULTIPLIER_1
    x ^= x >> 15
    x *= MULTIPLIER_2
    x ^= x >> 16
    return x


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _sums(  # type: ignore[no-untyped-def]
    words, block_ids, sums, num_words,
    STEP_A: tl.constexpr, START_A: tl.constexpr, STEP_B: tl.constexpr, START_B: tl.constexpr,
    MULTIPLIER_1: tl.constexpr, MULTIPLIER_2: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    nth, part = tl.program_id(0), tl.program_id(1)
    block = words + tl.load(block_ids + nth).to(tl.int64) * num_words
    total_a = tl.zeros([TILE], tl.uint32)
    total_b = tl.zeros([TILE], tl.uint32)
    for tile in range(TILES):
        at = (part * TILES + tile) * TILE + tl.arange(0, TILE)
        there = at < num_words
        word = tl.load(block + at, mask=there, other=0).to(tl.uint32, bitcast=True)
        place = at.to(tl.uint32)
        a = _mix32(word ^ (place * STEP_A + START_A), MULTIPLIER_1, MULTIPLIER_2)
        b = _mix32(a ^ (place * STEP_B + START_B), MULTIPLIER_1, MULTIPLIER_2)
        total_a += tl.where(there, a, 0)
        total_b += tl.where(there, b, 0)
    tl.atomic_add(sums + 2 * nth, tl.sum(total_a.to(tl.int64), 0))
    tl.atomic_add(sums + 2 * nth + 1, tl.sum(total_b.to(tl.int64), 0))


def checksums(blocks: torch.Tensor, block_ids: Sequence[int]) -> list[int]:
    """The `mix32x2` of each listed block of `blocks`, uint8 `[num_blocks, block_bytes]`, contiguous, in device memory.

    Runs on the device's current stream, after every kernel queued there before, and waits for the answer. Raises
    ValueError where a block is no whole number of words.
    """
    if blocks.shape[1] % 4:
        raise ValueError(f"a block of {blocks.shape[1]} bytes is no whole number of 32-bit words")
    words = blocks.view(torch.int32)
    num_words = words.shape[1]
    ids = torch.tensor(list(block_ids), dtype=torch.int32).to(blocks.device)
    sums = torch.zeros((len(ids), 2), dtype=torch.int64, device=blocks.device)
    if len(ids):
        # a launch goes to the thread's current device, which is the first one unless somebody says so
        with torch.cuda.device(blocks.device) if blocks.is_cuda else nullcontext():
            _sums[(len(ids), triton.cdiv(num_words, TILE * TILES))](words, ids, sums, num_words, **CONSTANTS)
    return [(high & 0xFFFFFFFF) << 32 | low & 0xFFFFFFFF for high, low in sums.tolist()]
