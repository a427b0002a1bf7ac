"""From logits to tokens, all of a step's sequences in one pass, skipping what none of them asks for.

Order: min_tokens, temperature, top_k, top_p over what top_k left, min_p. A token is drawn by the Gumbel-max trick (the
argmax of log-probability plus Gumbel noise is a sample), with noise from a counter-based hash of (seed, choice, index,
token id): it depends on nothing else, so neither on the batch nor on the worker. Tokens that tie with the last one a
filter keeps are kept. Log-probabilities are those of the model's own distribution, before any of the above.

On a CUDA device rows without top_k and top_p are served by `kernels/sampling_triton.py`, which chooses the same tokens.
"""

import math
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Literal

import torch

from services.engine.batch import SampledToken
from services.engine.sequence import SamplingParams

GREEDY_BELOW = 1e-5  # a lower temperature is greedy: dividing by it would overflow
NUM_CANDIDATES = 1024  # how many of the best tokens top_k and top_p look at before they take the whole vocabulary
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One row of logits: who asks, and for which index of its output (forced tokens included)."""

    params: SamplingParams
    index: int
    eos_token_ids: frozenset[int] = frozenset()
    choice: int = 0

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is wanted."""
        return self.params.temperature < GREEDY_BELOW


def sample(
    logits: torch.Tensor, rows: Items[SamplingRow], backend: Literal["auto", "torch", "triton"] = "auto"
) -> list[SampledToken]:
    """Choose one token per row of `logits` [num_rows, vocab_size] (float32; not changed).

    `auto` is `triton` on CUDA devices, `torch` elsewhere.
    """
    allowed = _mask_endings(logits, rows)
    filtered = [r for r, row in enumerate(rows) if _is_filtered(row)]
    whole = sorted(set(range(len(rows))) - set(filtered))  # rows that look at their whole vocabulary
    if backend == "triton" or (backend == "auto" and logits.device.type == "cuda"):
        chosen = _choose_on_device(allowed, rows, whole)
    else:
        chosen = allowed.argmax(-1)
        _draw_rows(chosen, allowed, rows, [r for r in whole if not rows[r].is_greedy], _draw_unfiltered)
    _draw_rows(chosen, allowed, rows, filtered, _draw_filtered)
    token_ids: list[int] = chosen.tolist()
    sampled = [SampledToken(token_id) for token_id in token_ids]
    for r, token in _with_logprobs(logits, rows, token_ids):
        sampled[r] = token
    return sampled


def _is_filtered(row: SamplingRow) -> bool:
    """Whether the row is drawn from its best tokens only."""
    return not row.is_greedy and (row.params.top_k > 0 or row.params.top_p < 1.0)


def _draw_rows(
    chosen: torch.Tensor,
    allowed: torch.Tensor,
    rows: Items[SamplingRow],
    ids: list[int],
    draw: Callable[[torch.Tensor, list[SamplingRow]], torch.Tensor],
) -> None:
    """Put the tokens of rows `ids` into `chosen`."""
    if ids:
        at = torch.tensor(ids, device=allowed.device)
        temperatures = torch.tensor([rows[r].params.temperature for r in ids], device=allowed.device)
        chosen[at] = draw(allowed[at] / temperatures[:, None], [rows[r] for r in ids])


def _choose_on_device(allowed: torch.Tensor, rows: Items[SamplingRow], ids: list[int]) -> torch.Tensor:
    """The tokens of rows `ids`, `[num_rows]`; what stands in the other rows is not defined."""
    from services.engine.kernels import sampling_triton  # slow to import, and of no use without a GPU

    chosen = torch.empty(len(rows), dtype=torch.int64, device=allowed.device)
    if ids:
        keys = _mixed_keys(_keys([rows[r] for r in ids]))
        temperatures = [0.0 if rows[r].is_greedy else rows[r].params.temperature for r in ids]
        log_min_ps = [_log_min_p(rows[r]) for r in ids]
        draws = map(sampling_triton.Draw, ids, keys, temperatures, log_min_ps)
        sampling_triton.choose(allowed, list(draws), chosen)
    return chosen


def gumbel_noise(keys: Items[tuple[int, int, int]], token_ids: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise for (seed, choice, index) keys and int32 token ids `[1 or len(keys), n]`.

    23 random bits a value. Two rounds of a 32-bit integer hash (lowbias32, Chris Wellons' "hash prospector") over the
    token id, keyed by two halves of a 64-bit mix (splitmix64) of the key.
    """
    halves = torch.tensor([[_signed32(key >> 32), _signed32(key)] for key in _mixed_keys(keys)], dtype=torch.int32)
    low, high = halves.to(token_ids.device).unbind(1)
    hashed = _lowbias32(token_ids * _signed32(0x9E3779B9) + low[:, None])
    hashed = _lowbias32(hashed.bitwise_xor_(high[:, None]))
    uniform = hashed.bitwise_right_shift_(9).bitwise_and_(0x7FFFFF).float().add_(0.5).mul_(2.0**-23)  # inside (0, 1)
    return uniform.log_().neg_().log_().neg_()


def _mask_endings(logits: torch.Tensor, rows: Items[SamplingRow]) -> torch.Tensor:
    """`logits` without the tokens that would end a row that has not reached its min_tokens."""
    pairs = [
        (r, token_id)
        for r, row in enumerate(rows)
        if row.index < row.params.min_tokens
        for token_id in row.eos_token_ids | row.params.stop_token_ids
        if 0 <= token_id < logits.shape[1]
    ]
    if not pairs:
        return logits
    at = torch.tensor(pairs, device=logits.device)
    return logits.index_put((at[:, 0], at[:, 1]), logits.new_tensor(float("-inf")))


def _draw_unfiltered(scaled: torch.Tensor, rows: list[SamplingRow]) -> torch.Tensor:
    """Draw from the whole vocabulary, but for what min_p excludes."""
    if any(row.params.min_p > 0 for row in rows):
        threshold = scaled.amax(-1, keepdim=True) + _log_min_ps(rows, scaled.device)
        scaled = scaled.masked_fill(scaled < threshold, float("-inf"))
    token_ids = torch.arange(scaled.shape[1], dtype=torch.int32, device=scaled.device)[None]
    return (gumbel_noise(_keys(rows), token_ids) + scaled).argmax(-1)


def _draw_filtered(scaled: torch.Tensor, rows: list[SamplingRow]) -> torch.Tensor:
    """Draw from the best tokens: a candidate list first, the whole vocabulary where that turns out too short."""
    vocab_size = scaled.shape[1]
    width = min(vocab_size, max(NUM_CANDIDATES, 2 * max(row.params.top_k for row in rows)))
    values, token_ids = scaled.topk(width)  # [num_rows, width], descending
    threshold = _threshold(values, scaled, rows)
    if width < vocab_size and bool((values[:, -1:] >= threshold).any()):
        values, token_ids = scaled.sort(descending=True)
        threshold = _threshold(values, scaled, rows)
    noisy = gumbel_noise(_keys(rows), token_ids.int()) + values
    best = noisy.masked_fill_(values < threshold, float("-inf")).argmax(-1, keepdim=True)
    return token_ids.gather(1, best)[:, 0]


def _threshold(values: torch.Tensor, scaled: torch.Tensor, rows: list[SamplingRow]) -> torch.Tensor:
    """The lowest value each row keeps, [num_rows, 1]; `values` are the best of `scaled`, descending."""
    width = values.shape[1]
    top_k = torch.tensor([min(row.params.top_k or width, width) for row in rows], device=values.device)
    limited = torch.tensor([row.params.top_k > 0 for row in rows], device=values.device)
    top_p = torch.tensor([row.params.top_p for row in rows], dtype=torch.float64, device=values.device)
    in_top_k = torch.arange(width, device=values.device)[None] < top_k[:, None]
    mass = values.masked_fill(~in_top_k, float("-inf"))
    total = torch.where(limited, mass.logsumexp(-1), scaled.logsumexp(-1))
    before = (mass - total[:, None]).double().exp().cumsum(-1).roll(1, -1)  # mass of the tokens before each
    before[:, 0] = 0.0  # the first is kept whatever top_p
    kept = in_top_k & (before < top_p[:, None])
    lowest = values.gather(1, kept.sum(-1, keepdim=True) - 1)
    return torch.maximum(lowest, values[:, :1] + _log_min_ps(rows, values.device))


def _log_min_p(row: SamplingRow) -> float:
    return math.log(row.params.min_p) if row.params.min_p > 0 else float("-inf")


def _log_min_ps(rows: list[SamplingRow], device: torch.device) -> torch.Tensor:
    return torch.tensor([_log_min_p(row) for row in rows], dtype=torch.float32, device=device)[:, None]


def _with_logprobs(
    logits: torch.Tensor, rows: Items[SamplingRow], token_ids: list[int]
) -> list[tuple[int, SampledToken]]:
    """Row number and token, with log-probabilities, of the rows that ask for them."""
    ids = [r for r, row in enumerate(rows) if row.params.logprobs]
    if not ids:
        return []
    at = torch.tensor(ids, device=logits.device)
    wanted = torch.tensor([token_ids[r] for r in ids], device=logits.device)
    logprobs = logits[at].log_softmax(-1)
    own: list[float] = logprobs.gather(1, wanted[:, None])[:, 0].tolist()
    most = min(max(rows[r].params.num_top_logprobs for r in ids), logits.shape[1])
    values, best = (part.tolist() for part in logprobs.topk(most))
    return [
        (
            r,
            SampledToken(
                token_ids[r], own[i], tuple(zip(best[i], values[i], strict=True))[: rows[r].params.num_top_logprobs]
            ),
        )
        for i, r in enumerate(ids)
    ]


def _keys(rows: list[SamplingRow]) -> list[tuple[int, int, int]]:
    return [(row.params.seed, row.choice, row.index) for row in rows]


def _mixed_keys(keys: Items[tuple[int, int, int]]) -> list[int]:
    """64 bits for each (seed, choice, index)."""
    return [_mix64(_mix64(_mix64(seed & _MASK64) ^ choice) ^ index) for seed, choice, index in keys]


def _mix64(x: int) -> int:
    """One step of splitmix64 (Steele, Lea and Flood 2014), a bijection of 64-bit integers."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _lowbias32(x: torch.Tensor) -> torch.Tensor:
    """Hash int32 values in place; the masks make the arithmetic shifts logical."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= _signed32(0x7FEB352D)
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= _signed32(0x846CA68B)
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def _signed32(x: int) -> int:
    x &= 0xFFFFFFFF
    return x - (1 << 32) if x >= 1 << 31 else x
