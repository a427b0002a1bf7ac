import random

import pytest
from scheduler_rig import Rig, make

from services.engine.engine import Batch, SampledToken
from services.engine.fake_runner import FakeRunner, expected_output
from services.engine.sequence import FinishReason


def test_a_step_reports_tokens_progress_and_what_it_computed():
    rig = Rig(num_blocks=32, token_budget=6)
    a, b = make("a", 4, 3), make("b", [9] * 9, 2)
    rig.scheduler.add(a)
    rig.scheduler.add(b)
    first, second, third = rig.step(), rig.step(), rig.step()
    expected_a, expected_b = expected_output(a.prompt_token_ids, 3), expected_output(b.prompt_token_ids, 2)

    def tokens(result):
        return [(o.seq, o.index, o.token.token_id, o.finish_reason) for o in result.outputs]

    assert tokens(first) == [(a, 0, expected_a[0], None)]
    assert (first.progressed, first.num_prefill_tokens, first.num_decode_tokens) == ([a, b], 6, 0)
    assert tokens(second) == [(a, 1, expected_a[1], None)]
    assert (second.progressed, second.num_prefill_tokens, second.num_decode_tokens) == ([b], 5, 1)
    assert tokens(third) == [(a, 2, expected_a[2], FinishReason.LENGTH), (b, 0, expected_b[0], None)]
    assert (third.progressed, third.num_prefill_tokens, third.num_decode_tokens) == ([b], 2, 1)
    assert tokens(rig.step()) == [(b, 1, expected_b[1], FinishReason.LENGTH)]
    assert rig.step() is None
    assert not rig.engine.has_work()
    rig.assert_drained()


def test_progress_tells_how_many_tokens_are_ready():
    rig = Rig(num_blocks=32, token_budget=6)
    seq = make("s", 15, 3, leaves_after_first_token=True)
    rig.scheduler.add(seq)
    ready = []
    while rig.engine.has_work():
        ready += [each.num_computed_tokens for each in rig.step().progressed]
    assert ready == [6, 12, 15]  # also after it has left


def test_duration_is_measured_by_the_given_clock():
    rig = Rig()

    class Slow:
        def run(self, batch):
            rig.clock.now += 0.25
            return [SampledToken(1) for item in batch.items if item.sample]

    rig.engine.runner = Slow()
    rig.scheduler.add(make("s", 3, 1))
    assert rig.step().duration_s == 0.25


def test_what_the_runner_raises_passes_and_the_step_can_be_repeated():
    rig = Rig(num_blocks=32)
    seq = make("s", 6, 3)
    rig.scheduler.add(seq)
    runner, rig.engine.runner = rig.engine.runner, None

    class Broken:
        def run(self, batch):
            raise RuntimeError("no memory")

    rig.engine.runner = Broken()
    with pytest.raises(RuntimeError, match="no memory"):
        rig.engine.step()
    rig.scheduler.check()
    rig.engine.runner = runner
    rig.run()
    assert seq.output_token_ids == expected_output(seq.prompt_token_ids, 3)


@pytest.mark.parametrize("seed", range(4))
def test_output_does_not_depend_on_company_chunks_eviction_or_preemption(seed):
    rng = random.Random(seed)
    rig = Rig(num_blocks=16, token_budget=rng.choice([5, 16, 64]), max_num_seqs=rng.choice([2, 6]))
    seqs = []
    for i in range(40):
        prompt = [rng.randrange(2) for _ in range(rng.choice([1, 3, 4, 5, 15, 16, 17, 31]))]
        seqs.append(make(str(i), prompt, rng.choice([1, 2, 7, 20]), arrival_s=float(i)))
    for seq in seqs:
        rig.scheduler.add(seq)
        if rng.random() < 0.7:
            rig.step()
    rig.run()
    for seq in seqs:
        assert seq.output_token_ids == expected_output(seq.prompt_token_ids, seq.params.max_tokens)
    assert rig.pool.num_evictions > 0
    assert rig.scheduler.counters.num_prefix_hit_tokens > 0
    rig.assert_drained()


def test_the_fake_runner_notices_kv_that_was_never_written():
    rig = Rig()
    seq = make("s", 6, 3)
    rig.scheduler.add(seq)
    batch = rig.scheduler.schedule()
    batch.items[0].start, batch.items[0].num_tokens = 2, 4
    with pytest.raises(LookupError, match="position 0"):
        rig.runner.run(batch)


def test_the_fake_runner_keeps_its_kv_in_the_given_memory():
    """Blocks moved byte by byte into another runner's memory are as good as computed there."""
    source, target = bytearray(4 * 4 * 8), bytearray(4 * 4 * 8 + 100)
    runner = FakeRunner(4, 4, source)
    assert runner.block_bytes == 32
    seq = make("s", 6)
    seq.block_ids = [3, 1]
    rig = Rig()
    rig.scheduler.add(make("other", 6))
    batch = rig.scheduler.schedule()
    batch.items[0].seq = seq
    (first,) = runner.run(batch)
    assert first.token_id == expected_output(seq.prompt_token_ids, 1)[0]
    for from_block, to_block in ((3, 0), (1, 2)):
        target[to_block * 32 : (to_block + 1) * 32] = source[from_block * 32 : (from_block + 1) * 32]
    seq.output_token_ids.append(first.token_id)
    seq.block_ids = [0, 2]
    item = batch.items[0]
    item.start, item.num_tokens = 6, 1
    (second,) = FakeRunner(4, 4, memoryview(target)).run(Batch([item], 1, 1))
    assert second.token_id == expected_output(seq.prompt_token_ids, 2)[1]
