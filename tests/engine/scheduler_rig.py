"""A scheduler, a pool and a fake runner, put together for tests."""

from services.engine.block_pool import BlockPool
from services.engine.engine import Engine, StepResult
from services.engine.fake_runner import FakeRunner
from services.engine.scheduler import Scheduler, SchedulerConfig
from services.engine.sequence import FinishReason, SamplingParams, Sequence


class Clock:
    """Time that moves when told."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Rig:
    """Blocks of 4 slots unless said otherwise; `ended` collects (sequence id, finish reason) in order."""

    def __init__(self, num_blocks=16, block_size=4, watermark=0.0, **config):
        self.clock = Clock()
        self.pool = BlockPool(num_blocks, block_size)
        config.setdefault("max_model_len", 1000)
        self.scheduler = Scheduler(SchedulerConfig(watermark=watermark, **config), self.pool, self.clock)
        self.runner = FakeRunner(num_blocks, block_size)
        self.engine = Engine(self.scheduler, self.runner, self.clock)
        self.ended: list[tuple[str, FinishReason | None]] = []

    def step(self) -> StepResult | None:
        result = self.engine.step()
        self.scheduler.check()
        if result is not None:
            self.ended += [(o.seq.sequence_id, o.finish_reason) for o in result.outputs if o.finish_reason is not None]
        return result

    def run(self, most_steps=10_000):
        """Step until nothing is left to do."""
        for _ in range(most_steps):
            if not self.engine.has_work():
                return
            self.step()
        raise AssertionError("still has work")

    def assert_drained(self):
        counts = self.pool.counts()
        assert counts.free + counts.cached == counts.total
        assert not self.scheduler.sequences
        self.scheduler.check()


def make(sequence_id, prompt, max_tokens=16, *, forced=(), **fields):
    """A sequence; `prompt` is its tokens, or how many (then 1, 2, 3...)."""
    if isinstance(prompt, int):
        prompt = list(range(1, prompt + 1))
    params = fields.pop("params", None) or SamplingParams(max_tokens=max_tokens)
    return Sequence(
        sequence_id, list(prompt), params, output_token_ids=list(forced), num_forced_tokens=len(forced), **fields
    )


def receive(rig, seq, first_token=None):
    """What a transfer does: the prompt's KV into the blocks that were not cached here, then the first token."""
    bs = rig.pool.block_size
    for position in range(seq.num_cached_tokens, seq.num_tokens):
        slot = seq.block_ids[position // bs] * bs + position % bs
        rig.runner.write_slot(slot, seq.token_ids(position, position + 1)[0])
    if first_token is not None:
        seq.output_token_ids.append(first_token)
