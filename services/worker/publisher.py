"""Token events to NATS: one message per step and gateway, split below the payload limit. On the event loop.

Both encoding and publishing happen on the event loop: a step waits for neither.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from services.engine.batch import SampledToken
from services.engine.sequence import FinishReason
from services.runtime.process import Identity
from services.wire.bus import MAX_PAYLOAD_BYTES
from services.wire.pb import common_pb2, token_events_pb2
from services.wire.subjects import token_subject
from services.worker.intake import Attempt, GatewayRef

FINISH_TO_PROTO = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: common_pb2.FINISH_REASON_CANCELLED,
    FinishReason.ERROR: common_pb2.FINISH_REASON_ERROR,
}


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """What one step did to one choice."""

    attempt: Attempt
    index: int
    token: SampledToken | None
    finish: FinishReason | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One NATS message."""

    subject: str
    payload: bytes


def token_to_proto(token: SampledToken) -> common_pb2.Token:
    """A token as it travels."""
    message = common_pb2.Token(token_id=token.token_id, logprob=token.logprob)
    for token_id, logprob in token.top_logprobs:
        message.top_logprobs.add(token_id=token_id, logprob=logprob)
    return message


def encode(identity: Identity, events: Iterable[TokenEvent], max_bytes: int = MAX_PAYLOAD_BYTES) -> list[Message]:
    """The step's events as messages: one per gateway, more only where one would exceed `max_bytes`."""
    worker = common_pb2.ProcessId(worker_id=identity.worker_id, epoch=identity.epoch)
    by_gateway: dict[GatewayRef, list[token_events_pb2.TokenEvent]] = {}
    for event in events:
        by_gateway.setdefault(event.attempt.gateway, []).append(_event_to_proto(event))
    messages = []
    for gateway, group in by_gateway.items():
        subject = token_subject(gateway.gateway_id, gateway.epoch)
        batch, size = token_events_pb2.TokenBatch(worker=worker), 0
        for each in group:
            each_size = each.ByteSize() + 8
            if batch.events and size + each_size > max_bytes - 512:
                messages.append(Message(subject, batch.SerializeToString()))
                batch, size = token_events_pb2.TokenBatch(worker=worker), 0
            batch.events.append(each)
            size += each_size
        messages.append(Message(subject, batch.SerializeToString()))
    return messages


def _event_to_proto(event: TokenEvent) -> token_events_pb2.TokenEvent:
    attempt = event.attempt
    message = token_events_pb2.TokenEvent(
        attempt=common_pb2.AttemptId(
            request_id=attempt.request_id, attempt=attempt.number, handoff_id=attempt.handoff_id
        ),
        first_index=event.index,
        finish_reason=FINISH_TO_PROTO[event.finish],
        error=event.error,
    )
    if event.token is not None:
        message.tokens.append(token_to_proto(event.token))
    return message
