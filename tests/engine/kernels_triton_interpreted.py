"""Run by test_kernels_triton.py in a process of its own, with TRITON_INTERPRET=1; not collected by itself."""

import pytest
import torch

from services.engine.kernels import attention_triton
from tests.engine.attention_cases import CASES, DECODES, make_inputs, with_padding


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty whose every element, if read or left unwritten, shows."""

    def poisoned(*shape: object, **options: object) -> torch.Tensor:
        return torch.full(shape if isinstance(shape[0], int) else shape[0], float("nan"), **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_equals_dense_attention(name: str, num_splits: int) -> None:
    case = CASES[name]
    inputs = make_inputs(case)
    got = attention_triton.paged_attention(
        inputs.query, inputs.layer, inputs.paging, case.scale, case.window, case.softcap, num_splits=num_splits
    )
    torch.testing.assert_close(got, inputs.expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("name", DECODES)
def test_padding_reads_nothing_and_bounds_are_enough(name: str, num_splits: int) -> None:
    """As in a CUDA graph: rows of length 0 give zeros, and host lists that only bound the lengths change nothing."""
    case = DECODES[name]
    inputs = make_inputs(case)
    columns = 2 * inputs.paging.block_tables.shape[1] + 1
    query, paging = with_padding(inputs, 3, columns, bound=columns * case.block_size)
    got = attention_triton.paged_attention(
        query, inputs.layer, paging, case.scale, case.window, case.softcap, num_splits=num_splits
    )
    torch.testing.assert_close(got[:-3], inputs.expected, rtol=1e-5, atol=1e-5)
    assert not got[-3:].any()


@pytest.mark.parametrize("num_splits", [1, 3])
def test_float16_is_close(num_splits: int) -> None:
    """Half precision; the interpreter's dot products take bfloat16 for integers, so that is left to a GPU."""
    case = CASES["mixed"]
    inputs = make_inputs(case)
    query, layer = inputs.query.half(), inputs.layer.half()
    got = attention_triton.paged_attention(query, layer, inputs.paging, case.scale, num_splits=num_splits)
    torch.testing.assert_close(got.float(), inputs.expected, rtol=0.01, atol=0.01)
