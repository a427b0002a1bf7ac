"""A choice on a decode worker: how far it is, when it got there, and the account of it that its gateway is given."""

from __future__ import annotations

from dataclasses import dataclass

from services.decode.inbound import Inbound
from services.engine.sequence import FinishReason, Sequence, SequenceState
from services.worker.intake import Attempt


@dataclass(frozen=True, slots=True)
class Decoded:
    """How a choice ended; times in seconds, as in `DecodeResponse`. What a cancel cut short counts up to there."""

    finish: FinishReason | None
    num_output_tokens: int
    num_cached_tokens: int
    num_pulled_blocks: int
    num_pulled_bytes: int
    queue_s: float
    prefill_s: float
    transfer_s: float
    exposed_transfer_s: float
    first_decode_s: float
    decode_s: float
    num_preemptions: int


@dataclass(slots=True)
class Choice:
    """A choice as long as it lives. Times are of time.monotonic."""

    attempt: Attempt
    seq: Sequence
    inbound: Inbound | None
    num_cached_tokens: int = 0
    runnable_s: float | None = None  # disaggregated: joined; colocated: its first token was sampled
    first_made_s: float | None = None  # first token made by a decode step here
    num_new: int = 0

    @property
    def stage(self) -> str:
        """How far it is: decode, transfer (the prompt is computed, its KV not all here), or before that."""
        if self.runnable_s is not None:
            return "decode"
        if self.inbound is not None:
            return "transfer" if self.inbound.complete_s is not None else "handoff"
        return "queued" if self.seq.state is SequenceState.WAITING else "prefill"

    def decoded(self, finish: FinishReason, now: float) -> Decoded:
        """The account, were it to end now."""
        seq, inbound = self.seq, self.inbound
        runnable_s = self.runnable_s or now
        first_made_s = self.first_made_s or now
        scheduled_s = seq.first_scheduled_s or now
        return Decoded(
            finish=finish,
            num_output_tokens=seq.num_output_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_pulled_blocks=inbound.num_verified if inbound else 0,
            num_pulled_bytes=inbound.num_bytes if inbound else 0,
            queue_s=scheduled_s - seq.arrival_s if inbound is None else 0.0,
            prefill_s=runnable_s - scheduled_s if inbound is None else 0.0,
            transfer_s=inbound.transfer_s if inbound else 0.0,
            exposed_transfer_s=inbound.exposed_s(runnable_s) if inbound else 0.0,
            first_decode_s=first_made_s - runnable_s,
            decode_s=now - first_made_s,
            num_preemptions=seq.num_preemptions,
        )
