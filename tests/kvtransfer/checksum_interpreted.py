"""Run by test_checksum.py in a process of its own, with TRITON_INTERPRET=1; not collected by itself."""

import numpy as np
import pytest
import torch

from services.kvtransfer import checksum_mix, checksum_triton

PART = checksum_triton.TILE * checksum_triton.TILES


@pytest.mark.parametrize("num_words", [1, 7, checksum_triton.TILE, checksum_triton.TILE + 1, PART, 2 * PART + 77])
def test_the_references_numbers(num_words: int) -> None:
    """Blocks in any order, one of them twice."""
    pool = np.random.default_rng(num_words).integers(0, 256, (5, 4 * num_words), dtype=np.uint8)
    pool[3] = 255
    found = checksum_triton.checksums(torch.from_numpy(pool), [4, 0, 3, 3])
    assert found == [checksum_mix.checksum(pool[i]) for i in (4, 0, 3, 3)]
    assert found[0] != found[1]


def test_a_flipped_bit_of_the_last_word_shows() -> None:
    pool = torch.zeros(2, 4 * (PART + 1), dtype=torch.uint8)
    pool[1, -1] = 0x80
    found = checksum_triton.checksums(pool, [0, 1])
    assert found[0] >> 32 != found[1] >> 32 and found[0] & 0xFFFFFFFF != found[1] & 0xFFFFFFFF


def test_no_blocks_and_broken_words() -> None:
    assert checksum_triton.checksums(torch.zeros(2, 8, dtype=torch.uint8), []) == []
    with pytest.raises(ValueError, match="whole number"):
        checksum_triton.checksums(torch.zeros(2, 6, dtype=torch.uint8), [0])
