"""The C++ kernels: right, and the same to the last bit whatever else is in the batch."""

import shutil

import pytest
import torch

from services.engine.kernels import attention_backend, attention_reference, paged_attention
from services.engine.kernels.cpu import attention, library
from tests.engine.attention_cases import CASES, Case, make_inputs

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler: the kernels can't be built")
ALIGNED = [name for name, case in CASES.items() if case.head_dim % 16 == 0]


@pytest.mark.parametrize("name", ALIGNED)
def test_equals_dense_attention(name: str) -> None:
    case = CASES[name]
    inputs = make_inputs(case)
    assert attention_backend(inputs.query, inputs.layer) == "cpu"
    got = paged_attention(inputs.query, inputs.layer, inputs.paging, case.scale, case.window, case.softcap)
    torch.testing.assert_close(got, inputs.expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("query_dtype", [torch.float32, torch.bfloat16])
def test_bfloat16_cache(query_dtype: torch.dtype) -> None:
    """Exact arithmetic on rounded inputs: as the reference in float32 on the same rounded inputs."""
    case = CASES["window and softcap"]
    inputs = make_inputs(case)
    query, layer = inputs.query.to(query_dtype), inputs.layer.bfloat16()
    got = attention.paged_attention(query, layer, inputs.paging, case.scale, case.window, case.softcap)
    assert got.dtype == query_dtype
    exact = attention_reference.paged_attention(
        query.float(), layer.float(), inputs.paging, case.scale, case.window, case.softcap
    )
    tolerance = 1e-5 if query_dtype == torch.float32 else 0.01
    torch.testing.assert_close(got.float(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", [None, 21])
def test_a_row_does_not_depend_on_its_tile(window: int | None) -> None:
    """The last token's attention as one of a chunk of 100, and as a decode: the same bits."""
    whole = make_inputs(Case(((100, 150),), block_size=16, window=window, num_heads=6))
    chunk = attention.paged_attention(whole.query, whole.layer, whole.paging, 0.3, window)
    lone = make_inputs(Case(((1, 150),), block_size=16, window=window, num_heads=6))
    step = lone.paging
    object.__setattr__(step, "block_tables", whole.paging.block_tables)
    decode = attention.paged_attention(whole.query[-1:].contiguous(), whole.layer, step, 0.3, window)
    assert torch.equal(decode[0], chunk[-1])


def test_without_a_compiler_torch_takes_over(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    assert library.library.__wrapped__() is None
    monkeypatch.setattr(attention, "library", lambda: None)
    inputs = make_inputs(CASES["mixed"])
    assert attention_backend(inputs.query, inputs.layer) == "reference"
