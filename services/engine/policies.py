"""The scheduler's choices as small pure functions: who goes first, what must be free, who gives way."""

from collections.abc import Iterable
from enum import StrEnum

from services.engine.sequence import Sequence


class Admission(StrEnum):
    """What an admitted sequence takes at once."""

    OPTIMISTIC = "optimistic"  # blocks for the tokens it has; more as it grows; may be preempted
    WORST_CASE = "worst_case"  # blocks for all tokens it may ever have; is never preempted


def rank(seq: Sequence) -> tuple[int, float, int]:
    """Sort key: the lower one goes first. By class, then first come first served."""
    return seq.priority, seq.arrival_s, seq.order


def most_tokens(seq: Sequence, max_model_len: int) -> int:
    """The most tokens the sequence can come to have here."""
    if seq.leaves_after_first_token:
        return seq.num_tokens
    return max(seq.num_tokens, min(seq.num_prompt_tokens + seq.params.max_tokens, max_model_len))


def is_protected(seq: Sequence, max_preemptions: int) -> bool:
    """Whether it was preempted so often that it may not be again."""
    return seq.num_preemptions >= max_preemptions


def tokens_to_admit(seq: Sequence, admission: Admission, max_preemptions: int, max_model_len: int) -> int:
    """How many tokens must have blocks for the sequence to be admitted.

    A protected sequence is admitted as in the worst case, whatever the policy: then it never wants a block while it
    runs, so that nobody ever waits for one that only a protected sequence could give.
    """
    if admission == Admission.WORST_CASE or is_protected(seq, max_preemptions):
        return most_tokens(seq, max_model_len)
    return seq.num_tokens


def victim(running: Iterable[Sequence], max_preemptions: int) -> Sequence | None:
    """Who gives its blocks back: of the lowest class the latest to arrive; None if all are protected."""
    candidates = (seq for seq in running if not is_protected(seq, max_preemptions))
    return max(candidates, key=rank, default=None)
