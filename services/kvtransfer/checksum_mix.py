"""The checksum `mix32x2`: what a GPU takes of a block where it lies, and this reference of it for host memory.

A block is read as little-endian 32-bit words w[0], w[1], ...; its size must be a multiple of 4 bytes. With all
arithmetic modulo 2**32 and `mix` the bijection lowbias32 (Chris Wellons' "hash prospector"):

    a[i] = mix(w[i] ^ (i * STEP_A + START_A))
    b[i] = mix(a[i] ^ (i * STEP_B + START_B))
    checksum = (sum of a) << 32 | sum of b

Sums may be taken in any order, so any number of programs can share a block. What it detects: whatever changes within
one word, always (for a fixed i, a[i] is a bijection of w[i], so exactly one term of the first sum changes); anything
else, but for a chance of about 2**-64. The position enters before each mix, so exchanged words, rows or halves change
both sums. It guards against accidents, not against somebody who looks for collisions.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

STEP_A, START_A = 0x9E3779B9, 0x243F6A88  # odd steps: no two positions of a block share a key
STEP_B, START_B = 0x85EBCA6B, 0x85A308D3
MULTIPLIER_1, MULTIPLIER_2 = 0x7FEB352D, 0x846CA68B

Words = NDArray[np.uint32]


def checksum(block: NDArray[Any]) -> int:
    """64 bits of a block, uint8 `[block_bytes]`, contiguous. Raises ValueError where its bytes are no whole words."""
    if block.nbytes % 4:
        raise ValueError(f"a block of {block.nbytes} bytes is no whole number of 32-bit words")
    keys_a, keys_b = _keys(block.nbytes // 4)
    mixed, scratch = block.view("<u4") ^ keys_a, np.empty_like(keys_a)
    _mix(mixed, scratch)
    high = _sum(mixed)
    mixed ^= keys_b
    _mix(mixed, scratch)
    return high << 32 | _sum(mixed)


@lru_cache(maxsize=2)
def _keys(num_words: int) -> tuple[Words, Words]:
    """What is xored into the words of each round; kept, because all blocks of a pool are of one size."""
    at = np.arange(num_words, dtype=np.uint32)
    first, second = at * np.uint32(STEP_A), at * np.uint32(STEP_B)
    return first + np.uint32(START_A), second + np.uint32(START_B)


def _mix(x: Words, scratch: Words) -> None:
    """lowbias32, in place."""
    for shift, multiplier in ((16, MULTIPLIER_1), (15, MULTIPLIER_2), (16, 1)):
        np.right_shift(x, np.uint32(shift), out=scratch)
        x ^= scratch
        if multiplier != 1:
            x *= np.uint32(multiplier)


def _sum(x: Words) -> int:
    return int(x.sum(dtype=np.uint64)) & 0xFFFFFFFF
