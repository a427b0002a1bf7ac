"""Token ids through the whole engine are those of `transformers`, however the prompts are batched, cut, cached or
preempted."""

import random

import pytest
import torch
import transformers

from services.engine.models.interface import DecoderModel
from services.engine.scheduler import SchedulerConfig
from services.engine.weights import load_model
from services.runtime.model_store import resolve
from tests.engine.identity import Reference, Rig

LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 100, 200]
NUM_TOKENS = 32


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(
        transformers.AutoModelForCausalLM.from_pretrained(resolve("tiny-random-llama"), dtype=torch.float32)
    )


@pytest.fixture(scope="module", params=["lean", "general"])
def model(request: pytest.FixtureRequest) -> DecoderModel:
    return load_model("tiny-random-llama", "float32", path=request.param)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(256) for _ in range(length)] for length in LENGTHS]


def check_all(reference: Reference, prompts: list[list[int]], outputs: list[list[int]]) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        reference.check(prompt, output)


def test_reference_output_is_varied(reference: Reference, prompts: list[list[int]]) -> None:
    """Otherwise the other tests would show little."""
    outputs = [reference.tokens(prompt, NUM_TOKENS) for prompt in prompts]
    assert sum(len(set(output)) for output in outputs) / len(outputs) > NUM_TOKENS / 2
    assert len({tuple(output) for output in outputs}) == len(outputs)


@pytest.mark.parametrize("token_budget", [16, 33, 512])
def test_batched_and_chunked(
    model: DecoderModel, reference: Reference, prompts: list[list[int]], token_budget: int
) -> None:
    rig = Rig(model, config=SchedulerConfig(token_budget=token_budget))
    check_all(reference, prompts, rig.generate(prompts, NUM_TOKENS))
    if token_budget < 512:
        assert rig.scheduler.counters.num_steps_mixed > 0


def test_one_at_a_time(model: DecoderModel, reference: Reference, prompts: list[list[int]]) -> None:
    rig = Rig(model)
    for prompt in prompts[:6]:
        check_all(reference, [prompt], rig.generate([prompt], NUM_TOKENS))


def test_different_lengths_of_output(model: DecoderModel, reference: Reference, prompts: list[list[int]]) -> None:
    rig = Rig(model, config=SchedulerConfig(token_budget=40, max_num_seqs=5))
    wanted = [1 + 7 * i % NUM_TOKENS for i in range(len(prompts))]
    outputs = rig.generate(prompts, wanted)
    assert [len(output) for output in outputs] == wanted
    check_all(reference, prompts, outputs)


def test_one_token(model: DecoderModel, reference: Reference, prompts: list[list[int]]) -> None:
    check_all(reference, prompts, Rig(model).generate(prompts, 1))


@pytest.mark.parametrize("block_size", [1, 3, 64])
def test_other_block_sizes(
    model: DecoderModel, reference: Reference, prompts: list[list[int]], block_size: int
) -> None:
    rig = Rig(model, num_blocks=1600 // block_size, block_size=block_size, config=SchedulerConfig(token_budget=50))
    check_all(reference, prompts, rig.generate(prompts, NUM_TOKENS))


def test_prefix_hits(model: DecoderModel, reference: Reference, prompts: list[list[int]]) -> None:
    rig = Rig(model, config=SchedulerConfig(token_budget=64))
    first = rig.generate(prompts, NUM_TOKENS)
    assert rig.scheduler.counters.num_prefix_hit_tokens == 0
    check_all(reference, prompts, rig.generate(prompts, NUM_TOKENS))
    assert rig.scheduler.counters.num_prefix_hit_tokens > 0
    # the next turn of a chat: what was generated is a prefix too
    longer = [prompt + output for prompt, output in zip(prompts, first, strict=True)]
    check_all(reference, longer, rig.generate(longer, 8))


def test_preemption_by_recompute(model: DecoderModel, reference: Reference, prompts: list[list[int]]) -> None:
    rig = Rig(model, num_blocks=20, config=SchedulerConfig(token_budget=48, watermark=0.0))
    check_all(reference, prompts, rig.generate(prompts, NUM_TOKENS))
    assert rig.scheduler.counters.num_preemptions > 0


def test_eviction(model: DecoderModel, reference: Reference, prompts: list[list[int]]) -> None:
    rig = Rig(model, num_blocks=40, config=SchedulerConfig(token_budget=64))
    for _ in range(2):
        check_all(reference, prompts, rig.generate(prompts, NUM_TOKENS))


def test_sampled_tokens_do_not_depend_on_the_batch(model: DecoderModel, prompts: list[list[int]]) -> None:
    params = {"temperature": 1.0, "seed": 5, "top_p": 0.95}
    alone = [Rig(model).generate([prompt], NUM_TOKENS, **params)[0] for prompt in prompts[:8]]
    rig = Rig(model, num_blocks=20, config=SchedulerConfig(token_budget=24, watermark=0.0))
    assert rig.generate(prompts, NUM_TOKENS, **params)[:8] == alone
    assert rig.scheduler.counters.num_preemptions > 0
    assert Rig(model).generate([prompts[0]], NUM_TOKENS, temperature=1.0, seed=6, top_p=0.95)[0] != alone[0]
