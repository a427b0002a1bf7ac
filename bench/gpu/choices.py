"""What the device chooses and sums against the CPU on the same inputs, and replayed decode steps against eager ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig

from bench.gpu.inputs import Work, make
from services.engine.kernels import Paging
from services.engine.kv_cache import KVCache
from services.engine.models.fused import FusedModel
from services.engine.models.graphs import Capture, Compute, DecodeGraphs, MakeStep, default_capture
from services.engine.models.interface import StepTensors
from services.engine.sampling import SamplingRow, sample
from services.engine.sequence import SamplingParams
from services.kvtransfer.checksum import BlockMemory

LEAST_SAME_TOKENS = 0.98  # two candidates may be closer than a logarithm's rounding: one row of 64
MOST_GRAPH_ERROR = 1e-4  # of float32 logits, relative to the largest; contexts are split otherwise than in eager steps
VOCABULARIES = (1000, 49_152, 128_256)
BLOCK_BYTES = (4, 4 * 2049, 368_640)


def check_all(device: torch.device) -> dict[str, Any]:
    """Shares of equal tokens, whether checksums agree, the error of replayed steps; what is wrong by name."""
    found: dict[str, Any] = {f"same tokens, vocabulary {size}": _same_tokens(size, device) for size in VOCABULARIES}
    wrong = [case for case, share in found.items() if not share >= LEAST_SAME_TOKENS]
    for block_bytes in BLOCK_BYTES:
        case = f"checksums of {block_bytes} bytes"
        found[case] = _checksums_agree(block_bytes, device)
        wrong += [] if found[case] else [case]
    found["replayed decode steps"] = error = _graph_error(device, default_capture(device) or _rehearsed)
    wrong += [] if error <= MOST_GRAPH_ERROR else ["replayed decode steps"]
    return found | {"wrong": wrong}


def _same_tokens(vocab_size: int, device: torch.device) -> float:
    logits = torch.randn(64, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 2
    kinds = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "min_p": 0.05}, {"temperature": 3.0}]
    rows = [SamplingRow(SamplingParams(**kinds[r % 4], seed=r), 17 * r) for r in range(len(logits))]  # type: ignore[arg-type]
    here, there = sample(logits, rows), sample(logits.to(device), rows)
    return sum(a == b for a, b in zip(here, there, strict=True)) / len(rows)


def _checksums_agree(block_bytes: int, device: torch.device) -> bool:
    """Of both kinds, and a flipped byte is seen."""
    pool = torch.randint(0, 256, (9 * block_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    on_device, ids = pool.to(device, copy=True), [8, 0, 3, 3]
    kinds = ("mix32x2", "xxh3_64")
    here, there = ([BlockMemory(each, block_bytes, kind) for kind in kinds] for each in (pool, on_device))
    agree = all(a.checksums(ids) == b.checksums(ids) for a, b in zip(here, there, strict=True))
    there[0].flip_byte(3)  # the same memory for both
    seen = [a != b for a, b in zip(here[0].checksums(ids), there[0].checksums(ids), strict=True)]
    return agree and seen == [False, False, True, True]


def _rehearsed(compute: Compute, make_step: MakeStep) -> Callable[[], None]:
    """Where there is no CUDA: computes anew from the static buffers."""
    return lambda: compute(make_step())


def _graph_error(device: torch.device, capture: Capture) -> float:
    """Largest difference of logits, replayed against eager, over batches that grow and shrink; relative to the largest.

    NaN where no graph was made, or a replay wrote anywhere but to the steps' own slots: padding may write nothing.
    """
    model = _small_model(device)
    worst = 0.0
    shape = model.kv_shape(400)
    cache = KVCache(torch.zeros(shape.num_bytes, dtype=torch.uint8, device=device), shape)
    cache.blocks.normal_()
    graphs = DecodeGraphs(model._compute, model.vocab_size, model.max_model_len, device, capture)
    with torch.inference_mode():
        for count in (3, 5, 17, 4, 1, 3):
            work = Work(tuple((1, 5 + 61 * (s % 9)) for s in range(count)), 1, 1, 64)
            step = _decode_step(make(work, torch.float32, device).paging, count, device)
            eager = model._compute(step, cache)
            before = _elsewhere(cache, step.paging)
            replayed = graphs.run(step, cache)
            if replayed is None or not torch.equal(before, _elsewhere(cache, step.paging)):
                return float("nan")
            worst = max(worst, float((replayed - eager).abs().max() / eager.abs().max()))
    return worst


def _elsewhere(cache: KVCache, paging: Paging) -> torch.Tensor:
    """A copy of the cache without the slots that the step writes."""
    blocks, slots = paging.write_index
    copy = cache.blocks.clone()
    copy[blocks, :, :, :, slots] = 0
    return copy


def _decode_step(paging: Paging, count: int, device: torch.device) -> StepTensors:
    """Each sequence's last token, written where its last token lies."""
    last = torch.tensor(paging.host_seq_lens, device=device) - 1
    rows = torch.arange(count, device=device)
    blocks = paging.block_tables[rows, last // paging.block_size]
    paging.slot_mapping.copy_(blocks * paging.block_size + last % paging.block_size)
    return StepTensors(rows + 100, last, rows, paging)


def _small_model(device: torch.device) -> FusedModel:
    config = LlamaConfig(
        vocab_size=999, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=2048,
    )  # fmt: skip
    torch.manual_seed(0)
    weights = {"model.embed_tokens.weight": torch.randn(999, 256), "lm_head.weight": torch.randn(999, 256)}
    weights |= {"model.norm.weight": torch.ones(256)}
    for i in range(config.num_hidden_layers):
        name = f"model.layers.{i}."
        shapes = {"q": (256, 256), "k": (128, 256), "v": (128, 256), "o": (256, 256)}
        weights |= {f"{name}self_attn.{n}_proj.weight": torch.randn(s) / 16 for n, s in shapes.items()}
        shapes = {"gate": (512, 256), "up": (512, 256), "down": (256, 512)}
        weights |= {f"{name}mlp.{n}_proj.weight": torch.randn(s) / 16 for n, s in shapes.items()}
        norms = ("input_layernorm", "post_attention_layernorm")
        weights |= {f"{name}{n}.weight": torch.ones(256) for n in norms}
    return FusedModel(config, weights, torch.float32, device)
