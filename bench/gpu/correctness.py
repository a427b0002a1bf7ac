"""Every kernel against float64 on the same inputs, over odd shapes, on the device and in the type it will serve."""

from __future__ import annotations

from typing import Any

import torch

from bench.gpu.inputs import Inputs, Work, make
from services.engine.kernels import Paging, attention_backend, fused, paged_attention

# what one rounding to the type may cost, times a few roundings
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
MIXED = ((1, 12), (4, 4), (1, 3), (7, 30), (70, 130), (1, 700))
WORKS = {
    "grouped 3 x 64": Work(MIXED, 9, 3, 64),
    "grouped 7 x 128": Work(MIXED, 28, 4, 128),
    "no groups, 96": Work(MIXED, 4, 4, 96),
    "multi-query, 80": Work(MIXED, 5, 1, 80),
    "head of 256, window, softcap": Work(MIXED, 8, 4, 256, window=64, softcap=30.0),
    "blocks of 32": Work(MIXED, 8, 2, 64, block_size=32),
    "decodes": Work(tuple((1, length) for length in (1, 15, 16, 17, 255, 1000, 3000)), 8, 2, 128),
}


def check_all(device: torch.device) -> dict[str, Any]:
    """Largest error by kernel and case, relative to the largest value expected; those over the tolerance by name."""
    errors: dict[str, float] = {}
    wrong = []
    backends = set()
    for dtype, tolerance in TOLERANCE.items():
        for name, work in WORKS.items():
            inputs = make(work, dtype, device)
            backends.add(attention_backend(inputs.query, inputs.layer))
            errors[f"attention, {name}, {dtype}"] = _attention_error(work, inputs)
        errors[f"add_rms_norm, {dtype}"] = _norm_error(dtype, device)
        errors[f"silu_and_mul, {dtype}"] = _silu_error(dtype, device)
        errors |= {f"rotate_and_write, {n}, {dtype}": e for n, e in _rotate_errors(dtype, device).items()}
        wrong += [case for case, error in errors.items() if case.endswith(str(dtype)) and not error <= tolerance]
    return {"backends": sorted(backends), "errors": errors, "wrong": wrong}


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """NaN where anything is not a number: whoever compares with `<=` sees it."""
    return float((got.double() - expected).abs().max() / expected.abs().max())


def dense(work: Work, inputs: Inputs) -> torch.Tensor:
    """Attention in float64, one sequence after the other."""
    outputs = []
    starts = inputs.paging.host_query_starts
    for row, (num_rows, context) in enumerate(work.lengths):
        query = inputs.query[starts[row] : starts[row + 1]].double()
        keys, values = (
            each[row].double().repeat_interleave(work.num_heads // work.num_kv_heads, dim=1)
            for each in (inputs.keys, inputs.values)
        )
        scores = torch.einsum("qhd,khd->hqk", query, keys) * work.scale
        if work.softcap is not None:
            scores = work.softcap * torch.tanh(scores / work.softcap)
        at = torch.arange(context - num_rows, context, device=query.device)[:, None]
        key_at = torch.arange(context, device=query.device)[None, :]
        seen = (key_at <= at) & (key_at > at - (work.window or context + 1))
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(outputs)


def _attention_error(work: Work, inputs: Inputs) -> float:
    got = paged_attention(inputs.query, inputs.layer, inputs.paging, work.scale, work.window, work.softcap)
    return _error(got, dense(work, inputs))


def _norm_error(dtype: torch.dtype, device: torch.device) -> float:
    hidden, residual = (torch.randn(33, 2048, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(2048, device=device).to(dtype)
    normed, total = fused.add_rms_norm(hidden, residual, weight, 1e-5)
    wide = total.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    return max(_error(normed, expected), _error(total, hidden.double() + residual.double()))


def _silu_error(dtype: torch.dtype, device: torch.device) -> float:
    gate_up = torch.randn(33, 2 * 1536, device=device).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    return _error(fused.silu_and_mul(gate_up), gate * gate.sigmoid() * up)


def _rotate_errors(dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    num_heads, num_kv_heads, head_dim, size = 9, 3, 64, 16
    num_tokens, half = 40, head_dim // 2
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, device=device).to(dtype)
    slots = torch.randperm(20 * size, device=device)[:num_tokens]
    angles = torch.rand(100, half, device=device) * 6
    positions = torch.randint(0, 100, (num_tokens,), device=device)
    layer = torch.zeros(20, 2, num_kv_heads, size, head_dim, dtype=dtype, device=device)
    none = torch.zeros(0, dtype=torch.int32, device=device)
    paging = Paging(none, none, none, slots, [], [], size)
    query = fused.rotate_and_write(qkv, layer, paging, positions, (angles.cos(), angles.sin()))
    heads = qkv.double().view(num_tokens, -1, head_dim)
    cos, sin = (table[positions][:, None].double() for table in (angles.cos(), angles.sin()))
    first, second = heads[:, : num_heads + num_kv_heads].chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    written = layer[slots // size, :, :, slots % size]
    return {
        "queries": _error(query, rotated[:, :num_heads]),
        "keys": _error(written[:, 0], rotated[:, num_heads:]),
        "values": _error(written[:, 1], heads[:, num_heads + num_kv_heads :]),
    }
