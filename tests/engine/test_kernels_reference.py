import pytest
import torch

from services.engine.kernels.attention_reference import paged_attention
from tests.engine.attention_cases import CASES, DECODES, make_inputs, with_padding


@pytest.mark.parametrize("name", CASES)
def test_equals_dense_attention(name: str) -> None:
    case = CASES[name]
    inputs = make_inputs(case)
    before = inputs.layer.clone()
    got = paged_attention(inputs.query, inputs.layer, inputs.paging, case.scale, case.window, case.softcap)
    torch.testing.assert_close(got, inputs.expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(inputs.layer.nan_to_num(9e9), before.nan_to_num(9e9)), "the cache was written"


@pytest.mark.parametrize("name", DECODES)
def test_padding_disturbs_nobody(name: str) -> None:
    case = DECODES[name]
    inputs = make_inputs(case)
    query, paging = with_padding(inputs, 2, 50)
    got = paged_attention(query, inputs.layer, paging, case.scale, case.window, case.softcap)
    torch.testing.assert_close(got[:-2], inputs.expected, rtol=1e-5, atol=1e-5)


def test_bfloat16_is_close() -> None:
    case = CASES["mixed"]
    inputs = make_inputs(case)
    got = paged_attention(inputs.query.bfloat16(), inputs.layer.bfloat16(), inputs.paging, case.scale)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), inputs.expected, rtol=0.05, atol=0.05)
