"""Which prefill and which decode worker take a request: a pure function of a snapshot.

Decode is chosen first, by room and by how many sequences it has; then, among the prefill workers that hold the same
model in the same layout, the one with the fewest queued seconds. Without such a prefill worker decode computes the
prompt itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from services.gateway.membership import WorkerInfo, WorkerKey

SICK_AFTER_S = 30.0  # runnable work without a step for longer than this, or than SICK_STEPS steps, is sickness
SICK_STEPS = 20
UNMEASURED_TOKENS_PER_S = 1000.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker as it said it is, and what this gateway has given it since."""

    info: WorkerInfo
    num_attempts: int = 0  # of this gateway, live
    prompt_tokens: int = 0  # of these, not prefilled yet

    @property
    def queue_s(self) -> float:
        """Seconds until a new prompt's turn. Heartbeats lag, so our own count is a lower bound of the backlog."""
        backlog = max(self.info.load.backlog_tokens, self.prompt_tokens)
        return backlog / (self.info.load.tokens_per_s or UNMEASURED_TOKENS_PER_S)

    @property
    def num_sequences(self) -> int:
        """Sequences that share the worker's steps."""
        load = self.info.load
        return max(load.num_running + load.num_receiving + load.num_waiting, self.num_attempts)


@dataclass(frozen=True, slots=True)
class Need:
    """What a request asks of a worker."""

    num_prompt_tokens: int
    num_tokens: int  # prompt and output at most
    block_size: int
    weights_fingerprint: str = ""  # set on a retry: resume only onto the same model


@dataclass(frozen=True, slots=True)
class Route:
    """Where an attempt goes. `fallback` says why there is no prefill worker."""

    prefill: WorkerInfo | None
    decode: WorkerInfo
    fallback: str | None = None


def pick(
    prefills: Sequence[Candidate],
    decodes: Sequence[Candidate],
    need: Need,
    avoid: Collection[WorkerKey] = (),
    exclude: Collection[WorkerKey] = (),
    turn: int = 0,
) -> Route | None:
    """The best pair, or None where no decode worker can take the request now.

    Workers in `avoid` failed this request before: they are the last resort. Prefill workers in `exclude` are out.
    `turn` breaks ties, so that equal workers take turns.
    """
    able = [c for c in _rotated(decodes, turn) if _takes_work(c.info) and _can_decode(c.info, need)]
    able.sort(key=lambda c: (c.info.key in avoid, not _has_room(c, need), c.num_sequences, -_free_tokens(c, need)))
    if not able:
        return None
    alive = [c for c in _rotated(prefills, turn) if _takes_work(c.info)]
    fresh = [c for c in alive if c.info.key not in exclude]
    fitting = [c for c in fresh if _can_prefill(c.info, need)]
    fitting.sort(key=lambda c: (c.info.key in avoid, c.queue_s, c.num_sequences))
    for decode in able:
        if decode.info.key in avoid and decode is not able[0]:
            break  # a tried decode worker only for want of others, not for the sake of a prefill worker
        for prefill in fitting:
            if same_model(prefill.info, decode.info):
                return Route(prefill.info, decode.info)
    if not alive:
        reason = "no_prefill"
    elif not fresh:
        reason = "prefill_failed"
    else:
        reason = "mismatch" if fitting else "too_long"
    return Route(None, able[0].info, reason)


def same_model(one: WorkerInfo, other: WorkerInfo) -> bool:
    """Whether KV of one means the same on the other: weights, tokenizer and layout."""
    return (
        one.weights_fingerprint == other.weights_fingerprint
        and one.tokenizer_fingerprint == other.tokenizer_fingerprint
        and one.layout_fingerprint == other.layout_fingerprint
    )


def _takes_work(info: WorkerInfo) -> bool:
    sick = info.runnable and info.since_last_step_s > max(SICK_AFTER_S, SICK_STEPS * info.load.step_s)
    return not (info.draining or info.leaving or sick)


def _can_decode(info: WorkerInfo, need: Need) -> bool:
    same = not need.weights_fingerprint or info.weights_fingerprint == need.weights_fingerprint
    return same and _holds(info, need.num_tokens, need.block_size)


def _can_prefill(info: WorkerInfo, need: Need) -> bool:
    return _holds(info, need.num_prompt_tokens, need.block_size)


def _holds(info: WorkerInfo, num_tokens: int, block_size: int) -> bool:
    """Whether so many tokens fit into an empty worker; what a worker did not say does not count against it."""
    fits_context = not info.max_model_len or num_tokens <= info.max_model_len
    return fits_context and (not info.load.num_blocks or num_tokens <= info.load.num_blocks * block_size)


def _free_tokens(candidate: Candidate, need: Need) -> int:
    return candidate.info.load.num_free_blocks * need.block_size


def _has_room(candidate: Candidate, need: Need) -> bool:
    """Whether the prompt fits right now."""
    return not candidate.info.load.num_blocks or _free_tokens(candidate, need) > need.num_prompt_tokens


def _rotated(candidates: Sequence[Candidate], turn: int) -> list[Candidate]:
    start = turn % len(candidates) if candidates else 0
    return [*candidates[start:], *candidates[:start]]
