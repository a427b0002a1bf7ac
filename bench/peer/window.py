"""Tokens per second while all of a batch's streams generate, and neither a prompt nor an end disturbs them."""

from collections.abc import Sequence
from dataclasses import dataclass


class NotComparableError(RuntimeError):
    """What a server did cannot be set beside what the others did; the message says why."""


@dataclass(frozen=True, slots=True)
class Answer:
    """When each chunk with output came, in seconds on one clock, and how many tokens the answer has."""

    chunk_times_s: Sequence[float]
    num_tokens: int


def window(answers: Sequence[Answer]) -> tuple[float, float]:
    """From when the last stream got its first token until the first stream got its last one, in seconds."""
    return max(each.chunk_times_s[0] for each in answers), min(each.chunk_times_s[-1] for each in answers)


def whole(answers: Sequence[Answer], sent_s: float) -> float:
    """All tokens over the time from sending the first request to the last token of all: tokens/s, prompts included."""
    return sum(each.num_tokens for each in answers) / (max(each.chunk_times_s[-1] for each in answers) - sent_s)


def throughput(answers: Sequence[Answer]) -> float:
    """Tokens that came in the window (its beginning excluded, its end included), over its length: tokens/s.

    Where a server puts several tokens into a chunk, each chunk counts for its answer's tokens over its chunks. Raises
    NotComparableError where there is no time at which all streams generated.
    """
    begin_s, end_s = window(answers)
    if end_s <= begin_s:
        raise NotComparableError(f"of {len(answers)} streams, one ended before another had begun")
    num_tokens = 0.0
    for each in answers:
        weight = each.num_tokens / len(each.chunk_times_s)
        num_tokens += weight * sum(begin_s < at_s <= end_s for at_s in each.chunk_times_s)
    return num_tokens / (end_s - begin_s)
