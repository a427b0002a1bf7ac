import random

import pytest
from scheduler_rig import Rig, make, receive

from services.engine.batch import SampledToken
from services.engine.fake_runner import expected_output
from services.engine.policies import Admission
from services.engine.scheduler import NeverFits, SchedulerConfig
from services.engine.sequence import FinishReason, PriorityClass, SamplingParams, SequenceState


def shape(batch):
    """(id, start, tokens, samples) of every item."""
    return [(i.seq.sequence_id, i.start, i.num_tokens, i.sample) for i in batch.items]


def settle(rig, batch):
    rig.scheduler.settle(batch, rig.runner.run(batch))
    rig.scheduler.check()


# Budget and order


def test_prompts_are_chunked_and_decodes_go_first():
    rig = Rig(num_blocks=32, token_budget=8)
    rig.scheduler.add(make("a", 10, 8))
    batch = rig.scheduler.schedule()
    assert shape(batch) == [("a", 0, 8, False)]
    assert (batch.num_tokens, batch.num_decodes, batch.num_prefill_tokens) == (8, 0, 8)
    settle(rig, batch)
    rig.scheduler.add(make("b", [50] * 13, 8, arrival_s=1.0))
    batch = rig.scheduler.schedule()
    assert shape(batch) == [("a", 8, 2, True), ("b", 0, 6, False)]
    settle(rig, batch)
    batch = rig.scheduler.schedule()
    assert shape(batch) == [("a", 10, 1, True), ("b", 6, 7, True)]
    assert (batch.num_tokens, batch.num_decodes, batch.num_prefill_tokens) == (8, 1, 7)
    settle(rig, batch)
    assert shape(rig.scheduler.schedule()) == [("a", 11, 1, True), ("b", 13, 1, True)]
    counters = rig.scheduler.counters
    assert (counters.num_steps, counters.num_steps_mixed) == (3, 1)
    assert (counters.num_prompt_tokens_computed, counters.num_tokens_computed) == (23, 24)


def test_scheduling_twice_without_settling_gives_the_same():
    rig = Rig(token_budget=8)
    rig.scheduler.add(make("a", 10))
    first = shape(rig.scheduler.schedule())
    assert shape(rig.scheduler.schedule()) == first


def test_classes_go_in_order_and_within_a_class_first_come_first_served():
    rig = Rig(num_blocks=64, max_num_seqs=1)
    for sequence_id, priority in (("b1", 3), ("i1", 2), ("i2", 2), ("r1", 1), ("b2", 3)):
        rig.scheduler.add(make(sequence_id, 3, 1, priority=PriorityClass(priority)))
    rig.run()
    assert [sequence_id for sequence_id, _ in rig.ended] == ["r1", "i1", "i2", "b1", "b2"]


def test_a_higher_class_overtakes_a_prompt_that_is_half_computed():
    rig = Rig(num_blocks=64, token_budget=8)
    rig.scheduler.add(make("batch", 20, priority=PriorityClass.BATCH))
    settle(rig, rig.scheduler.schedule())
    rig.scheduler.add(make("other batch", [9] * 20, priority=PriorityClass.BATCH))
    rig.scheduler.add(make("realtime", [50] * 10, priority=PriorityClass.REALTIME))
    steps = []
    for _ in range(4):
        batch = rig.scheduler.schedule()
        steps.append(shape(batch))
        settle(rig, batch)
    assert steps == [
        [("realtime", 0, 8, False)],
        [("realtime", 8, 2, True), ("batch", 8, 6, False)],
        [("realtime", 10, 1, True), ("batch", 14, 6, True), ("other batch", 0, 1, False)],
        [("realtime", 11, 1, True), ("batch", 20, 1, True), ("other batch", 1, 6, False)],
    ]


def test_no_more_sequences_run_than_there_are_seats():
    rig = Rig(num_blocks=64, max_num_seqs=2)
    for i in range(5):
        rig.scheduler.add(make(str(i), 3, 2))
    assert len(rig.scheduler.schedule().items) == 2
    assert rig.scheduler.load().num_waiting == 3


def test_more_seats_than_budget_starve_nobody():
    rig = Rig(num_blocks=64, max_num_seqs=64, token_budget=3)
    for i in range(10):
        rig.scheduler.add(make(str(i), 5, 5))
    rig.run()
    assert len(rig.ended) == 10
    rig.assert_drained()


def test_load_counts_what_is_not_computed_yet():
    rig = Rig(num_blocks=64, token_budget=8, max_num_seqs=2)
    for i, num_tokens in enumerate((10, 7, 5)):
        rig.scheduler.add(make(str(i), [i] * num_tokens))
    load = rig.scheduler.load()
    assert (load.num_waiting, load.num_running, load.backlog_tokens) == (3, 0, 22)
    settle(rig, rig.scheduler.schedule())
    load = rig.scheduler.load()
    assert (load.num_waiting, load.num_running, load.backlog_tokens) == (2, 1, 14)
    settle(rig, rig.scheduler.schedule())  # 2 of the first, 6 of the second
    assert rig.scheduler.load().backlog_tokens == 1 + 5
    rig.scheduler.release("2")
    assert rig.scheduler.load().backlog_tokens == 1


# What can never fit


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "limit"),
    [
        (31, 1, None),
        (32, 1, "context_length"),  # no room for one new token
        (500, 1, "context_length"),
        (20, 4, None),  # 24 tokens are 6 blocks
        (20, 5, "pool"),
        (20, 1000, "pool"),
    ],
)
def test_add_refuses_what_could_never_run_alone_and_says_why(prompt, max_tokens, limit):
    rig = Rig(num_blocks=8 if prompt > 30 else 6, max_model_len=32)
    seq = make("s", prompt, max_tokens)
    for take in (rig.scheduler.add, rig.scheduler.reserve_inbound):
        if limit is None:
            continue
        with pytest.raises(NeverFits, match=limit) as refused:
            take(seq)
        assert refused.value.limit == limit
        assert refused.value.needed > refused.value.allowed
    if limit is None:
        rig.scheduler.add(seq)
        rig.run()
        assert seq.num_output_tokens == max_tokens
    rig.assert_drained()


def test_a_prefill_worker_needs_no_room_for_the_output():
    rig = Rig(num_blocks=5)
    seq = make("s", 20, 500, leaves_after_first_token=True)
    rig.scheduler.add(seq)
    rig.run()
    assert seq.output_token_ids == expected_output(seq.prompt_token_ids, 1)


def test_nonsense_is_refused():
    rig = Rig()
    with pytest.raises(ValueError, match="at least one token"):
        rig.scheduler.add(make("s", []))
    rig.scheduler.add(make("s", 3))
    for take in (rig.scheduler.add, rig.scheduler.reserve_inbound):
        with pytest.raises(ValueError, match="s was here before"):
            take(make("s", 3))
    with pytest.raises(ValueError, match="start at 1"):
        SchedulerConfig(token_budget=0)
    with pytest.raises(ValueError, match="waiting, not receiving"):
        rig.scheduler.join(make("t", 3), 2)


# Ends


def test_ends_at_the_context_length():
    rig = Rig(max_model_len=12)
    seq = make("s", 10, 500)
    rig.scheduler.add(seq)
    rig.run()
    assert (seq.num_tokens, seq.finish_reason) == (12, FinishReason.LENGTH)


@pytest.mark.parametrize("how", ["add", "join"])
@pytest.mark.parametrize(
    ("forced", "params", "reason"),
    [
        ([7, 7], SamplingParams(max_tokens=2), FinishReason.LENGTH),
        ([7, 2], SamplingParams(max_tokens=9), FinishReason.STOP),
        ([7, 7], SamplingParams(max_tokens=900), FinishReason.LENGTH),  # the context is full
    ],
)
def test_a_complete_forced_output_ends_without_a_step(how, forced, params, reason):
    rig = Rig(max_model_len=12)
    prompt = 10 if params.max_tokens == 900 else 5
    seq = make("s", prompt, forced=forced, params=params, eos_token_ids=frozenset({2}))
    if how == "add":
        rig.scheduler.add(seq)
    else:
        assert rig.scheduler.reserve_inbound(seq)
        rig.scheduler.join(seq, seq.num_tokens - 1)
    assert rig.engine.has_work()
    result = rig.step()
    (output,) = result.outputs
    assert (output.seq, output.token, output.index, output.finish_reason) == (seq, None, 2, reason)
    assert (seq.state, seq.finish_reason, rig.runner.num_steps) == (SequenceState.FINISHED, reason, 0)
    assert not rig.engine.has_work()
    assert rig.step() is None
    rig.assert_drained()


def test_forced_output_is_continued():
    rig = Rig()
    prompt = list(range(1, 8))
    whole = expected_output(prompt, 9)
    seq = make("s", prompt, 9, forced=whole[:4])
    rig.scheduler.add(seq)
    result = rig.step()
    assert (result.outputs[0].index, result.outputs[0].token) == (4, SampledToken(whole[4]))
    rig.run()
    assert seq.output_token_ids == whole


@pytest.mark.parametrize(
    "when", ["waiting", "prefilling", "decoding", "preempted", "receiving", "finished", "complete"]
)
def test_release_works_from_any_state_and_twice(when):
    rig = Rig(num_blocks=6, token_budget=8)
    seq = make("s", 12, 8, forced=[1] * 8 if when == "complete" else [])
    if when == "receiving":
        assert rig.scheduler.reserve_inbound(seq)
    else:
        rig.scheduler.add(seq)
    steps = {"prefilling": 1, "decoding": 2, "finished": 20}.get(when, 0)
    for _ in range(steps):
        rig.step()
    if when == "preempted":
        rig.scheduler.add(make("older", [5] * 12, 12, arrival_s=-1.0))
        while not seq.num_preemptions:
            rig.step()
        assert seq.state is SequenceState.WAITING
        assert seq.block_ids == []
    expected = None if when == "finished" else seq
    assert rig.scheduler.release("s") is expected
    assert rig.scheduler.release("s") is None
    assert rig.scheduler.release("never heard of") is None
    assert seq.state is SequenceState.FINISHED
    assert seq.finish_reason is (FinishReason.LENGTH if when in ("finished", "complete") else FinishReason.CANCELLED)
    rig.scheduler.check()
    rig.run()
    rig.assert_drained()


def test_a_result_that_comes_after_the_release_is_ignored():
    rig = Rig()
    seq, other = make("s", 3), make("other", 4)
    rig.scheduler.add(seq)
    rig.scheduler.add(other)
    batch = rig.scheduler.schedule()
    rig.scheduler.release("s", FinishReason.ERROR)
    outputs = rig.scheduler.settle(batch, [SampledToken(1), SampledToken(2)])
    assert [(o.seq, o.token) for o in outputs] == [(other, SampledToken(2))]
    assert (seq.output_token_ids, seq.finish_reason) == ([], FinishReason.ERROR)
    rig.scheduler.check()


def test_before_release_sees_the_blocks_of_one_that_ended_by_itself():
    rig = Rig(num_blocks=8)
    leased = []

    def lease(seq):
        leased.extend(seq.block_ids)
        rig.pool.lease(seq.block_ids)

    rig.scheduler.before_release = lease
    seq = make("s", 10, 5, leaves_after_first_token=True)
    rig.scheduler.add(seq)
    outputs = rig.engine.step().outputs
    assert [(o.index, o.finish_reason) for o in outputs] == [(0, None)]
    assert (seq.state, seq.finish_reason, seq.block_ids) == (SequenceState.FINISHED, None, [])
    assert len(leased) == 3
    rig.scheduler.check(leased=dict.fromkeys(leased, 1))
    assert rig.pool.counts().leased == 3
    rig.pool.unlease(leased)
    assert (rig.pool.counts().cached, rig.pool.counts().free) == (2, 6)  # the last block was not full
    rig.scheduler.add(make("cancelled", 10))
    rig.scheduler.release("cancelled")
    assert len(leased) == 3


def test_deadlines_are_told_once_each_and_forgotten_when_a_sequence_ends():
    rig = Rig()
    for sequence_id, deadline_s in (("a", 5.0), ("b", 3.0), ("c", None), ("d", 4.0)):
        rig.scheduler.add(make(sequence_id, 3, 50, deadline_s=deadline_s))
    assert rig.engine.next_wake_s() == 3.0
    assert rig.scheduler.expired() == []
    rig.scheduler.release("d")
    rig.clock.now = 4.5
    assert [seq.sequence_id for seq in rig.scheduler.expired()] == ["b"]
    assert rig.scheduler.expired() == []
    assert rig.engine.next_wake_s() == 5.0
    rig.scheduler.release("a")
    assert rig.engine.next_wake_s() is None


# Prefix reuse


@pytest.mark.parametrize(("prompt", "cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (16, 12), (17, 16)])
def test_a_local_hit_leaves_the_last_token_to_compute(prompt, cached):
    rig = Rig(num_blocks=32)
    first, second = make("first", prompt, 3), make("second", prompt, 3)
    rig.scheduler.add(first)
    rig.run()
    rig.scheduler.add(second)
    batch = rig.scheduler.schedule()
    assert shape(batch) == [("second", cached, prompt - cached, True)]
    assert second.num_cached_tokens == cached
    assert rig.scheduler.counters.num_prefix_hit_tokens == cached
    settle(rig, batch)
    rig.run()
    assert second.output_token_ids == first.output_token_ids == expected_output(range(1, prompt + 1), 3)


def test_generated_blocks_serve_the_next_turn():
    rig = Rig(num_blocks=32)
    first = make("first", 6, 7)  # KV of 12 tokens is computed: the last one never was
    rig.scheduler.add(first)
    rig.run()
    turn = make("turn", [*first.prompt_token_ids, *first.output_token_ids, 99], 3)
    rig.scheduler.add(turn)
    rig.step()
    assert turn.num_cached_tokens == 12
    rig.run()
    assert turn.output_token_ids == expected_output(turn.prompt_token_ids, 3)


def test_prefixes_are_shared_while_both_run_and_not_across_salts():
    rig = Rig(num_blocks=32)
    a, b, c = make("a", 9, 9), make("b", 9, 9), make("c", 9, 9, cache_salt=b"other")
    rig.scheduler.add(a)
    rig.step()
    rig.scheduler.add(b)
    rig.scheduler.add(c)
    rig.step()
    assert b.block_ids[:2] == a.block_ids[:2]
    assert not set(c.block_ids) & set(a.block_ids)
    assert b.block_ids[2] != a.block_ids[2]
    rig.run()
    assert a.output_token_ids == b.output_token_ids == c.output_token_ids == expected_output(range(1, 10), 9)


def test_the_hit_is_held_before_the_rest_can_evict_it():
    rig = Rig(num_blocks=5)
    rig.scheduler.add(make("first", 12, 1))  # leaves 3 cached and 2 free blocks
    rig.run()
    seq = make("s", [*range(1, 9), *[50] * 8], 2)  # 2 hits, 2 new, and one more when it decodes: evicts the third
    rig.scheduler.add(seq)
    rig.run()
    assert seq.output_token_ids == expected_output(seq.prompt_token_ids, 2)
    assert rig.scheduler.counters.num_prefix_hit_tokens == 8
    rig.assert_drained()


def test_only_computed_blocks_are_found():
    rig = Rig(num_blocks=32, token_budget=6)
    rig.scheduler.add(make("first", 12))
    rig.step()
    assert rig.scheduler.num_cached_tokens(make("probe", 12)) == 4  # of 6 computed tokens one block is full
    rig.step()
    assert rig.scheduler.num_cached_tokens(make("probe", 12)) == 12


def test_a_corrupt_block_takes_its_descendants_along_and_its_holders_index_nothing_more():
    rig = Rig(num_blocks=32)
    holder = make("holder", 12, 12)
    rig.scheduler.add(holder)
    rig.step()
    assert rig.scheduler.drop_corrupt(holder.block_ids[1:2]) == 2
    assert rig.scheduler.num_cached_tokens(make("probe", 12)) == 4
    rig.run()
    # after it ended nothing behind the corrupt block can be found
    whole = holder.prompt_token_ids + holder.output_token_ids
    assert rig.scheduler.num_cached_tokens(make("probe", whole)) == 4
    rig.assert_drained()


def test_the_holder_of_a_corrupt_block_does_not_continue_the_good_one_in_the_index():
    rig = Rig(num_blocks=32)
    holder = make("holder", 12, 12)
    rig.scheduler.add(holder)
    rig.step()
    rig.scheduler.drop_corrupt(holder.block_ids[1:2])
    rig.scheduler.add(make("good", 12, 1))  # computes the dropped blocks anew
    rig.run()
    assert holder.num_output_tokens == 12
    whole = holder.prompt_token_ids + holder.output_token_ids
    assert rig.scheduler.num_cached_tokens(make("probe", whole)) == 12


# Running out


def test_the_latest_of_the_lowest_class_gives_way_and_goes_first_afterwards():
    rig = Rig(num_blocks=6)
    early = make("early", [1] * 7, 12, arrival_s=0.0)
    batch = make("batch", [2] * 7, 12, arrival_s=1.0, priority=PriorityClass.BATCH)
    late = make("late", [3] * 7, 12, arrival_s=2.0)
    for seq in (early, batch, late):
        rig.scheduler.add(seq)
    rig.step()  # all three hold 2 blocks
    rig.step()  # and write position 7, their last slot
    rig.scheduler.add(make("new", 2, 1, arrival_s=3.0))
    result = rig.step()
    assert [o.seq.sequence_id for o in result.outputs] == ["early", "late"]
    assert (batch.state, batch.num_preemptions, batch.block_ids) == (SequenceState.WAITING, 1, [])
    rig.run()
    assert (early.num_preemptions, late.num_preemptions) == (0, 1)  # 5 blocks each in the end: the later one gave way
    assert rig.ended[0] == ("early", FinishReason.LENGTH)
    for seq in (early, batch, late):
        assert seq.output_token_ids == expected_output(seq.prompt_token_ids, 12)
    rig.assert_drained()


def test_a_preempted_sequence_reuses_what_was_not_evicted():
    rig = Rig(num_blocks=6)
    a, b = make("a", [1] * 8, 8, arrival_s=0.0), make("b", [2] * 8, 8, arrival_s=1.0)
    rig.scheduler.add(a)
    rig.scheduler.add(b)
    while not b.num_preemptions:
        rig.step()
    rig.run()
    assert b.num_preemptions == 1
    assert b.num_cached_tokens > 0
    assert rig.scheduler.counters.num_prefix_hit_tokens == 0  # its own blocks are no prefix hit
    assert b.output_token_ids == expected_output(b.prompt_token_ids, 8)


@pytest.mark.parametrize("num_seqs", [2, 3, 8])
def test_all_finish_when_every_sequence_wants_the_last_block(num_seqs):
    # Each alone needs the whole pool in the end.
    rig = Rig(num_blocks=num_seqs * 2)
    size = num_seqs * 2 * 4
    seqs = [make(str(i), [i] * 7, size - 7, arrival_s=float(i)) for i in range(num_seqs)]
    for seq in seqs:
        rig.scheduler.add(seq)
    rig.run()
    for seq in seqs:
        assert seq.output_token_ids == expected_output(seq.prompt_token_ids, size - 7)
        assert seq.num_preemptions <= 4
    assert rig.scheduler.counters.num_preemptions >= num_seqs - 1
    rig.assert_drained()


@pytest.mark.parametrize("max_preemptions", [0, 1, 4])
def test_nobody_is_preempted_more_often_than_allowed(max_preemptions):
    rng = random.Random(7)
    rig = Rig(num_blocks=12, max_preemptions=max_preemptions, token_budget=16, watermark=0.1)
    seqs = []
    for i in range(60):
        prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 25))]
        # later arrivals of higher classes keep pushing the others out
        seq = make(str(i), prompt, rng.randrange(1, 24), arrival_s=float(i), priority=PriorityClass(rng.randint(1, 3)))
        seqs.append(seq)
    for seq in seqs:
        rig.scheduler.add(seq)
        rig.step()
    rig.run()
    for seq in seqs:
        assert seq.output_token_ids == expected_output(seq.prompt_token_ids, seq.params.max_tokens)
        assert seq.num_preemptions <= max_preemptions
    assert (rig.scheduler.counters.num_preemptions > 0) == (max_preemptions > 0)
    rig.assert_drained()


def test_worst_case_admission_never_preempts():
    rng = random.Random(8)
    rig = Rig(num_blocks=12, admission=Admission.WORST_CASE)
    seqs = [make(str(i), rng.randrange(1, 25), rng.randrange(1, 24), arrival_s=float(i)) for i in range(30)]
    for seq in seqs:
        rig.scheduler.add(seq)
    rig.run()
    assert rig.scheduler.counters.num_preemptions == 0
    for seq in seqs:
        assert seq.output_token_ids == expected_output(seq.prompt_token_ids, seq.params.max_tokens)
    rig.assert_drained()


def test_the_watermark_is_kept_while_others_run_and_waived_for_one_alone():
    rig = Rig(num_blocks=10, watermark=0.2)  # 2 blocks
    alone = make("alone", 37, 3)
    rig.scheduler.add(alone)
    rig.step()
    assert len(alone.block_ids) == 10
    rig.run()
    rig.pool.drop(rig.pool.index.match(alone.prompt_token_ids, b"")[0])
    rig.scheduler.add(make("a", [7] * 20, 4))
    rig.scheduler.add(make("b", [8] * 13, 4))  # would leave 10 - 5 - 4 = 1
    rig.step()
    assert rig.scheduler.load().num_waiting == 1
    rig.scheduler.release("b")
    rig.scheduler.add(make("c", [9] * 8, 4))  # "a" has grown by a block: leaves 10 - 6 - 2 = 2
    rig.step()
    assert rig.scheduler.load().num_waiting == 0


def test_the_watermark_is_waived_once_the_last_other_has_ended_even_if_nothing_was_returned():
    rig = Rig(num_blocks=10, watermark=0.2)
    runs, waits = make("runs", [7] * 18, 2), make("waits", [8] * 13, 3)
    rig.scheduler.add(runs)
    rig.scheduler.add(waits)  # would leave 10 - 5 - 4 = 1
    rig.step()
    leased = list(runs.block_ids)
    rig.pool.lease(leased)
    assert rig.engine.step().outputs[0].finish_reason is FinishReason.LENGTH
    assert rig.pool.num_available == 5
    assert rig.engine.has_work()
    rig.engine.step()
    assert waits.state is SequenceState.RUNNING
    rig.scheduler.check(leased=dict.fromkeys(leased, 1))


def test_one_that_waits_for_room_costs_no_steps_until_something_is_returned():
    rig = Rig(num_blocks=4)
    rig.scheduler.add(make("holder", [50] * 4, 1, leaves_after_first_token=True))
    held = []
    rig.scheduler.before_release = lambda seq: (rig.pool.lease(seq.block_ids), held.extend(seq.block_ids))
    rig.engine.step()
    rig.scheduler.before_release = None
    rig.scheduler.add(make("s", 13, 3))
    assert rig.engine.has_work()
    assert rig.engine.step() is None
    assert not rig.engine.has_work()  # the lease is what it waits for, and only its end wakes it
    rig.pool.unlease(held)
    assert rig.engine.has_work()
    rig.run()
    rig.assert_drained()


def test_new_arrivals_wait_while_too_much_is_leased():
    rig = Rig(num_blocks=10, max_leased_share=0.5)
    blocks = rig.pool.allocate(6)
    rig.pool.lease(blocks)
    rig.pool.unuse(blocks)
    rig.scheduler.add(make("s", 3, 2))
    assert rig.engine.step() is None
    assert not rig.engine.has_work()
    rig.pool.unlease(blocks[:1])  # 5 of 10 is not more than half
    assert rig.engine.has_work()
    assert rig.engine.step() is not None
    rig.pool.unlease(blocks[1:])


def test_on_admitted_comes_before_the_first_step_with_all_blocks():
    rig = Rig(token_budget=4)
    seen = []
    rig.scheduler.on_admitted = lambda seq: seen.append((seq.sequence_id, len(seq.block_ids), rig.runner.num_steps))
    rig.scheduler.add(make("s", 10, 2))
    rig.run()
    assert seen == [("s", 3, 0)]


# KV from elsewhere


@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 8, 9, 15, 16, 17])
def test_a_joined_sequence_computes_no_prompt_token(prompt):
    rig = Rig(num_blocks=32)
    seq = make("s", prompt, 6)
    assert rig.scheduler.reserve_inbound(seq)
    assert (seq.state, len(seq.block_ids), seq.num_cached_tokens) == (SequenceState.RECEIVING, -(-prompt // 4), 0)
    assert not rig.engine.has_work()
    whole = expected_output(seq.prompt_token_ids, 6)
    receive(rig, seq, whole[0])
    rig.scheduler.join(seq, prompt)
    batch = rig.scheduler.schedule()
    assert shape(batch) == [("s", prompt, 1, True)]
    assert batch.num_decodes == 1
    settle(rig, batch)
    rig.run()
    assert seq.output_token_ids == whole
    assert rig.scheduler.counters.num_prompt_tokens_computed == 0
    rig.assert_drained()


@pytest.mark.parametrize(("prompt", "cached"), [(3, 0), (4, 4), (5, 4), (8, 8), (9, 8)])
def test_an_inbound_hit_may_be_the_whole_prompt(prompt, cached):
    rig = Rig(num_blocks=32)
    rig.scheduler.add(make("first", prompt, 2))
    rig.run()
    seq = make("s", prompt, 6)
    assert rig.scheduler.reserve_inbound(seq)
    assert (seq.num_cached_tokens, len(seq.block_ids)) == (cached, -(-prompt // 4))
    whole = expected_output(seq.prompt_token_ids, 6)
    receive(rig, seq, whole[0])
    rig.scheduler.join(seq, prompt)
    rig.run()
    assert seq.output_token_ids == whole
    rig.assert_drained()


def test_pulled_blocks_are_found_only_after_the_join():
    rig = Rig(num_blocks=32)
    seq = make("s", 9, 6)
    assert rig.scheduler.reserve_inbound(seq)
    receive(rig, seq, 1)
    assert rig.scheduler.num_cached_tokens(make("probe", 9)) == 0
    rig.scheduler.join(seq, 9)
    assert rig.scheduler.num_cached_tokens(make("probe", 9)) == 8


@pytest.mark.parametrize("num_good", [0, 3, 4, 8, 11])
def test_what_did_not_arrive_is_computed_here(num_good):
    """Blocks behind num_good were corrupt, say: their content is garbage when the sequence joins."""
    rig = Rig(num_blocks=32)
    seq = make("s", 12, 6)
    assert rig.scheduler.reserve_inbound(seq)
    receive(rig, seq)
    for position in range(num_good, 12):
        rig.runner.write_slot(seq.block_ids[position // 4] * 4 + position % 4, 999)
    rig.scheduler.join(seq, num_good)
    rig.run()
    assert seq.output_token_ids == expected_output(seq.prompt_token_ids, 6)
    assert rig.scheduler.counters.num_prompt_tokens_computed == 12 - num_good


def test_a_reused_block_is_never_written_even_if_its_tokens_are_computed_again():
    rig = Rig(num_blocks=32)
    rig.scheduler.add(make("first", 8, 2))
    rig.run()
    seq = make("s", 8, 6)
    assert rig.scheduler.reserve_inbound(seq)
    shared = list(seq.block_ids)
    assert seq.num_cached_tokens == 8
    rig.scheduler.join(seq, 7)  # no first token came along: the last prompt token is computed here
    batch = rig.scheduler.schedule()
    assert shape(batch) == [("s", 4, 4, True)]
    assert seq.block_ids[0] == shared[0]
    assert seq.block_ids[1] != shared[1]
    settle(rig, batch)
    rig.run()
    assert seq.output_token_ids == expected_output(seq.prompt_token_ids, 6)
    rig.assert_drained()


def test_inbound_reservations_leave_room_for_those_that_run():
    rig = Rig(num_blocks=20, max_inbound_share=0.5)
    seqs = [make(str(i), [i] * 16) for i in range(4)]
    assert [rig.scheduler.reserve_inbound(seq) for seq in seqs] == [
        True,
        True,
        False,
        False,
    ]  # 4 blocks each, 10 at most
    assert seqs[2].state is SequenceState.WAITING
    assert seqs[2].block_ids == []
    rig.scheduler.release("0")
    assert rig.scheduler.reserve_inbound(seqs[2])
    rig.scheduler.check()


def test_a_lone_inbound_sequence_may_exceed_the_share():
    rig = Rig(num_blocks=20, max_inbound_share=0.1)
    assert rig.scheduler.reserve_inbound(make("s", 60, 4))
    assert not rig.scheduler.reserve_inbound(make("t", [7] * 4, 4))


def test_an_inbound_reservation_is_all_or_nothing():
    rig = Rig(num_blocks=6)
    rig.scheduler.add(make("runs", [9] * 12, 4))
    rig.step()
    before = rig.pool.counts()
    assert not rig.scheduler.reserve_inbound(make("s", 16, 4))
    assert rig.pool.counts() == before
    assert rig.scheduler.get("s") is None
    assert rig.scheduler.reserve_inbound(make("s", 12, 4))


def test_inbound_sequences_wait_for_a_seat_and_keep_it():
    rig = Rig(num_blocks=32, max_num_seqs=1)
    first, second, local = make("first", 3, 2), make("second", 3, 2), make("local", 3, 2)
    assert rig.scheduler.reserve_inbound(first)
    assert not rig.scheduler.reserve_inbound(second)
    rig.scheduler.add(local)
    assert rig.engine.step() is None
    receive(rig, first, 5)
    rig.scheduler.join(first, 3)
    rig.step()
    assert first.state is SequenceState.FINISHED
    rig.run()
    assert local.state is SequenceState.FINISHED
    assert rig.scheduler.reserve_inbound(second)


def test_preempted_sequences_go_before_inbound_ones():
    rig = Rig(num_blocks=6)
    a, b = make("a", [1] * 8, 16, arrival_s=0.0), make("b", [2] * 8, 8, arrival_s=1.0)
    rig.scheduler.add(a)
    rig.scheduler.add(b)
    while not b.num_preemptions:
        rig.step()
    assert not rig.scheduler.reserve_inbound(make("s", [3] * 4, 2))
    rig.run()
    assert rig.scheduler.reserve_inbound(make("s", [3] * 4, 2))


def test_inbound_sequences_do_not_starve_a_waiting_one_that_came_before():
    rig = Rig(num_blocks=8)
    runs, waits = make("runs", [1] * 12, 8), make("waits", [2] * 24, 4, arrival_s=1.0)
    rig.scheduler.add(runs)
    rig.scheduler.add(waits)
    rig.step()
    assert waits.state is SequenceState.WAITING
    assert not rig.scheduler.reserve_inbound(make("later", [3] * 4, arrival_s=2.0))
    assert rig.scheduler.reserve_inbound(make("earlier", [3] * 4, arrival_s=0.5))


def test_a_failed_transfer_is_computed_here_in_other_blocks_than_those_it_may_still_write():
    rig = Rig(num_blocks=8)
    seq = make("s", 10, 4)
    assert rig.scheduler.reserve_inbound(seq)
    pulled = list(seq.block_ids)
    rig.pool.quarantine(pulled[1:])
    rig.scheduler.requeue(seq)
    quarantined = dict.fromkeys(pulled[1:], 1)
    rig.scheduler.check(quarantined=quarantined)
    while rig.engine.has_work():
        rig.engine.step()
        assert not set(seq.block_ids) & set(pulled[1:])
        for block in pulled[1:]:  # late bytes
            rig.runner.write_slot(block * 4, 999)
        rig.scheduler.check(quarantined=quarantined)
    assert seq.output_token_ids == expected_output(seq.prompt_token_ids, 4)
    rig.pool.unquarantine(pulled[1:])
    rig.assert_drained()


def test_a_receiving_sequence_is_released_with_blocks_in_quarantine():
    rig = Rig(num_blocks=8)
    seq = make("s", 20, 4)
    assert rig.scheduler.reserve_inbound(seq)
    late = seq.block_ids[3:]
    rig.pool.quarantine(late)
    assert rig.scheduler.release("s") is seq
    rig.scheduler.check(quarantined=dict.fromkeys(late, 1))
    assert (rig.pool.counts().free, rig.pool.counts().quarantined) == (6, 2)
    rig.pool.unquarantine(late)
    rig.assert_drained()


def test_join_refuses_a_sequence_that_would_have_nothing_to_compute():
    rig = Rig()
    seq = make("s", 8)
    assert rig.scheduler.reserve_inbound(seq)
    with pytest.raises(ValueError, match="nothing to sample from"):
        rig.scheduler.join(seq, 8)
    assert seq.state is SequenceState.RECEIVING
    rig.scheduler.release("s")
    rig.assert_drained()
