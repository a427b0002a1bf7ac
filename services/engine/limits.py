"""The limits of one scheduler, and what can never fit within them."""

from dataclasses import dataclass
from typing import Literal

from services.engine.policies import Admission, most_tokens
from services.engine.sequence import Sequence


class NeverFits(ValueError):  # noqa: N818 (says more than an Error at its end would)
    """The sequence could not run here even alone; `limit` is which limit, `needed` and `allowed` its two sides."""

    def __init__(self, limit: Literal["context_length", "pool"], needed: int, allowed: int) -> None:
        unit = "tokens" if limit == "context_length" else "blocks"
        super().__init__(f"{limit}: needs {needed} {unit}, at most {allowed} are possible")
        self.limit = limit
        self.needed = needed
        self.allowed = allowed


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one scheduler; shares are of the whole pool. Raises ValueError where nothing could ever run."""

    token_budget: int = 512  # most tokens of one step
    max_num_seqs: int = 64  # most sequences holding blocks, the receiving ones included
    max_model_len: int = 2048  # most tokens of a sequence, prompt and output
    watermark: float = 0.01  # share that an admission leaves available while others run, for them to grow into
    admission: Admission = Admission.OPTIMISTIC
    max_preemptions: int = 4  # of one sequence; then it is protected
    max_inbound_share: float = 0.5  # most that receiving sequences may have allocated (a lone one may exceed it)
    max_leased_share: float = 1.0  # no new arrival is admitted while more than this is leased

    def __post_init__(self) -> None:
        if min(self.token_budget, self.max_num_seqs) < 1 or self.max_model_len < 2:
            raise ValueError(f"token_budget and max_num_seqs start at 1, max_model_len at 2: {self}")


def check_fits(seq: Sequence, config: SchedulerConfig, num_blocks: int, block_size: int) -> None:
    """Raise NeverFits unless the sequence could run alone in a pool of num_blocks, leaving room for a token.

    Raises ValueError for an empty prompt.
    """
    if not seq.prompt_token_ids:
        raise ValueError("a prompt has at least one token")
    if seq.num_prompt_tokens >= config.max_model_len:
        raise NeverFits("context_length", seq.num_prompt_tokens + 1, config.max_model_len)
    needed = -(-most_tokens(seq, config.max_model_len) // block_size)
    if needed > num_blocks:
        raise NeverFits("pool", needed, num_blocks)
