"""What one step computes, and what comes out of it."""

from dataclasses import dataclass, field

from services.engine.sequence import FinishReason, Sequence


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    """Compute positions `[start, start + num_tokens)` of `seq`, and sample its next token if `sample`.

    Its block table covers those positions. Not frozen only because a frozen one costs five times as much to make.
    """

    seq: Sequence
    start: int  # = seq.num_computed_tokens
    num_tokens: int
    sample: bool  # the chunk reaches the end of the known tokens


@dataclass(slots=True, eq=False)
class Batch:
    """One step: `items[:num_decodes]` compute one output token each, the rest are prefill chunks."""

    items: list[ScheduledSequence] = field(default_factory=list)
    num_tokens: int = 0
    num_decodes: int = 0

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of the prefill chunks."""
        return self.num_tokens - self.num_decodes


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token and, where asked for, its log-probability and the most likely ones as (token id, log-probability)."""

    token_id: int
    logprob: float = 0.0
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class SequenceOutput:
    """What a step did to one sequence: a token at `index` of its output, an end, or both.

    `token` is None where the forced output was complete before any step; `index` is then the output's length.
    A sequence that left after its first token has a state of FINISHED and no finish_reason.
    """

    seq: Sequence
    token: SampledToken | None
    index: int
    finish_reason: FinishReason | None
