"""The Triton kernels, compiled for GPUs that are not here; `python -m bench.aot` does all shapes."""

import pytest

from bench import aot

KERNELS = (
    "attend",
    "combine",
    "add_rms_norm",
    "rotate_and_write",
    "silu_and_mul",
    "sample_peaks",
    "sample_choose",
    "sample_pick",
    "checksum",
)
SOME = ("SmolLM2 135M", "Llama 3.1 70B", "Gemma 2 2B", "Llama 3.1 8B")


@pytest.mark.parametrize("capability", aot.CAPABILITIES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_compiles_without_spilling(kernel: str, capability: int) -> None:
    chosen = [each for each in aot.variants() if each.kernel == kernel and each.what.endswith((*SOME, "any block"))]
    assert chosen
    for variant in chosen:
        found = aot.compiled(variant, capability)
        assert found.registers > 0
        assert aot.problems(found, capability) == [], variant.what


def test_float32_compiles() -> None:
    for variant in aot.variants("fp32"):
        if variant.what.endswith("SmolLM2 135M"):
            assert aot.compiled(variant, 90).registers > 0


def test_a_spill_is_seen() -> None:
    """The same kernel with a fraction of its threads has too few registers; the figure must show it."""
    (variant,) = [each for each in aot.variants() if each.what == "prefill, Gemma 2 2B"]
    starved = aot.Variant(
        **{field: getattr(variant, field) for field in variant.__slots__} | {"options": {"num_warps": 2}}
    )
    found = aot.compiled(starved, 90)
    assert found.local_bytes > 0
    assert "spills" in aot.problems(found, 90)[0]
