"""A sequence: the tokens of one attempt of a request, its block table, and how far its KV has been computed.

Life: WAITING -> RUNNING -> FINISHED, and on a decode worker WAITING -> RECEIVING (its KV is on the way) -> RUNNING.
A preempted sequence goes back from RUNNING to WAITING. FINISHED is reached once, from anywhere.
"""

from dataclasses import dataclass, field
from enum import Enum, IntEnum, StrEnum


class PriorityClass(IntEnum):
    """The lower the number, the sooner it is served."""

    REALTIME = 1
    INTERACTIVE = 2
    BATCH = 3


class FinishReason(StrEnum):
    """Why a sequence ended; the values are those of the HTTP API where it has them."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class SequenceState(Enum):
    """Where a sequence is in its life (see the module's docstring)."""

    WAITING = "waiting"  # holds no blocks
    RECEIVING = "receiving"  # holds blocks for all its tokens, a transfer fills them
    RUNNING = "running"  # holds blocks for all its known tokens
    FINISHED = "finished"  # holds no blocks


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How new tokens are chosen and when to stop. `max_tokens` and `min_tokens` count forced output too."""

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False  # silences eos_token_ids, not stop_token_ids
    logprobs: bool = False
    num_top_logprobs: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """One attempt of one choice. The upper fields are given, the lower ones belong to the engine thread.

    `block_ids[i]` holds the KV of positions `[i * block_size, (i + 1) * block_size)`; of these
    `[0, num_cached_tokens)` were reused and are never written here, `[0, num_computed_tokens)` are valid.
    The table may be longer than the tokens known so far (admission `worst_case`).
    """

    sequence_id: str  # the handoff id of the attempt
    prompt_token_ids: list[int]
    params: SamplingParams = SamplingParams()
    eos_token_ids: frozenset[int] = frozenset()
    output_token_ids: list[int] = field(default_factory=list)  # starts with the forced ones
    num_forced_tokens: int = 0  # of the output, emitted by earlier attempts
    priority: PriorityClass = PriorityClass.INTERACTIVE
    tenant: str = ""
    cache_salt: bytes = b""  # prefix reuse is isolated by it
    arrival_s: float = 0.0  # engine clock
    deadline_s: float | None = None  # engine clock; when the whole request must have ended
    ttft_target_s: float | None = None
    itl_target_s: float | None = None
    leaves_after_first_token: bool = False  # prefill worker: done once one new token is sampled

    state: SequenceState = SequenceState.WAITING
    block_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    first_scheduled_s: float | None = None  # engine clock
    finish_reason: FinishReason | None = None  # stays None for one that left after its first token
    order: int = 0  # of being added to the scheduler: breaks ties of arrival_s
    block_keys: list[bytes] = field(default_factory=list)  # chain keys of its full blocks, grown as needed
    num_indexed_blocks: int = 0  # block_ids[:this] were put into, or came from, the prefix index
    indexable: bool = True  # False once a block of it turned out corrupt

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt alone."""
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the output, forced ones included."""
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and output. The scheduler closes the gap between this and num_computed_tokens."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_decoding(self) -> bool:
        """Whether all that is left to compute is its newest output token."""
        gap = len(self.prompt_token_ids) + len(self.output_token_ids) - self.num_computed_tokens
        return gap == 1 and len(self.output_token_ids) > 0

    def token_ids(self, start: int, stop: int) -> list[int]:
        """The tokens at positions `[start, stop)` of prompt and output; costs O(stop - start)."""
        num_prompt = len(self.prompt_token_ids)
        if stop <= num_prompt:
            return self.prompt_token_ids[start:stop]
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : stop - num_prompt]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - num_prompt]

    def check_stop(self) -> FinishReason | None:
        """Whether the output as it stands is complete: its last token stops it, or max_tokens is reached.

        A stop token that is not later than min_tokens does not count. Only the last token is looked at, since
        every earlier one was looked at when it was the last.
        """
        output, params = self.output_token_ids, self.params
        if output and len(output) >= params.min_tokens:
            last = output[-1]
            if last in params.stop_token_ids or (last in self.eos_token_ids and not params.ignore_eos):
                return FinishReason.STOP
        return FinishReason.LENGTH if len(output) >= params.max_tokens else None
