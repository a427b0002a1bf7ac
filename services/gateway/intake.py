"""From a checked body to requests that workers can be given: sampling, service, token ids, and proof that they fit."""

from __future__ import annotations

import hashlib
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from services.gateway.errors import BadRequestError
from services.gateway.formats import ChatFormat, Format, TextFormat
from services.gateway.request import Priority, Sampling, Service
from services.gateway.schema import ChatBody, CompletionBody, GenerationBody
from services.gateway.tokenizer import Tokenizer

DEFAULT_TEXT_TOKENS = 16  # OpenAI's default for /v1/completions
TENANT_HEX_DIGITS = 16
OBJECTIVE_HEADERS = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
TTFT_HEADER = "x-llm-d-slo-ttft-ms"
TPOT_HEADER = "x-llm-d-slo-tpot-ms"
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

Prompt = str | Sequence[int] | Sequence[dict[str, str]]  # text, token ids, or a chat's messages


@dataclass(frozen=True, slots=True)
class Limits:
    """What the pools can hold; 0 where nobody has said."""

    context_tokens: int  # of one sequence
    pool_tokens: int  # KV slots of the largest decode worker
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Ask:
    """What a client asked for, with nothing left to interpret. `sampling.max_tokens` is 0 where it named none."""

    field: str  # that holds the prompts
    prompts: Sequence[Prompt]
    sampling: Sampling
    default_max_tokens: int | None  # None: whatever fits
    max_tokens_field: str
    stops: Sequence[str]
    stream: bool
    include_usage: bool
    return_token_ids: bool
    form: Format


def of_chat(body: ChatBody, tokenizer: Tokenizer) -> Ask:
    """A chat request."""
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequestError("top_logprobs needs logprobs to be true", param="top_logprobs", code="invalid_value")
    roles = {"developer": "system"}
    messages = [
        {"role": roles.get(message.role, message.role), "content": message.content} for message in body.messages
    ]
    newer = body.max_completion_tokens is not None
    max_tokens = body.max_completion_tokens if newer else body.max_tokens
    logprobs = bool(body.logprobs)
    return Ask(
        field="messages",
        prompts=[messages],
        sampling=_sampling(body, max_tokens, logprobs, body.top_logprobs or 0),
        default_max_tokens=None,
        max_tokens_field="max_completion_tokens" if newer else "max_tokens",
        stops=body.stop or (),
        stream=_streams(body),
        include_usage=_includes_usage(body),
        return_token_ids=bool(body.return_token_ids),
        form=ChatFormat(tokenizer, logprobs),
    )


def of_text(body: CompletionBody, tokenizer: Tokenizer) -> Ask:
    """A text request."""
    return Ask(
        field="prompt",
        prompts=body.prompt,
        sampling=_sampling(body, body.max_tokens, body.logprobs is not None, body.logprobs or 0),
        default_max_tokens=DEFAULT_TEXT_TOKENS,
        max_tokens_field="max_tokens",
        stops=body.stop or (),
        stream=_streams(body),
        include_usage=_includes_usage(body),
        return_token_ids=bool(body.return_token_ids),
        form=TextFormat(tokenizer, body.logprobs),
    )


def service_of(headers: Mapping[str, str], priority: int | None) -> Service:
    """For whom and how urgently. The tenant is a hash of the key; cached prefixes are kept apart by another.

    `priority` is vLLM's: lower is more urgent, 0 the default. Raises BadRequestError for a target that is no number.
    """
    scheme, _, key = headers.get("authorization", "").partition(" ")
    key = key.strip() if scheme.lower() == "bearer" else ""
    objective = next((headers[name].strip().upper() for name in OBJECTIVE_HEADERS if name in headers), "")
    by_number = Priority.INTERACTIVE if not priority else Priority.REALTIME if priority < 0 else Priority.BATCH
    traceparent = headers.get("traceparent", "")
    return Service(
        tenant=hashlib.sha256(b"tenant\0" + key.encode()).hexdigest()[:TENANT_HEX_DIGITS] if key else "default",
        priority=Priority[objective] if objective in Priority.__members__ else by_number,
        ttft_target_s=_milliseconds(headers, TTFT_HEADER),
        itl_target_s=_milliseconds(headers, TPOT_HEADER),
        cache_salt=hashlib.sha256(b"salt\0" + key.encode()).digest()[:16] if key else b"",
        traceparent=traceparent if _TRACEPARENT.fullmatch(traceparent) else "",
    )


async def tokenise(ask: Ask, tokenizer: Tokenizer, limits: Limits) -> list[tuple[int, ...]]:
    """The token ids of every prompt. Raises BadRequestError where one is empty, unknown or hopelessly long."""
    found = []
    for prompt in ask.prompts:
        if isinstance(prompt, str):
            _check_length(ask, tokenizer.least_tokens(prompt), limits, "at least ")
            ids = await tokenizer.encode(prompt, add_special_tokens=True) if prompt else ()
        elif ask.field == "messages":
            text = await tokenizer.render([message for message in prompt if isinstance(message, dict)])
            _check_length(ask, tokenizer.least_tokens(text), limits, "at least ")
            ids = await tokenizer.encode(text, add_special_tokens=False)
        else:
            ids = tuple(token for token in prompt if isinstance(token, int))
            if ids and max(ids) >= limits.vocab_size:
                raise BadRequestError(f"token ids must be below {limits.vocab_size}", param=ask.field)
        if not ids:
            raise BadRequestError(f"{ask.field} must not be empty", param=ask.field, code="invalid_value")
        _check_length(ask, len(ids), limits, "")
        found.append(ids)
    return found


def fitted(ask: Ask, num_prompt_tokens: int, limits: Limits) -> Sampling:
    """One prompt's sampling, `max_tokens` settled. Raises BadRequestError where prompt and output can never fit."""
    sampling = ask.sampling
    room = limits.context_tokens - num_prompt_tokens
    in_pool = limits.pool_tokens - num_prompt_tokens if limits.pool_tokens else room
    max_tokens = sampling.max_tokens
    if not max_tokens:
        max_tokens = max(1, min(room, in_pool, ask.default_max_tokens or room))
    for left, what, size in (
        (room, "the model's maximum context length", limits.context_tokens),
        (in_pool, "the largest worker's KV pool", limits.pool_tokens),
    ):
        if max_tokens > left:
            raise BadRequestError(
                f"{what} is {size} tokens, but {num_prompt_tokens + max_tokens} were requested"
                f" ({num_prompt_tokens} in the prompt, {max_tokens} for the output)",
                param=ask.max_tokens_field,
                code="context_length_exceeded",
            )
    if sampling.min_tokens > max_tokens:
        raise BadRequestError(f"min_tokens must not be above {max_tokens}", param="min_tokens", code="invalid_value")
    return replace(sampling, max_tokens=max_tokens)


def _check_length(ask: Ask, num_tokens: int, limits: Limits, bound: str) -> None:
    """At least one token of output must fit, too."""
    for size, what in (
        (limits.context_tokens, "the model's maximum context length"),
        (limits.pool_tokens, "the largest worker's KV pool"),
    ):
        if size and num_tokens >= size:
            raise BadRequestError(
                f"{what} is {size} tokens, but the prompt has {bound}{num_tokens}",
                param=ask.field,
                code="context_length_exceeded",
            )


def _sampling(body: GenerationBody, max_tokens: int | None, logprobs: bool, num_top_logprobs: int) -> Sampling:
    seed = secrets.randbits(64) if body.seed is None else body.seed % 2**64
    return Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=max(0, body.top_k or 0),
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        seed=seed,
        max_tokens=max_tokens or 0,
        min_tokens=body.min_tokens or 0,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        num_top_logprobs=num_top_logprobs,
    )


def _streams(body: GenerationBody) -> bool:
    if body.stream_options is not None and not body.stream:
        raise BadRequestError("stream_options needs stream to be true", param="stream_options", code="invalid_value")
    return bool(body.stream)


def _includes_usage(body: GenerationBody) -> bool:
    return bool(body.stream_options and body.stream_options.include_usage)


def _milliseconds(headers: Mapping[str, str], name: str) -> float:
    """A target in seconds; 0 where the header is absent."""
    text = headers.get(name)
    if text is None:
        return 0.0
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise BadRequestError(f"{name} must be a positive number of milliseconds", param=name, code="invalid_value")
    return value / 1000
