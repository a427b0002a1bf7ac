"""Any order of events: the books hold after every one, outputs are right, and in the end everything drains."""

from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from scheduler_rig import Rig, make, receive

from services.engine.fake_runner import expected_output
from services.engine.policies import Admission
from services.engine.sequence import FinishReason, PriorityClass, SequenceState

NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN = 10, 2, 16


SHAPE = {
    "length": st.integers(1, 11),
    "alphabet": st.integers(0, 2),
    "max_tokens": st.sampled_from([1, 2, 6, 12]),
    "num_forced": st.sampled_from([0, 0, 0, 1, 2, 12]),
    "priority": st.integers(1, 3),
    "salt": st.sampled_from([b"", b"x"]),
}


class Worker(RuleBasedStateMachine):
    """Plays a worker around the scheduler: its gateway, its transfers and its leases."""

    def __init__(self):
        super().__init__()
        self.rig = Rig(
            NUM_BLOCKS,
            BLOCK_SIZE,
            watermark=0.1,
            token_budget=6,
            max_num_seqs=4,
            max_model_len=MAX_MODEL_LEN,
            max_leased_share=0.6,
        )
        self.leases: list[list[int]] = []
        self.quarantines: list[list[int]] = []
        self.num_made = 0

    def make(self, length, alphabet, max_tokens, num_forced, priority, salt):
        self.num_made += 1
        self.rig.clock.now += 1.0
        max_tokens = min(max_tokens, MAX_MODEL_LEN - length)
        prompt = [(i * alphabet) % 3 for i in range(length)]
        whole = expected_output(prompt, max_tokens)
        return make(
            str(self.num_made),
            prompt,
            max_tokens,
            forced=whole[: min(num_forced, max_tokens)],
            priority=PriorityClass(priority),
            cache_salt=salt,
            arrival_s=self.rig.clock.now,
        )

    @rule(**SHAPE)
    def add(self, **shape):
        self.rig.scheduler.add(self.make(**shape))

    @rule(**SHAPE)
    def reserve_inbound(self, **shape):
        seq = self.make(**shape)
        available = self.rig.pool.num_available
        if seq.check_stop() is None and not self.rig.scheduler.reserve_inbound(seq):
            assert self.rig.pool.num_available == available
            assert seq.block_ids == []

    def pick(self, data, *states):
        live = [seq for seq in self.rig.scheduler.sequences.values() if not states or seq.state in states]
        return data.draw(st.sampled_from(live)) if live else None

    @rule(data=st.data(), num_bad=st.integers(0, 3), with_token=st.booleans())
    def join(self, data, num_bad, with_token):
        """All arrived, but for num_bad tokens at the end, or for the first token."""
        seq = self.pick(data, SequenceState.RECEIVING)
        if seq is None:
            return
        num_known = seq.num_tokens
        receive(self.rig, seq)
        if with_token:
            whole = expected_output(seq.prompt_token_ids, seq.params.max_tokens)
            seq.output_token_ids.append(whole[seq.num_output_tokens])
        num_good = max(0, min(num_known - num_bad, seq.num_tokens - 1))
        self.rig.scheduler.join(seq, num_good)

    @rule(data=st.data(), again=st.booleans())
    def lose_transfer(self, data, again):
        """Some pulled blocks may still be written when the transfer is given up."""
        seq = self.pick(data, SequenceState.RECEIVING)
        if seq is None:
            return
        pulled = seq.block_ids[seq.num_cached_tokens // BLOCK_SIZE :]
        late = data.draw(st.lists(st.sampled_from(pulled), unique=True)) if pulled else []
        self.rig.pool.quarantine(late)
        if late:
            self.quarantines.append(late)
        if again:
            self.rig.scheduler.requeue(seq)
        else:
            self.give_up(seq)

    @rule(data=st.data())
    def release(self, data):
        seq = self.pick(data)
        if seq is not None:
            self.give_up(seq)

    def give_up(self, seq):
        assert self.rig.scheduler.release(seq.sequence_id) is seq
        assert (seq.state, seq.finish_reason) == (SequenceState.FINISHED, FinishReason.CANCELLED)
        assert self.rig.scheduler.release(seq.sequence_id) is None

    @rule(data=st.data())
    def lease(self, data):
        seq = self.pick(data, SequenceState.RUNNING)
        if seq is not None:
            self.rig.pool.lease(seq.block_ids)
            self.leases.append(list(seq.block_ids))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def unlease(self, data):
        self.rig.pool.unlease(self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1))))

    @precondition(lambda self: self.quarantines)
    @rule(data=st.data())
    def unquarantine(self, data):
        """The transfer wakes up, its late bytes land, and it is over."""
        late = self.quarantines.pop(data.draw(st.integers(0, len(self.quarantines) - 1)))
        for block in late:
            self.rig.runner.write_slot(block * BLOCK_SIZE, 999)
        self.rig.pool.unquarantine(late)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def corrupt(self, data):
        lease = data.draw(st.sampled_from(self.leases))
        self.rig.scheduler.drop_corrupt([data.draw(st.sampled_from(lease))])

    @rule(num_steps=st.integers(1, 12))
    def step(self, num_steps):
        for _ in range(num_steps):
            runnable = self.rig.engine.has_work()
            result = self.rig.engine.step()
            assert runnable or result is None
            self.books()

    @invariant()
    def books(self):
        self.rig.scheduler.check(
            leased=Counter(block for lease in self.leases for block in lease),
            quarantined=Counter(block for blocks in self.quarantines for block in blocks),
        )
        counts = self.rig.pool.counts()
        assert counts.free + counts.cached + counts.used + counts.leased + counts.quarantined == NUM_BLOCKS
        for seq in self.rig.scheduler.sequences.values():
            assert seq.num_preemptions <= 4

    @invariant()
    def outputs(self):
        for seq in self.rig.scheduler.sequences.values():
            assert seq.output_token_ids == expected_output(seq.prompt_token_ids, seq.num_output_tokens)

    def teardown(self):
        for lease in self.leases:
            self.rig.pool.unlease(lease)
        for late in self.quarantines:
            self.rig.pool.unquarantine(late)
        self.leases, self.quarantines = [], []
        live = list(self.rig.scheduler.sequences.values())
        for seq in live:
            if seq.state is SequenceState.RECEIVING:
                receive(self.rig, seq)
                self.rig.scheduler.join(seq, seq.num_tokens - 1)
        self.rig.run(1000)
        self.rig.assert_drained()
        for seq in live:
            assert seq.output_token_ids == expected_output(seq.prompt_token_ids, seq.params.max_tokens)
            assert seq.num_preemptions <= 4


class WorstCaseWorker(Worker):
    """The same under worst-case admission, in which nobody is ever preempted."""

    def __init__(self):
        super().__init__()
        self.rig = Rig(
            NUM_BLOCKS,
            BLOCK_SIZE,
            token_budget=6,
            max_num_seqs=4,
            max_model_len=MAX_MODEL_LEN,
            admission=Admission.WORST_CASE,
        )

    @invariant()
    def nobody_is_preempted(self):
        assert self.rig.scheduler.counters.num_preemptions == 0


TestBooks = Worker.TestCase
TestBooks.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow],
)
TestBooksInWorstCase = WorstCaseWorker.TestCase
TestBooksInWorstCase.settings = settings(
    max_examples=30,
    stateful_step_count=30,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow],
)
