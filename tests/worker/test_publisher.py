"""One message per step and gateway, split below the limit."""

from __future__ import annotations

from services.engine.batch import SampledToken
from services.engine.sequence import FinishReason
from services.runtime.process import Identity
from services.wire.pb import common_pb2, token_events_pb2
from services.wire.subjects import token_subject
from services.worker.intake import Attempt, GatewayRef
from services.worker.publisher import TokenEvent, encode

ME = Identity("decode-0", "life")


def event(number: int, gateway: str, top: int = 0) -> TokenEvent:
    attempt = Attempt(f"r{number}", 1, f"h{number}", GatewayRef(gateway, "e"))
    token = SampledToken(number, -0.5, tuple((i, -float(i)) for i in range(top)))
    return TokenEvent(attempt, number, token, FinishReason.STOP if number == 0 else None)


def test_one_message_per_gateway() -> None:
    messages = encode(ME, [event(0, "a"), event(1, "b"), event(2, "a")])
    assert [message.subject for message in messages] == [token_subject("a", "e"), token_subject("b", "e")]
    batch = token_events_pb2.TokenBatch.FromString(messages[0].payload)
    assert (batch.worker.worker_id, batch.worker.epoch) == ("decode-0", "life")
    assert [each.attempt.handoff_id for each in batch.events] == ["h0", "h2"]
    assert batch.events[0].finish_reason == common_pb2.FINISH_REASON_STOP
    assert (batch.events[1].first_index, batch.events[1].tokens[0].token_id) == (2, 2)


def test_split_below_the_limit_loses_nothing() -> None:
    events = [event(number, "a", top=20) for number in range(100)]
    messages = encode(ME, events, max_bytes=4096)
    assert len(messages) > 1
    assert all(len(message.payload) <= 4096 for message in messages)
    batches = [token_events_pb2.TokenBatch.FromString(message.payload) for message in messages]
    ids = [each.attempt.handoff_id for batch in batches for each in batch.events]
    assert ids == [f"h{number}" for number in range(100)]


def test_nothing_to_say_is_no_message() -> None:
    assert encode(ME, []) == []
