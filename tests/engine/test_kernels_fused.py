"""The fused operators' torch reference against float64 numpy; the Triton form of the same cases runs interpreted."""

from types import ModuleType

import pytest
import torch

from services.engine.kernels import fused, fused_reference
from tests.engine import fused_cases

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEADS = {"grouped": (4, 2, 16), "odd": (9, 3, 20), "multi-query": (5, 1, 64), "no groups": (3, 3, 6)}


@pytest.fixture(params=[fused_reference, fused], ids=["reference", "dispatched"])
def backend(request: pytest.FixtureRequest) -> ModuleType:
    module: ModuleType = request.param
    return module


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 16, 100, 576])
def test_add_rms_norm_and_silu(backend: ModuleType, size: int, dtype: torch.dtype) -> None:
    fused_cases.check_add_rms_norm(backend, 5, size, dtype)
    fused_cases.check_silu_and_mul(backend, 5, size, dtype)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS)
def test_rotate_and_write(backend: ModuleType, heads: str, dtype: torch.dtype, normed: bool) -> None:
    fused_cases.check_rotate_and_write(backend, HEADS[heads], 4, dtype, normed=normed)


def test_padding_is_written_nowhere(backend: ModuleType) -> None:
    fused_cases.check_padding_is_written_nowhere(backend)
