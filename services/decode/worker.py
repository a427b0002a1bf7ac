"""The life of a choice on a decode worker, on the engine thread.

Disaggregated:
1. Arrive: the handoff is followed and its lease renewed at once, before there is room.
2. Ready: blocks become readable at the holder. When the first are, room for all is reserved; what is cached is skipped.
3. Pull: readable blocks are pulled while the holder still computes the rest, and verified.
4. Complete: token 0 comes with the note. With the last block verified the lease is released; only if it held do the
   blocks count, and the sequence joins the running batch.
5. Steps: one token each, published once per step and gateway, until it stops.

Colocated: the sequence is added to the scheduler as it came, and its prompt is computed here.

Every failure and every cancel goes through `_leave`, whatever the state: what a transfer may still write is quarantined
first, then the blocks go back. A choice that its gateway cancels is answered with what is known of it so far; who hung
up, was fenced or fell silent gets a failure.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

from prometheus_client import Counter as MetricCounter

from services.decode.choice import Choice, Decoded
from services.decode.inbound import HandoffMismatchError, Inbound
from services.engine.batch import SampledToken, SequenceOutput
from services.engine.engine import StepResult
from services.engine.limits import NeverFits, check_fits
from services.engine.sequence import FinishReason, Sequence
from services.kvtransfer import messages
from services.kvtransfer.transport import PeerRef
from services.worker import gauges
from services.worker.desk import CancelAttempt
from services.worker.intake import Attempt
from services.worker.main import Parts
from services.worker.outlet import Failure
from services.worker.publisher import TokenEvent

INBOUND = MetricCounter("pdserve_decode_handoffs_total", "handoffs by how they ended", ["outcome"])
CORRUPT = MetricCounter("pdserve_decode_corrupt_blocks_total", "pulled blocks whose checksum was wrong")
QUARANTINED = MetricCounter("pdserve_decode_quarantined_blocks_total", "blocks put into quarantine")


@dataclass(frozen=True, slots=True)
class Arrive:
    """To the engine: a choice to decode; without `holder` its prompt is computed here."""

    attempt: Attempt
    seq: Sequence
    holder: PeerRef | None


class DecodeLife:
    """What happens around the engine's step on a decode worker."""

    def __init__(self, parts: Parts) -> None:
        self._settings = parts.settings
        self._scheduler = parts.assembly.scheduler
        self._pool = parts.assembly.pool
        self._fetches = parts.connector.fetches
        self._outlet = parts.outlet
        self._choices: dict[str, Choice] = {}
        self._waiting_room: dict[str, Inbound] = {}  # announced, not reserved, in order of arrival
        self._quarantined: Counter[int] = Counter()

    # Messages

    def receive(self, message: object) -> None:
        """Arrivals, cancels, and what the connector reports."""
        match message:
            case Arrive():
                self._arrive(message)
            case CancelAttempt():
                self._cancelled(message)
            case messages.QuarantineEnded():
                self._end_quarantine(message.local_block_ids)
            case messages.ConnectorFailed():
                raise RuntimeError(message.reason)
            case messages.LeasesChanged():
                pass
            case _:
                self._receive_handoff(message)

    def _receive_handoff(self, message: object) -> None:
        """News of a handoff that may have ended here meanwhile: then it means nothing."""
        choice = self._choices.get(getattr(message, "handoff_id", ""))
        if choice is None or choice.inbound is None:
            return
        inbound = choice.inbound
        match message:
            case messages.HandoffReady():
                self._announced(inbound, message)
            case messages.HandoffComplete():
                inbound.first_token, inbound.complete_s = message.first_token, time.monotonic()
                self._complete(inbound)
            case messages.BlocksFetched():
                inbound.num_verified += len(message.indices)
                inbound.num_bytes += message.num_bytes
                inbound.verified_s = time.monotonic()
                self._release_if_whole(inbound)
            case messages.Released():
                inbound.since_complete_s = message.since_complete_s
                self._released(choice, inbound, held=message.held)
            case messages.BlocksCorrupt():
                CORRUPT.inc(len(message.indices))
                self._fetches.release(message.handoff_id, message.indices)
                self._leave(message.handoff_id, Failure("ABORTED", f"corrupt blocks {list(message.indices)}"))
            case messages.HandoffFailed() | messages.FetchFailed():
                code = "FAILED_PRECONDITION" if _is_mismatch(message.reason) else "UNAVAILABLE"
                self._leave(message.handoff_id, Failure(code, f"handoff: {message.reason}"))
            case _:
                raise TypeError(f"a decode worker has no use for {message!r}")

    def tick(self, now: float) -> None:
        """Finds room for waiting handoffs; ends what is overdue."""
        for seq in self._scheduler.expired():
            self._leave(seq.sequence_id, Failure("DEADLINE_EXCEEDED", "the request's time is over"))
        for handoff_id, inbound in list(self._waiting_room.items()):
            if self._reserve(inbound):
                continue
            if now > inbound.room_by_s:
                self._leave(handoff_id, Failure("RESOURCE_EXHAUSTED", "no room for the handoff's blocks in time"))
            else:
                break  # nobody overtakes

    def settle(self, result: StepResult) -> None:
        """Publishes the step's tokens and ends what finished."""
        now = time.monotonic()
        for output in result.outputs:
            self._output(output, now)

    def flush(self) -> None:
        """Hands the turn's news over."""
        self._outlet.flush()

    def is_tending(self) -> bool:
        """Handoffs that wait for room."""
        return bool(self._waiting_room)

    def books(self) -> dict[str, object]:
        """Blocks by state, proven against sequences and quarantine."""
        self._scheduler.check(quarantined=self._quarantined)
        counts = self._pool.counts()
        return {
            **{name: getattr(counts, name) for name in ("free", "cached", "used", "leased", "quarantined", "total")},
            "sequences": len(self._choices),
            "leases": 0,
            "transfers": len(self._fetches.writable()),
        }

    # Arriving

    def _arrive(self, message: Arrive) -> None:
        seq, holder = message.seq, message.holder
        handoff_id = seq.sequence_id
        choice = self._choices[handoff_id] = Choice(message.attempt, seq, None)
        try:
            check_fits(seq, self._scheduler.config, self._pool.num_blocks, self._pool.block_size)
            if holder is None:
                self._scheduler.add(seq)
                return
            room_by_s = time.monotonic() + self._settings.room_wait_s
            choice.inbound = Inbound(seq, room_by_s, self._pool.blocks_for(seq.num_tokens))
            self._fetches.begin(handoff_id, holder)
        except (NeverFits, ValueError) as error:
            self._leave(handoff_id, Failure("INVALID_ARGUMENT", str(error)))

    def _announced(self, inbound: Inbound, message: messages.HandoffReady) -> None:
        try:
            inbound.announced(message.num_tokens, message.num_blocks, message.blocks)
        except HandoffMismatchError as error:
            self._leave(message.handoff_id, Failure("FAILED_PRECONDITION", str(error)))
            return
        if inbound.reserved:
            self._fetches.fetch(message.handoff_id, inbound.take_pulls(time.monotonic()))
        elif message.handoff_id not in self._waiting_room:
            inbound.room_by_s = time.monotonic() + self._settings.room_wait_s
            self._waiting_room[message.handoff_id] = inbound

    def _reserve(self, inbound: Inbound) -> bool:
        seq = inbound.seq
        if not self._scheduler.reserve_inbound(seq):
            return False
        del self._waiting_room[seq.sequence_id]
        inbound.reserved = True
        inbound.num_held = seq.num_cached_tokens // self._pool.block_size
        self._choices[seq.sequence_id].num_cached_tokens = min(seq.num_cached_tokens, seq.num_prompt_tokens)
        self._fetches.fetch(seq.sequence_id, inbound.take_pulls(time.monotonic()))
        self._release_if_whole(inbound)
        return True

    def _complete(self, inbound: Inbound) -> None:
        token = inbound.first_token
        if token is not None and token.finish_reason is not None and not inbound.releasing:
            self._finished_at_prefill(inbound.seq, token)
        else:
            self._release_if_whole(inbound)

    def _release_if_whole(self, inbound: Inbound) -> None:
        if inbound.is_whole and not inbound.releasing:
            inbound.releasing = True
            self._fetches.release(inbound.seq.sequence_id)

    def _finished_at_prefill(self, seq: Sequence, token: messages.FirstToken) -> None:
        """The first token was the last: there is nothing to pull, only to say."""
        choice = self._choices[seq.sequence_id]
        finish = FinishReason(str(token.finish_reason))
        self._publish_first(choice, token, finish)
        seq.output_token_ids.append(token.token_id)
        self._fetches.release(seq.sequence_id)
        INBOUND.labels("finished_at_prefill").inc()
        self._leave(seq.sequence_id, choice.decoded(finish, time.monotonic()))

    def _released(self, choice: Choice, inbound: Inbound, *, held: bool) -> None:
        seq, token = inbound.seq, inbound.first_token
        if not held or token is None:
            self._leave(seq.sequence_id, Failure("ABORTED", "the lease did not hold"))
            return
        INBOUND.labels("joined").inc()
        choice.runnable_s = time.monotonic()
        num_computed = seq.num_tokens
        seq.output_token_ids.append(token.token_id)
        self._publish_first(choice, token, None)
        self._scheduler.join(seq, num_computed)

    def _publish_first(self, choice: Choice, token: messages.FirstToken, finish: FinishReason | None) -> None:
        """Token 0, which prefill published before: from here on decode owns its replay."""
        sampled = SampledToken(token.token_id, token.logprob, token.top_logprobs)
        self._outlet.token(TokenEvent(choice.attempt, choice.seq.num_forced_tokens, sampled, finish))

    # Running and leaving

    def _cancelled(self, message: CancelAttempt) -> None:
        choice = self._choices.get(message.handoff_id)
        if choice is None or not message.by_gateway:
            self._leave(message.handoff_id, Failure(message.code, message.reason))
        else:
            self._leave(message.handoff_id, choice.decoded(FinishReason.CANCELLED, time.monotonic()))

    def _output(self, output: SequenceOutput, now: float) -> None:
        choice = self._choices.get(output.seq.sequence_id)
        if choice is None:
            return
        self._outlet.token(TokenEvent(choice.attempt, output.index, output.token, output.finish_reason))
        if output.token is not None:
            self._note_time(choice, now)
        if output.finish_reason is not None:
            self._leave(output.seq.sequence_id, choice.decoded(output.finish_reason, now))

    def _note_time(self, choice: Choice, now: float) -> None:
        seq = choice.seq
        choice.num_new += 1
        if choice.inbound is None and choice.num_new == 1:
            choice.runnable_s = now
            choice.num_cached_tokens = min(seq.num_cached_tokens, seq.num_prompt_tokens)
        elif choice.first_made_s is None:
            choice.first_made_s = now

    def _leave(self, handoff_id: str, outcome: object) -> None:
        """The one way out, from any state, any number of times."""
        choice = self._choices.pop(handoff_id, None)
        if choice is None:
            return
        self._waiting_room.pop(handoff_id, None)
        cancelled = _is_cancelled(outcome)
        if cancelled:
            gauges.CANCELLED.labels(choice.stage).inc()
        if choice.inbound is not None:
            writable = self._fetches.cancel(handoff_id)  # does nothing where the handoff ended well
            if writable:
                QUARANTINED.inc(len(writable))
                self._pool.quarantine(writable)
                self._quarantined.update(writable)
            if choice.runnable_s is None and (cancelled or isinstance(outcome, Failure)):
                INBOUND.labels(outcome.code.lower() if isinstance(outcome, Failure) else "cancelled").inc()
        self._scheduler.release(handoff_id)
        if isinstance(outcome, Failure) and not cancelled:
            self._outlet.token(
                TokenEvent(choice.attempt, choice.seq.num_output_tokens, None, FinishReason.ERROR, outcome.reason)
            )
        self._outlet.end(handoff_id, outcome, cancelled=cancelled)

    def _end_quarantine(self, block_ids: tuple[int, ...]) -> None:
        self._pool.unquarantine(block_ids)
        self._quarantined.subtract(block_ids)
        self._quarantined = +self._quarantined


def _is_cancelled(outcome: object) -> bool:
    """Whether a choice was given up, with or without an account of it."""
    if isinstance(outcome, Failure):
        return outcome.code == "CANCELLED"
    return isinstance(outcome, Decoded) and outcome.finish is FinishReason.CANCELLED


def _is_mismatch(reason: str) -> bool:
    """Whether a handoff failed because the two workers can never exchange blocks."""
    return "failed_precondition" in reason or " here, " in reason
