"""Layouts: what differs is named; equal fingerprints mean equal layouts."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from services.kvtransfer.layout import KVLayout, checksum_for

LAYOUT = KVLayout("float32", 16, 30, 3, 64, 737_280, weights_fingerprint="w", tokenizer_fingerprint="t")


def test_equal_layouts_agree() -> None:
    assert LAYOUT.mismatch(replace(LAYOUT)) is None
    assert LAYOUT.fingerprint() == replace(LAYOUT).fingerprint()
    assert len(LAYOUT.fingerprint()) == 32


@pytest.mark.parametrize("name", [field.name for field in fields(KVLayout)])
def test_every_field_that_differs_is_named(name: str) -> None:
    value = getattr(LAYOUT, name)
    other = replace(LAYOUT, **{name: value + 1 if isinstance(value, int) else value + "x"})
    mismatch = LAYOUT.mismatch(other)
    assert mismatch is not None
    assert mismatch.startswith(f"{name}: {value} here")
    assert LAYOUT.fingerprint() != other.fingerprint()


def test_the_kind_follows_the_memory() -> None:
    assert checksum_for("cpu", 16) == "xxh3_64"
    assert checksum_for("cuda", 16) == checksum_for("cuda:1", 16) == "mix32x2"
    assert checksum_for("cuda", 18) == "xxh3_64"  # no whole words
    with pytest.raises(ValueError, match="checksum: mix32x2 wants whole words of 4 bytes, not 18 a block"):
        replace(LAYOUT, checksum="mix32x2", block_bytes=18)
