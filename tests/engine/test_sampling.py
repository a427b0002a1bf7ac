"""Sampling against an implementation written independently, in float64 numpy with full sorts."""

import math

import numpy as np
import pytest
import torch

from services.engine.sampling import SamplingRow, gumbel_noise, sample
from services.engine.sequence import SamplingParams

EOS = 5


def probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution that is to be sampled from, worked out the slow way."""
    p = np.exp((logits - logits.max()).astype(np.float64) / params.temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    keep = np.ones(len(p), dtype=bool)
    if params.top_k:
        keep[order[params.top_k :]] = False
        p = np.where(keep, p, 0) / p[keep].sum()
    if params.top_p < 1:
        mass = 0.0
        for token in order:
            if mass >= params.top_p:
                keep[token] = False
            mass += p[token]
    if params.min_p:
        keep &= p >= params.min_p * p.max()
    p = np.where(keep, p, 0)
    return p / p.sum()


def draw(logits: torch.Tensor, params: SamplingParams, num: int) -> np.ndarray:
    """`num` tokens at indices 0..num of one row of logits."""
    tokens = []
    for first in range(0, num, 500):
        rows = [SamplingRow(params, index) for index in range(first, min(num, first + 500))]
        tokens += [token.token_id for token in sample(logits.expand(len(rows), -1), rows)]
    return np.array(tokens)


@pytest.mark.parametrize("vocab_size", [40, 3000])
@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 1},
        {"top_k": 7},
        {"top_p": 0.5},
        {"top_p": 0.95},
        {"top_p": 1e-9},
        {"min_p": 0.1},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
        {"temperature": 30.0, "top_p": 0.99},  # nearly flat: more candidates than the short list has
    ],
    ids=str,
)
def test_distribution(chosen: dict[str, float], vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(1, vocab_size, generator=generator) * 2
    params = SamplingParams(**{"temperature": 1.0, "seed": 11, **chosen})
    p = probabilities(logits[0].numpy(), params)
    num = 20_000 if vocab_size == 40 else 2_000
    counts = np.bincount(draw(logits, params, num), minlength=vocab_size)
    assert not counts[p == 0].any(), "a token that the filters exclude was drawn"
    # Pearson's statistic over cells of at least five expected draws; its mean is the degrees of freedom, its deviation
    # sqrt(2 dof)
    big = p * num >= 5
    cells_p, cells_n = np.append(p[big], p[~big].sum()), np.append(counts[big], counts[~big].sum())
    cells_p, cells_n = cells_p[cells_p > 0], cells_n[cells_p > 0]
    statistic = float(((cells_n - num * cells_p) ** 2 / (num * cells_p)).sum())
    freedom = len(cells_p) - 1
    assert statistic <= freedom + 5 * math.sqrt(2 * freedom) + 1e-9


def test_kept_tokens_equal_the_slow_way() -> None:
    """With many draws at a high temperature every kept token appears, and no other."""
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(3))
    for chosen in ({"top_k": 9}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 12, "top_p": 0.7}):
        params = SamplingParams(temperature=2.0, seed=1, **chosen)
        kept = set(np.flatnonzero(probabilities(logits[0].numpy(), params)))
        assert set(draw(logits, params, 5_000)) == kept


def test_greedy_takes_the_first_of_the_best() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0], [0.0, 2.0, 2.0]])
    tokens = sample(logits, [SamplingRow(SamplingParams(), 0)] * 3)
    assert [token.token_id for token in tokens] == [1, 0, 1]


def test_noise_depends_on_seed_choice_and_index_alone() -> None:
    """A row alone, or anywhere in any batch beside any others, draws the same token."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(24, 2500, generator=generator)
    kinds = [
        {},
        {"top_k": 50},
        {"top_p": 0.9},
        {"min_p": 0.02},
        {"temperature": 0.0},
        {"temperature": 25.0, "top_p": 0.999},
    ]
    rows = [
        SamplingRow(SamplingParams(**{"temperature": 1.0, "seed": 2**64 - 1 - r, **kinds[r % 6]}), r * 37)
        for r in range(24)
    ]
    alone = [sample(logits[r : r + 1], [rows[r]])[0].token_id for r in range(24)]
    assert [token.token_id for token in sample(logits, rows)] == alone
    order = torch.randperm(24, generator=generator).tolist()
    shuffled = sample(logits[order], [rows[r] for r in order])
    assert [token.token_id for token in shuffled] == [alone[r] for r in order]


def test_noise_differs_by_seed_choice_and_index() -> None:
    token_ids = torch.arange(1000, dtype=torch.int32)[None]
    keys = [(0, 0, 0), (1, 0, 0), (2**63, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (2**32, 0, 0)]
    noise = gumbel_noise(keys, token_ids)
    correlation = torch.corrcoef(noise) - torch.eye(len(keys))
    assert correlation.abs().max() < 5 / math.sqrt(1000)


def test_noise_is_gumbel() -> None:
    noise = gumbel_noise(
        [(s, 0, i) for s in range(8) for i in range(8)], torch.arange(20_000, dtype=torch.int32)[None]
    ).double()
    assert noise.isfinite().all()
    uniform = (-(-noise).exp()).exp().flatten().sort().values  # its own distribution function makes it uniform
    ideal = (torch.arange(len(uniform), dtype=torch.float64) + 0.5) / len(uniform)
    assert (uniform - ideal).abs().max() < 1.95 / math.sqrt(len(uniform))  # Kolmogorov-Smirnov at 0.1 %
    # neighbours along tokens, indices and seeds are uncorrelated
    grid = noise.view(8, 8, 20_000) - noise.mean()
    for a, b in ((grid[..., 1:], grid[..., :-1]), (grid[:, 1:], grid[:, :-1]), (grid[1:], grid[:-1])):
        assert abs(float((a * b).mean() / grid.var())) < 5 / math.sqrt(a.numel())


def test_noise_is_the_same_for_ever() -> None:
    """A continuation on another device or version must draw what this one would have: worked out in plain integers."""

    def splitmix64(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    def lowbias32(x: int) -> int:
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        x = (x ^ x >> 15) * 0x846CA68B % 2**32
        return x ^ x >> 16

    def gumbel(seed: int, choice: int, index: int, token_id: int) -> float:
        key = splitmix64(splitmix64(splitmix64(seed) ^ choice) ^ index)
        hashed = lowbias32(lowbias32((token_id * 0x9E3779B9 + (key >> 32)) % 2**32) ^ key % 2**32)
        return -math.log(-math.log(((hashed >> 9) + 0.5) / 2**23))

    keys = [(0, 0, 0), (42, 0, 3), (2**64 - 1, 7, 4095), (2**63, 0, 1)]
    token_ids = [0, 1, 2, 999, 49_151, 151_642]
    expected = [[gumbel(*key, token_id) for token_id in token_ids] for key in keys]
    noise = gumbel_noise(keys, torch.tensor([token_ids], dtype=torch.int32)).tolist()
    for got, wanted in zip(noise, expected, strict=True):
        assert got == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    assert gumbel(42, 0, 3, 0) == pytest.approx(0.57448, abs=1e-5)


def test_min_tokens_hides_endings() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=frozenset({6, 99}), temperature=0.0)
    logits = torch.zeros(3, 8)
    logits[:, EOS], logits[:, 6], logits[:, 2] = 9.0, 8.0, 7.0
    before = logits.clone()
    tokens = sample(logits, [SamplingRow(params, index, frozenset({EOS})) for index in (0, 1, 2)])
    assert [token.token_id for token in tokens] == [2, 2, EOS]
    assert torch.equal(logits, before)


def test_logprobs_are_the_models_own() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    expected = logits.double() - logits.double().exp().sum(-1, keepdim=True).log()
    plain = SamplingParams()
    asked = SamplingParams(temperature=3.0, top_k=5, seed=9, logprobs=True, num_top_logprobs=4)
    none_on_top = SamplingParams(logprobs=True)
    tokens = sample(logits, [SamplingRow(plain, 0), SamplingRow(asked, 1), SamplingRow(none_on_top, 2)])
    assert tokens[0].logprob == 0.0 and tokens[0].top_logprobs == ()
    assert tokens[1].logprob == pytest.approx(float(expected[1, tokens[1].token_id]), abs=1e-5)
    best = expected[1].argsort(descending=True)[:4].tolist()
    assert [token_id for token_id, _ in tokens[1].top_logprobs] == best
    assert [value for _, value in tokens[1].top_logprobs] == pytest.approx(
        [float(expected[1, b]) for b in best], abs=1e-5
    )
    assert tokens[2].logprob == pytest.approx(float(expected[2].max()), abs=1e-5)
    assert tokens[2].top_logprobs == ()
