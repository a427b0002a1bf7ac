"""Decides what each step computes. One scheduler for both pools; plain Python; no I/O and no clock of its own.

A sequence has num_tokens and num_computed_tokens; schedule() closes the gap: decodes first, then chunks of prompts by
class and arrival:

    add ---------> waiting --admitted--> prefilling --gap closed--> decoding --stop--> finished
                      ^                      |                          |
                      +------preempted-------+--------------------------+
    reserve_inbound -> receiving --join--> decoding (prefilling, where something is missing)

1. Whoever is admitted takes blocks for all its known tokens at once, so half-prefilled prompts never block each other,
   and whoever waits holds none.
2. A decode takes one more block when its last is full. When there is none, the lowest ranking running sequence (which
   may be the one that asks) gives all of its back and waits before all new arrivals. After max_preemptions of these it
   is admitted only with every block it may ever want, and is no victim any more: the highest ranking always moves on.
3. release() is the one way out, from any state, any number of times.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from types import MappingProxyType

from services.engine import block_table
from services.engine.batch import Batch, SampledToken, ScheduledSequence, SequenceOutput
from services.engine.block_pool import BlockPool, BooksError
from services.engine.counters import SchedulerCounters
from services.engine.limits import NeverFits, SchedulerConfig, check_fits
from services.engine.policies import rank, tokens_to_admit, victim
from services.engine.roster import Roster, SchedulerLoad
from services.engine.sequence import FinishReason, Sequence, SequenceState

__all__ = ["NeverFits", "Scheduler", "SchedulerConfig", "SchedulerCounters", "SchedulerLoad"]


class Scheduler:
    """See the module's docstring. Only the engine thread calls this."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, clock: Callable[[], float]) -> None:
        self.config = config
        self.pool = pool
        self.clock = clock
        self.counters = SchedulerCounters()
        self.on_admitted: Callable[[Sequence], None] | None = None  # has its blocks now, and is computed in this step
        self.before_release: Callable[[Sequence], None] | None = None  # ended by itself, still has its blocks
        self._roster = Roster()
        self._complete: dict[str, Sequence] = {}  # ended by their forced output, not reported yet
        self._blocked: tuple[str, int, bool] | None = None  # the situation in which the head found no room
        self._seats = min(config.max_num_seqs, config.token_budget)  # so every running sequence gets on in each step
        self._spare = int(config.watermark * pool.num_blocks)

    # Coming

    def add(self, seq: Sequence) -> None:
        """Queue a sequence to be computed here. One whose forced output is complete already ends without a step.

        Raises NeverFits if it could not run here even alone, ValueError for an empty prompt or a known one.
        """
        self._check_new(seq)
        self._roster.enter(seq)
        self._roster.waiting.push(seq)
        self._end_if_complete(seq)

    def reserve_inbound(self, seq: Sequence) -> bool:
        """Take blocks for all known tokens of a sequence whose KV comes from elsewhere; all of them or none.

        True: it is RECEIVING; `block_ids[num_cached_tokens // block_size :]` are to be filled, the ones before were
        cached here. False: not now. Raises as add() does.
        """
        self._check_new(seq)
        if self._roster.waiting.num_returned or self._is_outranked(seq) or self._roster.num_seated >= self._seats:
            return False
        cap = int(self.config.max_inbound_share * self.pool.num_blocks) - self._roster.num_inbound_blocks
        num_new = block_table.take(
            self.pool,
            seq,
            self._tokens_to_admit(seq),
            most_cached=seq.num_tokens,
            spare=self._spare if self._roster.num_seated else 0,
            most_new=cap if self._roster.receiving else None,
        )
        if num_new is None:
            return False
        self._roster.enter(seq)
        seq.state = SequenceState.RECEIVING
        self._roster.receiving[seq.sequence_id] = num_new
        self.counters.num_prefix_hit_tokens += seq.num_cached_tokens
        return True

    def join(self, seq: Sequence, num_computed_tokens: int) -> None:
        """A RECEIVING sequence's first num_computed_tokens tokens are in its blocks, verified: let it run.

        Its first token from elsewhere has been appended to output_token_ids; what is missing is computed here. If that
        token completed it, it ends without a step. Raises ValueError if nothing is left to compute.
        """
        self._check_receiving(seq)
        if not 0 <= num_computed_tokens < seq.num_tokens:
            raise ValueError(f"{num_computed_tokens} of {seq.num_tokens} tokens computed: nothing to sample from")
        del self._roster.receiving[seq.sequence_id]
        seq.num_computed_tokens = num_computed_tokens
        if block_table.unshare(self.pool, seq, num_computed_tokens):
            block_table.index_computed(self.pool, seq)
            self._run(seq, decoding=seq.is_decoding)
        else:
            self._wait_again(seq)
        self._end_if_complete(seq)

    def requeue(self, seq: Sequence) -> None:
        """A RECEIVING sequence gets nothing from elsewhere: it gives its blocks back and is computed here, as the next.

        Blocks that a transfer may still write are to be quarantined first.
        """
        self._check_receiving(seq)
        del self._roster.receiving[seq.sequence_id]
        self._wait_again(seq)

    # A step

    def schedule(self) -> Batch | None:
        """What the next step computes; None if nothing can be. Changes no sequence's tokens, so it may be repeated."""
        self._grow_running()
        items = [ScheduledSequence(seq, seq.num_computed_tokens, 1, True) for seq in self._roster.decoding.values()]
        batch = Batch(items, num_tokens=len(items), num_decodes=len(items))
        prefilling = deque(self._roster.prefilling)
        while batch.num_tokens < self.config.token_budget:
            admitted = self._admit(before=prefilling[0] if prefilling else None)
            if admitted is None and not prefilling:
                break
            self._add_chunk(batch, admitted or prefilling.popleft())
        return batch if items else None

    def settle(self, batch: Batch, tokens: list[SampledToken]) -> list[SequenceOutput]:
        """Book what a step computed: `tokens` has one per item with sample=True, in order.

        Ended sequences have been released, before_release has been called for each before that.
        """
        self.counters.count(batch)
        outputs = []
        sampled = iter(tokens)
        block_size = self.pool.block_size
        for position, item in enumerate(batch.items):
            token = next(sampled) if item.sample else None
            seq = item.seq
            if seq.state is not SequenceState.RUNNING:
                continue  # released since it was scheduled
            seq.num_computed_tokens = item.start + item.num_tokens
            if seq.num_computed_tokens // block_size > seq.num_indexed_blocks:
                block_table.index_computed(self.pool, seq)
            if token is not None:
                outputs.append(self._append(seq, token, was_prefilling=position >= batch.num_decodes))
        return outputs

    # Going

    def release(self, sequence_id: str, reason: FinishReason = FinishReason.CANCELLED) -> Sequence | None:
        """End a sequence now, whatever its state, and give its blocks back; None if it is not here (any more).

        What a transfer may still write is quarantined first, what a peer may still read is leased first, by the worker.
        """
        seq = self._roster.by_id.get(sequence_id)
        if seq is None:
            return self._complete.pop(sequence_id, None)  # ended by itself; now nobody is told
        self._end(seq, reason)
        return seq

    def take_complete(self) -> list[SequenceOutput]:
        """The sequences that ended without a step since the last call."""
        complete = [
            SequenceOutput(seq, None, seq.num_output_tokens, seq.finish_reason) for seq in self._complete.values()
        ]
        self._complete.clear()
        return complete

    def drop_corrupt(self, block_ids: Iterable[int]) -> int:
        """Take blocks with wrong content, and all that continue them, out of the prefix index; returns how many.

        Sequences that hold one go on, but put nothing into the index any more. Call it while the blocks are held
        (leased, say): later they may hold something else.
        """
        corrupt = set(block_ids)
        for seq in self._roster.by_id.values():
            if not corrupt.isdisjoint(seq.block_ids):
                seq.indexable = False
        return sum(len(self.pool.drop(block_id)) for block_id in corrupt)

    # Looking

    def get(self, sequence_id: str) -> Sequence | None:
        """A sequence that has not ended."""
        return self._roster.by_id.get(sequence_id)

    @property
    def sequences(self) -> Mapping[str, Sequence]:
        """All that have not ended, by id."""
        return MappingProxyType(self._roster.by_id)

    @property
    def is_runnable(self) -> bool:
        """Whether a step would do something now. Who waits for a transfer, or for blocks, does not count."""
        if self._roster.decoding or self._roster.prefilling or self._complete:
            return True
        head = self._roster.waiting.head()
        return head is not None and self._may_admit(head)

    def next_deadline_s(self) -> float | None:
        """The earliest deadline of a sequence that has not ended (engine clock)."""
        return self._roster.deadlines.next()

    def expired(self) -> list[Sequence]:
        """The sequences whose deadline has passed, each once; the worker releases them."""
        return [self._roster.by_id[each] for each in self._roster.deadlines.pop_expired(self.clock())]

    def load(self) -> SchedulerLoad:
        """How much there is to do now."""
        return self._roster.load()

    def num_cached_tokens(self, seq: Sequence) -> int:
        """How many tokens of a sequence that is not here yet are cached."""
        return len(block_table.cached_prefix(self.pool, seq, seq.num_tokens)) * self.pool.block_size

    def check(self, leased: Mapping[int, int] | None = None, quarantined: Mapping[int, int] | None = None) -> None:
        """Raise BooksError unless sequences, and the given leases and quarantines, account for every reference."""
        running = {seq.sequence_id for seq in self._roster.running()}
        for sequence_id, seq in self._roster.by_id.items():
            holds = sequence_id in running or sequence_id in self._roster.receiving
            most_computed = seq.num_tokens - (sequence_id in running) if holds else 0
            num_slots = len(seq.block_ids) * self.pool.block_size
            if holds != bool(seq.block_ids) or seq.num_computed_tokens > min(num_slots, most_computed):
                raise BooksError(
                    f"{sequence_id} ({seq.state.value}) has blocks {seq.block_ids} for {seq.num_computed_tokens} tokens"
                )
        self.pool.check(
            used=Counter(chain.from_iterable(seq.block_ids for seq in self._roster.by_id.values())),
            leased=leased or {},
            quarantined=quarantined or {},
        )

    # Inside

    def _check_new(self, seq: Sequence) -> None:
        if seq.sequence_id in self._roster.by_id or seq.state is not SequenceState.WAITING:
            raise ValueError(f"{seq.sequence_id} was here before")
        check_fits(seq, self.config, self.pool.num_blocks, self.pool.block_size)

    def _check_receiving(self, seq: Sequence) -> None:
        if seq.state is not SequenceState.RECEIVING:
            raise ValueError(f"{seq.sequence_id} is {seq.state.value}, not receiving")

    def _tokens_to_admit(self, seq: Sequence) -> int:
        config = self.config
        return tokens_to_admit(seq, config.admission, config.max_preemptions, config.max_model_len)

    def _situation(self, head: Sequence) -> tuple[str, int, bool]:
        """What would have to change before a head that found no room finds some."""
        return head.sequence_id, self.pool.num_returns, self._roster.num_seated > 0

    def _may_admit(self, head: Sequence) -> bool:
        leased = self.pool.counts().leased
        deferred = (
            leased > self.config.max_leased_share * self.pool.num_blocks and not self._roster.waiting.num_returned
        )
        return not deferred and self._roster.num_seated < self._seats and self._situation(head) != self._blocked

    def _is_outranked(self, seq: Sequence) -> bool:
        """Whether a waiting sequence that goes before this one has found no room: inbound ones never starve it."""
        head = self._roster.waiting.head()
        return head is not None and self._situation(head) == self._blocked and rank(head)[:2] <= rank(seq)[:2]

    def _admit(self, before: Sequence | None) -> Sequence | None:
        """Let the head of the queue run if there is room, and if its class is higher than that of `before`."""
        head = self._roster.waiting.head()
        if head is None or (before is not None and head.priority >= before.priority) or not self._may_admit(head):
            return None
        spare = self._spare if self._roster.num_seated else 0
        tokens = self._tokens_to_admit(head)
        if block_table.take(self.pool, head, tokens, most_cached=head.num_tokens - 1, spare=spare) is None:
            self._blocked = self._situation(head)
            return None
        self._roster.waiting.remove(head)
        if head.first_scheduled_s is None:
            self.counters.num_prefix_hit_tokens += head.num_cached_tokens
        self._run(head, decoding=False)
        if self.on_admitted is not None:
            self.on_admitted(head)
        return head

    def _run(self, seq: Sequence, *, decoding: bool) -> None:
        seq.state = SequenceState.RUNNING
        if seq.first_scheduled_s is None:
            seq.first_scheduled_s = self.clock()
        if decoding:
            self._roster.decoding[seq.sequence_id] = seq
        else:
            self._roster.prefill(seq)

    def _grow_running(self) -> None:
        """Make every running sequence's block table cover its known tokens, preempting where there is no room."""
        block_size = self.pool.block_size
        short = [s for s in self._roster.decoding.values() if s.num_computed_tokens >= len(s.block_ids) * block_size]
        short += [s for s in self._roster.prefilling if s.num_tokens > len(s.block_ids) * block_size]
        for seq in short:
            while seq.state is SequenceState.RUNNING and not block_table.grow(self.pool, seq):
                self._preempt(victim(self._roster.running(), self.config.max_preemptions) or seq)

    def _preempt(self, seq: Sequence) -> None:
        self.counters.num_preemptions += 1
        seq.num_preemptions += 1
        self._roster.leave_state(seq)
        self._wait_again(seq)

    def _wait_again(self, seq: Sequence) -> None:
        block_table.give_back(self.pool, seq)
        seq.num_computed_tokens = seq.num_cached_tokens = 0
        seq.state = SequenceState.WAITING
        self._roster.waiting.push_back(seq)

    def _add_chunk(self, batch: Batch, seq: Sequence) -> None:
        start, num_known = seq.num_computed_tokens, seq.num_tokens
        num_tokens = min(num_known - start, self.config.token_budget - batch.num_tokens)
        if num_tokens > 0:
            batch.items.append(ScheduledSequence(seq, start, num_tokens, start + num_tokens == num_known))
            batch.num_tokens += num_tokens

    def _append(self, seq: Sequence, token: SampledToken, was_prefilling: bool) -> SequenceOutput:
        seq.output_token_ids.append(token.token_id)
        reason = self._stop_reason(seq)
        if reason is not None or seq.leaves_after_first_token:
            if self.before_release is not None:
                self.before_release(seq)
            self._end(seq, reason)
        elif was_prefilling:
            self._roster.prefilling.remove(seq)
            self._roster.decoding[seq.sequence_id] = seq
        return SequenceOutput(seq, token, seq.num_output_tokens - 1, reason)

    def _stop_reason(self, seq: Sequence) -> FinishReason | None:
        full = seq.num_tokens >= self.config.max_model_len
        return seq.check_stop() or (FinishReason.LENGTH if full else None)

    def _end_if_complete(self, seq: Sequence) -> None:
        reason = self._stop_reason(seq)
        if reason is not None:
            self._end(seq, reason)
            self._complete[seq.sequence_id] = seq

    def _end(self, seq: Sequence, reason: FinishReason | None) -> None:
        """The only place where a sequence's life ends."""
        self._roster.exit(seq)
        block_table.give_back(self.pool, seq)
        seq.state = SequenceState.FINISHED
        seq.finish_reason = reason
