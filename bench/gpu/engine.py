"""The whole engine on the device in bf16: its tokens beside `transformers`, a decode step against its byte floor."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import transformers

from bench.gpu.speed import copy_rate
from services.engine.block_pool import BlockPool
from services.engine.engine import Engine
from services.engine.kv_cache import KVCache
from services.engine.model_runner import ModelRunner
from services.engine.scheduler import Scheduler, SchedulerConfig
from services.engine.sequence import SamplingParams, Sequence
from services.engine.weights import load_model
from services.runtime.model_store import resolve

MOST_TIMES_FLOOR = 1.3  # a decode step over the time its bytes take at the copy's rate
BATCHES = {"cuda": (1, 8, 64), "cpu": (1, 2)}
NUM_PROMPT, NUM_NEW = 100, 64


def run(name: str, device: torch.device) -> dict[str, Any]:
    """Agreement, prefill tokens/s, and milliseconds of a decode step by batch size."""
    folder = resolve(name)
    num_new = NUM_NEW if device.type == "cuda" else 4
    model = load_model(folder, "bfloat16" if device.type == "cuda" else "float32", device)
    shape = model.kv_shape(64 * 12 + 8)
    engine = Engine(
        Scheduler(SchedulerConfig(token_budget=2048, max_num_seqs=64), BlockPool(shape.num_blocks, 16), time.monotonic),
        ModelRunner(model, KVCache.allocate(shape, device)),
    )
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    peer.generation_config.eos_token_id = None
    prompts = [_prompt(seed, model.vocab_size) for seed in range(4)]
    mine, _ = _generate(engine, prompts, num_new)
    theirs = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        out = peer.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_new)
        theirs.append(out[0, len(prompt) :].tolist())
    same = [sum(a == b for a, b in zip(x, y, strict=True)) / num_new for x, y in zip(mine, theirs, strict=True)]
    first = [x[0] == y[0] for x, y in zip(mine, theirs, strict=True)]
    del peer
    weight_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    bytes_per_s = copy_rate(device, 2**30 if device.type == "cuda" else 2**20)
    found: dict[str, Any] = {"path": type(model).__name__, "dtype": str(model.dtype)}
    found |= {
        "same_tokens_as_float32": statistics.mean(same),
        "same_first_tokens": statistics.mean(first),
        "missed": [],
    }
    for batch in BATCHES[device.type]:
        _, steps = _generate(engine, [_prompt(1000 + batch * 100 + i, model.vocab_size) for i in range(batch)], num_new)
        decode = [duration for duration, num_prefill in steps if not num_prefill][2:]
        floor = (weight_bytes + batch * NUM_PROMPT * shape.block_bytes / 16) / bytes_per_s
        step = statistics.median(decode)
        times = step / floor
        found[f"batch {batch}"] = {
            "decode_step_ms": step * 1e3,
            "floor_ms": floor * 1e3,
            "times_floor": times,
            "prefill_tokens_per_s": batch * NUM_PROMPT / sum(duration for duration, prefill in steps if prefill),
        }
        if times > MOST_TIMES_FLOOR:
            found["missed"].append(f"decode step at batch {batch}: {times:.2f} floors, the bar is {MOST_TIMES_FLOOR}")
    return found


def _prompt(seed: int, vocab_size: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randint(0, vocab_size, (NUM_PROMPT,), generator=generator).tolist()
    return found


def _generate(
    engine: Engine, prompts: list[list[int]], num_new: int
) -> tuple[list[list[int]], list[tuple[float, int]]]:
    """Outputs, and (seconds, prefill tokens) of every step."""
    sequences = [
        Sequence(f"{id(prompts)}-{i}", prompt, SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True))
        for i, prompt in enumerate(prompts)
    ]
    for seq in sequences:
        engine.scheduler.add(seq)
    steps = []
    while engine.has_work():
        result = engine.step()
        if result is not None:
            steps.append((result.duration_s, result.num_prefill_tokens))
    return [list(seq.output_token_ids) for seq in sequences], steps
