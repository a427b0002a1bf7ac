"""A `Work` message to what the engine computes with. A refusal names the field."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from services.engine.sequence import PriorityClass, SamplingParams, Sequence
from services.wire.pb import common_pb2


class RefusedWorkError(ValueError):
    """The message asks for something that no worker could do; the text begins with the field's name."""


@dataclass(frozen=True, slots=True)
class GatewayRef:
    """One life of one gateway."""

    gateway_id: str
    epoch: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """Which attempt of which request a sequence is. A higher number fences the lower ones."""

    request_id: str
    number: int
    handoff_id: str
    gateway: GatewayRef


def read_attempt(work: common_pb2.Work) -> Attempt:
    """Who asks. Raises RefusedWorkError where an id is missing."""
    ids = work.attempt
    for field, value in (
        ("attempt.request_id", ids.request_id),
        ("attempt.handoff_id", ids.handoff_id),
        ("gateway.worker_id", work.gateway.worker_id),
        ("gateway.epoch", work.gateway.epoch),
    ):
        if not value or len(value) > 128:
            raise RefusedWorkError(f"{field}: 1 to 128 characters are required")
    return Attempt(ids.request_id, ids.attempt, ids.handoff_id, GatewayRef(work.gateway.worker_id, work.gateway.epoch))


def read_sequence(
    work: common_pb2.Work, eos_token_ids: frozenset[int], vocab_size: int, *, leaves_after_first_token: bool
) -> Sequence:
    """The sequence to compute; times start now (time.monotonic). Raises RefusedWorkError."""
    now = time.monotonic()
    prompt, forced = list(work.prompt_token_ids), list(work.forced_token_ids)
    if not prompt:
        raise RefusedWorkError("prompt_token_ids: a prompt has at least one token")
    if (worst := max(max(prompt), max(forced, default=0))) >= vocab_size:
        raise RefusedWorkError(f"prompt_token_ids: token id {worst} is outside the vocabulary of {vocab_size}")
    if work.num_choices > 1:
        raise RefusedWorkError("num_choices: one choice per attempt")
    time_left_s = _positive("time_left_s", work.time_left_s)
    return Sequence(
        sequence_id=work.attempt.handoff_id,
        prompt_token_ids=prompt,
        params=_read_sampling(work.sampling),
        eos_token_ids=eos_token_ids,
        output_token_ids=forced,
        num_forced_tokens=len(forced),
        priority=_read_priority(work.priority_class),
        tenant=work.tenant,
        cache_salt=work.cache_salt,
        arrival_s=now,
        deadline_s=now + time_left_s if time_left_s else None,
        ttft_target_s=_positive("ttft_target_s", work.ttft_target_s),
        itl_target_s=_positive("itl_target_s", work.itl_target_s),
        leaves_after_first_token=leaves_after_first_token,
    )


def _read_priority(value: int) -> PriorityClass:
    """Interactive where none is given, or one that only a newer gateway knows."""
    try:
        return PriorityClass(value)
    except ValueError:
        return PriorityClass.INTERACTIVE


def _read_sampling(sampling: common_pb2.SamplingParams) -> SamplingParams:
    for field, value, low, high in (
        ("temperature", sampling.temperature, 0.0, 100.0),
        ("top_p", sampling.top_p or 1.0, 0.0, 1.0),
        ("min_p", sampling.min_p, 0.0, 1.0),
    ):
        if not (math.isfinite(value) and low <= value <= high):
            raise RefusedWorkError(f"sampling.{field}: {value} is outside {low} to {high}")
    if sampling.max_tokens < 1:
        raise RefusedWorkError("sampling.max_tokens: at least 1")
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p or 1.0,
        min_p=sampling.min_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=frozenset(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
        num_top_logprobs=sampling.num_top_logprobs,
    )


def _positive(field: str, value: float) -> float | None:
    """None for 0: not given."""
    if not (math.isfinite(value) and value >= 0):
        raise RefusedWorkError(f"{field}: {value} is not a time")
    return value or None
