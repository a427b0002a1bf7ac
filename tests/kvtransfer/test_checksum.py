"""The checksums of blocks: `mix32x2` worked out in plain integers, and what it must catch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from services.kvtransfer import checksum_mix
from services.kvtransfer.checksum import BlockMemory

BLOCK = np.random.default_rng(5).integers(0, 256, 600, dtype=np.uint8)


def by_hand(data: bytes) -> int:
    """The definition in the docstring, one word after the other."""

    def mix(x: int) -> int:
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        x = (x ^ x >> 15) * 0x846CA68B % 2**32
        return x ^ x >> 16

    high = low = 0
    for i in range(len(data) // 4):
        a = mix(int.from_bytes(data[4 * i : 4 * i + 4], "little") ^ (i * 0x9E3779B9 + 0x243F6A88) % 2**32)
        high, low = high + a, low + mix(a ^ (i * 0x85EBCA6B + 0x85A308D3) % 2**32)
    return high % 2**32 << 32 | low % 2**32


@pytest.mark.parametrize("num_bytes", [0, 4, 60, 600])
def test_mix32x2_by_hand(num_bytes: int) -> None:
    for block in (BLOCK[:num_bytes], np.zeros(num_bytes, np.uint8), np.full(num_bytes, 255, np.uint8)):
        assert checksum_mix.checksum(block) == by_hand(block.tobytes())


def test_mix32x2_is_the_same_for_ever() -> None:
    """Workers of different versions compare these numbers."""
    assert checksum_mix.checksum(np.arange(64, dtype=np.uint8)) == by_hand(bytes(range(64))) == 0x523DF0CC29F72CF0


def test_every_flipped_bit_and_byte_shows_and_stirs_half_of_the_bits() -> None:
    whole = checksum_mix.checksum(BLOCK)
    changed = []
    for at in range(len(BLOCK)):
        for pattern in (*(1 << bit for bit in range(8)), 0xFF):
            BLOCK[at] ^= pattern
            changed.append(bin(checksum_mix.checksum(BLOCK) ^ whole).count("1"))
            BLOCK[at] ^= pattern
    assert min(changed) > 0
    assert abs(np.mean(changed) - 32) < 1  # of 64
    assert np.quantile(changed, 0.001) > 16


@pytest.mark.parametrize("word_bytes", [4, 8, 60, 300])
def test_exchanged_pieces_show(word_bytes: int) -> None:
    pieces = BLOCK.reshape(-1, word_bytes)
    whole = checksum_mix.checksum(BLOCK)
    seen = {whole}
    for i in range(len(pieces)):
        for j in range(i):
            order = np.arange(len(pieces))
            order[[i, j]] = j, i
            seen.add(checksum_mix.checksum(pieces[order].reshape(-1)))
    assert len(seen) == 1 + len(pieces) * (len(pieces) - 1) // 2
    assert checksum_mix.checksum(np.roll(BLOCK, 4)) not in seen


def test_either_kind_of_host_memory() -> None:
    pool = torch.from_numpy(np.stack([BLOCK, BLOCK[::-1]]).copy()).view(-1)
    memory = BlockMemory(pool, 600)
    assert memory.checksums([1, 0]) == [xxhash.xxh3_64_intdigest(bytes(b)) for b in (BLOCK[::-1].copy(), BLOCK)]
    mixed = BlockMemory(pool, 600, "mix32x2")
    assert mixed.checksums([1, 0]) == [by_hand(bytes(b)) for b in (BLOCK[::-1], BLOCK)]
    with pytest.raises(ValueError, match="md5 is unknown"):
        BlockMemory(pool, 600, "md5")
    with pytest.raises(ValueError, match="whole number"):
        checksum_mix.checksum(BLOCK[:5])


def test_the_kernel_in_the_interpreter() -> None:
    """Interpreting is decided when triton is imported, so the cases run in a child."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command.append(str(Path(__file__).with_name("checksum_interpreted.py")))
    child = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert child.returncode == 0, child.stdout[-8000:]
    assert "8 passed" in child.stdout, child.stdout[-2000:]
