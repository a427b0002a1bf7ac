"""Attention against what the device can do: copying memory, multiplying matrices, and torch's own attention.

Sampling and checksums read their input once, and are timed with their answer on the host.

Decode reads every key and value once, so its ceiling is the rate at which memory is read and written by a copy; prefill
multiplies, so its ceiling is a large bf16 product. torch's attention gets contiguous keys and values, which paging has
to do without.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn import functional

from bench.gpu.inputs import Inputs, Work, make, seconds
from services.engine.kernels import paged_attention
from services.engine.sampling import SamplingRow, sample
from services.engine.sequence import SamplingParams
from services.kvtransfer.checksum import BlockMemory
from services.kvtransfer.layout import checksum_for

LEAST_DECODE_SHARE = 0.80  # of the copy's bandwidth
LEAST_PREFILL_SHARE = 0.60  # of the matmul's rate


def measure(device: torch.device) -> dict[str, Any]:
    """GB/s, TFLOP/s and shares of the ceilings; bars that are missed by name."""
    large = device.type == "cuda"
    copy_bytes_per_s = copy_rate(device, 2**30 if large else 2**20)
    flop_per_s = _matmul_rate(device, 8192 if large else 128)
    found: dict[str, Any] = {"copy_gb_per_s": copy_bytes_per_s / 1e9, "matmul_tflop_per_s": flop_per_s / 1e12}
    decodes = {
        "decode, 64 x 4096, 32/8 x 128": Work(((1, 4096),) * 64, 32, 8, 128),
        "decode, 1 x 32768, 32/8 x 128": Work(((1, 32768),), 32, 8, 128),
        "decode, 32 x 2048, 9/3 x 64": Work(((1, 2048),) * 32, 9, 3, 64),
    }
    prefills = {
        "prefill, 4 x 2048, 32/8 x 128": Work(((2048, 2048),) * 4, 32, 8, 128),
        "prefill, 512 behind 3584, 32/8 x 128": Work(((512, 4096),) * 4, 32, 8, 128),
    }
    if not large:
        decodes, prefills = {"decode": Work(((1, 100),) * 2, 4, 2, 64)}, {"prefill": Work(((50, 60),), 4, 2, 64)}
    missed = []
    for name, work in decodes.items():
        found[name] = _attention(work, device) | {"share_of_copy": 0.0}
        found[name]["share_of_copy"] = found[name]["gb_per_s"] * 1e9 / copy_bytes_per_s
        if found[name]["share_of_copy"] < LEAST_DECODE_SHARE:
            missed.append(f"{name}: {found[name]['share_of_copy']:.2f} of the copy, the bar is {LEAST_DECODE_SHARE}")
    for name, work in prefills.items():
        found[name] = _attention(work, device) | {"share_of_matmul": 0.0}
        found[name]["share_of_matmul"] = found[name]["tflop_per_s"] * 1e12 / flop_per_s
        if found[name]["share_of_matmul"] < LEAST_PREFILL_SHARE:
            missed.append(f"{name}: {found[name]['share_of_matmul']:.2f} of the product, bar {LEAST_PREFILL_SHARE}")
    found |= _sampling(device, copy_bytes_per_s, *((64, 128_256) if large else (2, 1000)))
    found |= _checksums(device, copy_bytes_per_s, *((256, 2**21) if large else (2, 4096)))
    return found | {"missed": missed}


def copy_rate(device: torch.device, num_bytes: int) -> float:
    """Bytes read and written per second, of a copy of so many."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds(lambda: target.copy_(source), device)


def _matmul_rate(device: torch.device, size: int) -> float:
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return float(2 * size**3) / seconds(lambda: a @ b, device)


def _sampling(device: torch.device, copy_bytes_per_s: float, num_rows: int, vocab_size: int) -> dict[str, Any]:
    """One pass over the logits, tokens read back, beside torch's way; without a bar until one was measured."""
    logits = torch.randn(num_rows, vocab_size, device=device)
    found: dict[str, Any] = {}
    for name, temperature in {"greedy": 0.0, "drawn": 1.0}.items():
        rows = [SamplingRow(SamplingParams(temperature=temperature, seed=r), 5) for r in range(num_rows)]
        ours = seconds(partial(sample, logits, rows), device)
        found[f"sampling, {name}, {num_rows} x {vocab_size}"] = {
            "us": ours * 1e6,
            "torch_us": seconds(partial(sample, logits, rows, "torch"), device) * 1e6,
            "share_of_copy": logits.numel() * 4 / ours / copy_bytes_per_s,
        }
    return found


def _checksums(device: torch.device, copy_bytes_per_s: float, num_blocks: int, block_bytes: int) -> dict[str, Any]:
    """`mix32x2` of scattered blocks, numbers read back; the rest as above."""
    pool = torch.randint(0, 256, (num_blocks * block_bytes,), dtype=torch.uint8, device=device)
    memory = BlockMemory(pool, block_bytes, checksum_for(device.type, block_bytes))
    ids = torch.randperm(num_blocks).tolist()
    taken = seconds(lambda: memory.checksums(ids), device)
    num_bytes = num_blocks * block_bytes
    return {
        f"checksums, {num_blocks} x {block_bytes} bytes": {
            "us": taken * 1e6,
            "gb_per_s": num_bytes / taken / 1e9,
            "share_of_copy": num_bytes / taken / copy_bytes_per_s,
        }
    }


def num_bytes(work: Work) -> int:
    """What decoding must read: keys and values of every context once, in bf16."""
    return sum(context for _, context in work.lengths) * 2 * work.num_kv_heads * work.head_dim * 2


def num_flop(work: Work) -> int:
    """Two products per query row and visible key, two operations a multiply-add."""
    pairs = sum(rows * (context - rows) + rows * (rows + 1) // 2 for rows, context in work.lengths)
    return 4 * pairs * work.num_heads * work.head_dim


def _attention(work: Work, device: torch.device) -> dict[str, float]:
    inputs = make(work, torch.bfloat16, device)
    ours = seconds(lambda: paged_attention(inputs.query, inputs.layer, inputs.paging, work.scale, work.window), device)
    theirs = seconds(_torchs_own(work, inputs), device)
    return {
        "us": ours * 1e6,
        "torch_us": theirs * 1e6,
        "times_torch": theirs / ours,
        "gb_per_s": num_bytes(work) / ours / 1e9,
        "tflop_per_s": num_flop(work) / ours / 1e12,
    }


def _torchs_own(work: Work, inputs: Inputs) -> Any:
    """`scaled_dot_product_attention` on the same work: all sequences are of one shape here."""
    ((rows, context),) = set(work.lengths)
    query = inputs.query.view(len(work.lengths), rows, work.num_heads, -1).transpose(1, 2)
    keys, values = (torch.stack(each).transpose(1, 2) for each in (inputs.keys, inputs.values))
    mask = None
    if 1 < rows < context:
        at = torch.arange(context - rows, context, device=query.device)[:, None]
        mask = torch.arange(context, device=query.device)[None, :] <= at
    return lambda: functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, is_causal=rows == context > 1, scale=work.scale, enable_gqa=True
    )
