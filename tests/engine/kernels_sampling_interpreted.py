"""Run by test_kernels_triton.py in a process of its own, with TRITON_INTERPRET=1; not collected by itself."""

import itertools

import pytest
import torch

from services.engine.kernels import sampling_triton
from services.engine.sampling import SamplingRow, sample
from services.engine.sequence import SamplingParams

TILE = sampling_triton.TILE
VOCABS = (1, 2, 37, TILE - 1, TILE, TILE + 1, 3 * TILE + 513)


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty whose every element, if read or left unwritten, shows."""

    def poisoned(*shape: object, dtype: torch.dtype, **options: object) -> torch.Tensor:
        value = float("inf") if dtype.is_floating_point else -(2**31)
        return torch.full(shape if isinstance(shape[0], int) else shape[0], value, dtype=dtype, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch, "empty", poisoned)


def tokens(logits: torch.Tensor, rows: list[SamplingRow], backend: str) -> list[int]:
    before = logits.clone()
    found = [token.token_id for token in sample(logits, rows, backend)]  # type: ignore[arg-type]
    assert torch.equal(logits, before) or before.isnan().any()
    return found


def mixed_rows(num: int) -> list[SamplingRow]:
    """Every temperature with every min_p, greedy rows among them, and rows for the torch path between."""
    kinds = list(itertools.product((0.0, 1e-4, 0.5, 1.0, 30.0), (0.0, 1e-6, 0.05, 0.9, 1.0)))
    rows = []
    for r in range(num):
        temperature, min_p = kinds[r % len(kinds)]
        filters = {"top_k": 5} if r % 7 == 3 else {"top_p": 0.8} if r % 11 == 5 else {}
        params = SamplingParams(temperature=temperature, min_p=min_p, seed=2**64 - 1 - r * 2**33, **filters)  # type: ignore[arg-type]
        rows.append(SamplingRow(params, index=r * 1000, choice=r % 3))
    return rows


@pytest.mark.parametrize("vocab_size", VOCABS)
def test_same_tokens_as_torch(vocab_size: int) -> None:
    logits = torch.randn(50, vocab_size + 9, generator=torch.Generator().manual_seed(vocab_size)) * 3
    strided = logits[:, 4 : vocab_size + 4]
    rows = mixed_rows(50)
    expected = tokens(strided, rows, "torch")
    assert tokens(strided, rows, "triton") == expected
    assert vocab_size < 37 or len(set(expected)) > 5


def test_many_draws_of_a_flat_row() -> None:
    """Nearly equal logits: the noise alone decides, over both ends of its range."""
    logits = (torch.randn(1, 3000, generator=torch.Generator().manual_seed(1)) * 1e-3).expand(100, -1)
    rows = [SamplingRow(SamplingParams(temperature=1.0, seed=s), index=i) for s in range(10) for i in range(10)]
    expected = tokens(logits, rows, "torch")
    assert tokens(logits, rows, "triton") == expected
    assert len(set(expected)) > 90


@pytest.mark.parametrize("vocab_size", [5, 2 * TILE + 5])
def test_masked_rows_and_ties(vocab_size: int) -> None:
    """-inf is never taken while there is anything else; of equals the first is; all -inf gives token 0, NaN wins."""
    last = vocab_size - 1
    logits = torch.full((6, vocab_size), float("-inf"))
    logits[0, last] = -1e30
    logits[1, [1, 3, last]] = 7.0
    logits[3, 2] = float("nan")
    logits[4, [2, last]] = 0.0
    logits[5] = 0.25
    greedy = [SamplingRow(SamplingParams(), 0)] * 6
    expected = [last, 1, 0, 2, 2, 0]
    assert tokens(logits, greedy, "torch") == expected
    assert tokens(logits, greedy, "triton") == expected
    drawn = [SamplingRow(SamplingParams(temperature=0.7, min_p=0.2, seed=r), 3) for r in range(6)]
    found = tokens(logits, drawn, "triton")
    assert found == tokens(logits, drawn, "torch")
    assert found[0] == last and found[1] in (1, 3, last) and found[2] == 0 and found[3] == 2 and found[4] in (2, last)


def test_min_p_cuts_exactly() -> None:
    """Of four tokens two are within half of the likeliest; many draws at a high temperature find just those."""
    logits = torch.tensor([[0.0, -0.5, -0.9, -4.0]]).expand(100, -1)
    rows = [SamplingRow(SamplingParams(temperature=1.0, min_p=0.5, seed=5), i) for i in range(100)]
    found = tokens(logits, rows, "triton")
    assert set(found) == {0, 1}  # exp(-0.5) = 0.61, exp(-0.9) = 0.41
    hot = [SamplingRow(SamplingParams(temperature=2.0, min_p=0.5, seed=5), i) for i in range(100)]
    assert set(tokens(logits, hot, "triton")) == {0, 1, 2}  # exp(-0.45) = 0.64, exp(-2) = 0.14


def test_min_tokens_and_logprobs_are_unchanged() -> None:
    logits = torch.randn(2, 70, generator=torch.Generator().manual_seed(2))
    logits[:, 5] = 50.0
    params = SamplingParams(temperature=1.0, seed=3, min_tokens=1, logprobs=True, num_top_logprobs=2)
    rows = [SamplingRow(params, index, frozenset({5})) for index in (0, 1)]
    by_torch, by_triton = sample(logits, rows, "torch"), sample(logits, rows, "triton")
    assert by_triton == by_torch
    assert by_triton[0].token_id != 5 and by_triton[1].token_id == 5


def test_rows_that_nobody_draws_are_left_alone() -> None:
    logits = torch.zeros(3, 10)
    logits[:, 4] = 1.0
    chosen = torch.full((3,), -7)
    sampling_triton.choose(logits, [sampling_triton.Draw(1, 0, 0.0, float("-inf"))], chosen)
    assert chosen.tolist() == [-7, 4, -7]


def test_other_types_are_refused() -> None:
    draw = [sampling_triton.Draw(0, 0, 0.0, float("-inf"))]
    for logits in (torch.zeros(1, 4, dtype=torch.float16), torch.zeros(4, 4).t()[:1]):
        with pytest.raises(ValueError, match="float32"):
            sampling_triton.choose(logits, draw, torch.zeros(1, dtype=torch.int64))
