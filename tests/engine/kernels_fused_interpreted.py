"""Run by test_kernels_triton.py in a process of its own, with TRITON_INTERPRET=1; not collected by itself."""

import pytest
import torch

from services.engine.kernels import fused_triton
from tests.engine import fused_cases

HEADS = {"grouped": (4, 2, 16), "odd": (9, 3, 20), "multi-query": (5, 1, 64), "no groups": (3, 3, 6)}


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty whose every element, if read or left unwritten, shows."""

    def poisoned(*shape: object, **options: object) -> torch.Tensor:
        return torch.full(shape if isinstance(shape[0], int) else shape[0], float("nan"), **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1, 100, 576, 1500])
def test_add_rms_norm_and_silu(size: int, dtype: torch.dtype) -> None:
    fused_cases.check_add_rms_norm(fused_triton, 3, size, dtype)
    fused_cases.check_silu_and_mul(fused_triton, 3, size, dtype)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("heads", HEADS)
def test_rotate_and_write(heads: str, dtype: torch.dtype, normed: bool) -> None:
    fused_cases.check_rotate_and_write(fused_triton, HEADS[heads], 4, dtype, normed=normed)


def test_padding_is_written_nowhere() -> None:
    fused_cases.check_padding_is_written_nowhere(fused_triton)
