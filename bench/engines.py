"""An engine over a model, filled with prompts: what the benches of the engine by itself have in common."""

import random
import time

from services.engine.block_pool import BlockPool
from services.engine.engine import Engine
from services.engine.kv_cache import KVCache
from services.engine.model_runner import ModelRunner
from services.engine.models.interface import DecoderModel
from services.engine.scheduler import Scheduler, SchedulerConfig
from services.engine.sequence import SamplingParams, Sequence

Prompts = list[list[int]]


def make_prompts(batch: int, num_tokens: int, number: object) -> Prompts:
    """`batch` random prompts, the same for the same `number`."""
    rng = random.Random(f"{batch} {number}")
    return [[rng.randrange(1000, 40_000) for _ in range(num_tokens)] for _ in range(batch)]


def make_engine(model: DecoderModel, batch: int, most_tokens: int) -> Engine:
    """An engine with room for `batch` sequences of `most_tokens`, which takes all their prompts in one step."""
    pool = BlockPool(batch * -(-most_tokens // 16) + 8, 16)
    config = SchedulerConfig(token_budget=batch * most_tokens, max_num_seqs=batch, max_model_len=most_tokens + 1)
    scheduler = Scheduler(config, pool, time.monotonic)
    return Engine(scheduler, ModelRunner(model, KVCache.allocate(model.kv_shape(pool.num_blocks), model.device)))


def add(engine: Engine, prompts: Prompts, num_new_tokens: int) -> list[Sequence]:
    """Queue greedy sequences that end at their length alone."""
    params = SamplingParams(max_tokens=num_new_tokens)  # no sequence has an end-of-text token
    sequences = [Sequence(str(n), prompt, params) for n, prompt in enumerate(prompts)]
    for seq in sequences:
        engine.scheduler.add(seq)
    return sequences
