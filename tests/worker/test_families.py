"""Every family through prefill worker, transfer and decode worker: the token ids of `transformers` in float32.

One process, the models swapped inside it; blocks move over NIXL, requests over gRPC.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest

from tests.engine.identity import Reference, tiny_model
from tests.engine.test_identity_families import FAMILIES
from tests.engine.test_identity_lean import FAMILIES as LEAN_FAMILIES
from tests.worker.pair import Generated, pair

LENGTHS = (1, 15, 16, 17, 40)
NUM_NEW = 10


@pytest.mark.parametrize("family", [*FAMILIES, "llama 3 rope", "tied embeddings"])
def test_same_tokens_through_a_transfer(family: str, tmp_path: Path) -> None:
    config, extra = (FAMILIES | LEAN_FAMILIES)[family]
    tiny_model(config, extra).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"family": family}))  # only its hash is looked at here
    chooser = random.Random(3)
    prompts = [[chooser.randrange(3, 199) for _ in range(length)] for length in LENGTHS]

    async def run() -> tuple[list[Generated], int, str]:
        async with pair(tmp_path, num_blocks=64, token_budget=24) as both:
            found = await asyncio.gather(*(both.generate(prompt, NUM_NEW) for prompt in prompts))
            return list(found), both.decode.scheduler.counters.num_prompt_tokens_computed, both.decode.model

    generated, computed_on_decode, model = asyncio.run(run())
    assert computed_on_decode == 0
    reference = Reference(tiny_model(config, extra))
    for prompt, each in zip(prompts, generated, strict=True):
        assert each.decode.num_pulled_blocks == -(-len(prompt) // 16)
        reference.check(prompt, each.token_ids)
    print(f"{family}: {model}")
