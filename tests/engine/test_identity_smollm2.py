"""The default model, for real: token ids of `transformers` in float32, and how far bfloat16 is from them."""

import pytest
import torch
import transformers

from services.engine.batch import Batch, ScheduledSequence
from services.engine.kv_cache import KVCache
from services.engine.model_runner import ModelRunner
from services.engine.models.interface import DecoderModel
from services.engine.scheduler import SchedulerConfig
from services.engine.sequence import Sequence
from services.engine.weights import load_model
from services.runtime.model_store import resolve
from tests.engine.identity import Reference, Rig

pytestmark = pytest.mark.slow
ALIAS = "smollm2-135m"
NUM_TOKENS = 16


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(transformers.AutoModelForCausalLM.from_pretrained(resolve(ALIAS), dtype=torch.float32))


@pytest.fixture(scope="module")
def tokenizer() -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(resolve(ALIAS))


@pytest.fixture(scope="module")
def prompts(tokenizer: transformers.PreTrainedTokenizerBase) -> list[list[int]]:
    questions = ["What is the capital of France?", "Name three primes.", "Write a haiku about rain. " * 12]
    chats = [[{"role": "user", "content": question}] for question in questions]
    ids = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    return [*ids, tokenizer("def fibonacci(n):").input_ids, [42]]


def test_same_tokens(
    reference: Reference, prompts: list[list[int]], tokenizer: transformers.PreTrainedTokenizerBase
) -> None:
    """The general path; `tests/e2e/test_identity.py` does the same, and more, on the lean one."""
    model = load_model(ALIAS, "float32", path="general")
    rig = Rig(model, num_blocks=64, config=SchedulerConfig(token_budget=48))
    first = rig.generate(prompts, NUM_TOKENS)
    assert rig.scheduler.counters.num_steps_mixed > 0
    assert "Paris" in tokenizer.decode(first[0])
    again = rig.generate(prompts, NUM_TOKENS)
    assert rig.scheduler.counters.num_prefix_hit_tokens > 0
    for prompt, *outputs in zip(prompts, first, again, strict=True):
        for output in outputs:
            reference.check(prompt, output)


def last_logits(model: DecoderModel, prompt: list[int]) -> torch.Tensor:
    cache = KVCache.allocate(model.kv_shape(32))
    seq = Sequence("only", prompt)
    seq.block_ids = list(range(32))
    return ModelRunner(model, cache).forward(Batch([ScheduledSequence(seq, 0, len(prompt), True)]))[0]


def test_bfloat16_stays_near(prompts: list[list[int]]) -> None:
    """bfloat16 has 8 bits of mantissa: over 30 layers logits of size 20 move by a few tenths, and most choices stay."""
    exact, rounded = load_model(ALIAS, "float32"), load_model(ALIAS, "bfloat16")
    assert rounded.dtype == torch.bfloat16
    errors, agreed = [], 0
    for prompt in prompts:
        a, b = last_logits(exact, prompt), last_logits(rounded, prompt)
        assert b.dtype == torch.float32
        errors.append(float((a - b).abs().max()))
        agreed += int(a.argmax() == b.argmax())
    print(f"largest error of a logit {max(errors):.2f}; {agreed} of {len(prompts)} likeliest tokens agree")
    assert max(errors) < 2.0
    assert agreed >= len(prompts) - 1
