"""The life of a prompt on a prefill worker, on the engine thread.

1. Arrive: the sequence waits its turn.
2. Admitted: blocks for the whole prompt are reserved, leased and offered; cached ones are readable at once.
3. Chunk by chunk: full blocks become readable, so that the move hides behind the computation.
4. The last chunk samples token 0: it is published, put into the note to decode, and answered to the gateway.
5. The sequence leaves; its blocks stay leased until decode has released them, then they are cached.

A cancel, a fence or a lost lease ends it at any of these, through one path (`_drop`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from services.engine.batch import SampledToken, SequenceOutput
from services.engine.engine import StepResult
from services.engine.limits import NeverFits
from services.engine.sequence import FinishReason, Sequence, SequenceState
from services.kvtransfer.leases import LeaseClosed, LeaseOutcome
from services.kvtransfer.messages import ConnectorFailed, FirstToken, LeasesChanged
from services.worker import gauges
from services.worker.desk import CancelAttempt
from services.worker.intake import Attempt
from services.worker.main import Parts
from services.worker.outlet import Failure
from services.worker.publisher import TokenEvent


@dataclass(frozen=True, slots=True)
class Arrive:
    """To the engine: a prompt to compute."""

    attempt: Attempt
    seq: Sequence


@dataclass(frozen=True, slots=True)
class Prefilled:
    """How a prompt ended; times in seconds."""

    num_prompt_tokens: int
    num_cached_tokens: int
    queue_s: float
    prefill_s: float
    first_token: SampledToken | None
    finish: FinishReason | None


class PrefillLife:
    """What happens around the engine's step on a prefill worker."""

    def __init__(self, parts: Parts) -> None:
        self._scheduler = parts.assembly.scheduler
        self._pool = parts.assembly.pool
        self._kv_cache = parts.assembly.kv_cache
        self._offers = parts.connector.offers
        self._outlet = parts.outlet
        self._post = parts.inbox.post
        self._attempts: dict[str, Attempt] = {}  # sequences that have not left
        self._cached: dict[str, int] = {}  # their prompt tokens that were cached at admission
        self._leased: dict[str, tuple[int, ...]] = {}  # handoff id -> blocks, until the lease has ended
        parts.assembly.scheduler.on_admitted = self._admitted

    def receive(self, message: object) -> None:
        """Arrivals and cancels; the connector's messages only wake the loop."""
        match message:
            case Arrive():
                self._arrive(message.attempt, message.seq)
            case CancelAttempt():
                self._drop(message.handoff_id, Failure(message.code, message.reason))
            case LeasesChanged():
                pass
            case ConnectorFailed():
                raise RuntimeError(message.reason)
            case _:
                raise TypeError(f"a prefill worker has no use for {message!r}")

    def tick(self, now: float) -> None:
        """Ends leases and overdue sequences."""
        for closed in self._offers.tick(now):
            self._lease_closed(closed)
        for seq in self._scheduler.expired():
            self._drop(seq.sequence_id, Failure("DEADLINE_EXCEEDED", "the request's time is over"))

    def settle(self, result: StepResult) -> None:
        """Offers what became readable and reports first tokens."""
        self._kv_cache.wait_written()
        for seq in result.progressed:
            self._offer_progress(seq)
        for output in result.outputs:
            self._first_token(output)

    def flush(self) -> None:
        """Hands the turn's news over."""
        self._outlet.flush()

    def is_tending(self) -> bool:
        """Leases expire by time alone."""
        return bool(self._leased)

    def books(self) -> dict[str, object]:
        """Blocks by state, proven against sequences and leases."""
        leased: dict[int, int] = {}
        for block_ids in self._leased.values():
            for block_id in block_ids:
                leased[block_id] = leased.get(block_id, 0) + 1
        self._scheduler.check(leased=leased)
        counts = self._pool.counts()
        return {
            **{name: getattr(counts, name) for name in ("free", "cached", "used", "leased", "quarantined", "total")},
            "sequences": len(self._scheduler.sequences),
            "leases": len(self._leased),
            "transfers": 0,
        }

    def _arrive(self, attempt: Attempt, seq: Sequence) -> None:
        self._attempts[seq.sequence_id] = attempt
        self._offers.expect(seq.sequence_id)
        try:
            self._scheduler.add(seq)
        except (NeverFits, ValueError) as error:
            self._drop(seq.sequence_id, Failure("INVALID_ARGUMENT", str(error)))

    def _admitted(self, seq: Sequence) -> None:
        """Called inside schedule(): the sequence has its blocks and will be computed in this step."""
        handoff_id = seq.sequence_id
        self._cached[handoff_id] = seq.num_cached_tokens
        if not self._offers.open(handoff_id, seq.num_tokens, seq.block_ids):
            self._post(CancelAttempt(handoff_id, "cancelled before it came"))
            return
        self._pool.lease(seq.block_ids)
        self._leased[handoff_id] = tuple(seq.block_ids)
        self._offers.progress(handoff_id, seq.num_cached_tokens)

    def _offer_progress(self, seq: Sequence) -> None:
        block_ids = self._leased.get(seq.sequence_id)
        if block_ids is None:
            return
        num_tokens = len(seq.prompt_token_ids) + seq.num_forced_tokens
        last_slot = num_tokens % self._pool.block_size
        if seq.num_computed_tokens >= num_tokens and last_slot:
            self._kv_cache.zero_tail(block_ids[-1], last_slot)
        self._offers.progress(seq.sequence_id, min(seq.num_computed_tokens, num_tokens))

    def _first_token(self, output: SequenceOutput) -> None:
        seq, token = output.seq, output.token
        handoff_id = seq.sequence_id
        attempt = self._attempts.pop(handoff_id, None)
        if attempt is None:
            return
        finish = output.finish_reason
        self._outlet.token(TokenEvent(attempt, output.index, token, finish))
        if token is not None:
            note = FirstToken(token.token_id, token.logprob, token.top_logprobs, finish.value if finish else None)
            self._offers.complete(handoff_id, note)
        else:  # the forced output was complete already: there is nothing to pull
            self._offers.fail(handoff_id, "complete before its first step")
        now = time.monotonic()
        started_s = seq.first_scheduled_s if seq.first_scheduled_s is not None else now
        prefilled = Prefilled(
            num_prompt_tokens=seq.num_prompt_tokens,
            num_cached_tokens=min(self._cached.pop(handoff_id, 0), seq.num_prompt_tokens),
            queue_s=started_s - seq.arrival_s,
            prefill_s=now - started_s,
            first_token=token,
            finish=finish,
        )
        self._outlet.end(handoff_id, prefilled)

    def _lease_closed(self, closed: LeaseClosed) -> None:
        block_ids = self._leased.pop(closed.handoff_id, ())
        if closed.corrupt_indices:
            self._scheduler.drop_corrupt(block_ids[i] for i in closed.corrupt_indices if i < len(block_ids))
        self._pool.unlease(reversed(block_ids))
        if closed.outcome is not LeaseOutcome.RELEASED:
            self._drop(closed.handoff_id, Failure("ABORTED", f"the lease is {closed.outcome.value}"))

    def _drop(self, handoff_id: str, failure: Failure) -> None:
        """The one way out before the first token, and of a lease whose handoff nobody wants any more; idempotent."""
        self._cached.pop(handoff_id, None)
        seq = self._scheduler.get(handoff_id)
        if seq is not None and failure.code == "CANCELLED":
            gauges.CANCELLED.labels("queued" if seq.state is SequenceState.WAITING else "prefill").inc()
        self._scheduler.release(handoff_id)
        known = self._attempts.pop(handoff_id, None) is not None
        if known or handoff_id in self._leased:
            self._offers.fail(handoff_id, failure.reason)
        if known:
            self._outlet.end(handoff_id, failure)
