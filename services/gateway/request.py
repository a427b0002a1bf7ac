"""What the gateway's parts say to one another about a request. Plain data; no text, no protobuf."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple


class Finish(StrEnum):
    """Why a choice ended, in the words of the wire."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class Priority(IntEnum):
    """The three classes, urgent first."""

    REALTIME = 1
    INTERACTIVE = 2
    BATCH = 3


class Token(NamedTuple):
    """One sampled token; the log-probabilities are meaningful where the request asked for them."""

    token_id: int
    logprob: float = 0.0
    top_logprobs: tuple[tuple[int, float], ...] = ()  # (token id, logprob), likeliest first


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn and when a worker ends the choice. `seed` is always set."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    logprobs: bool
    num_top_logprobs: int


@dataclass(frozen=True, slots=True)
class Service:
    """For whom and how urgently: what headers, key and body say about the treatment of a request."""

    tenant: str
    priority: Priority
    ttft_target_s: float  # 0: none
    itl_target_s: float  # 0: none
    cache_salt: bytes
    traceparent: str


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to be continued."""

    request_id: str  # random, made here
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    service: Service
    deadline_s: float  # on the event loop's clock
