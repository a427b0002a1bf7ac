"""Protobuf to the gateway's plain data and back. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from services.gateway.membership import Load, Role, WorkerInfo, WorkerKey
from services.gateway.request import Finish, GenerationRequest, Token
from services.gateway.stream import TokenBatch, TokenEvent
from services.wire.pb import common_pb2, directory_pb2, heartbeat_pb2, token_events_pb2

_FINISH: Mapping[int, Finish] = {
    common_pb2.FINISH_REASON_STOP: Finish.STOP,
    common_pb2.FINISH_REASON_LENGTH: Finish.LENGTH,
    common_pb2.FINISH_REASON_CANCELLED: Finish.CANCELLED,
    common_pb2.FINISH_REASON_ERROR: Finish.ERROR,
}
_ROLE: Mapping[int, Role] = {
    directory_pb2.WORKER_ROLE_PREFILL: Role.PREFILL,
    directory_pb2.WORKER_ROLE_DECODE: Role.DECODE,
}


@dataclass(frozen=True, slots=True)
class AttemptRef:
    """Which attempt of which request."""

    request_id: str
    number: int
    handoff_id: str


def parse_heartbeat(payload: bytes) -> WorkerInfo | None:
    """A heartbeat from the bus; None where it is not one."""
    try:
        beat = heartbeat_pb2.Heartbeat.FromString(payload)
    except DecodeError:
        return None
    role = _ROLE.get(beat.role)
    key = WorkerKey(beat.peer.process.worker_id, beat.peer.process.epoch)
    if role is None or not all(key) or not beat.peer.address:
        return None
    load = beat.load
    return WorkerInfo(
        key=key,
        role=role,
        address=beat.peer.address,
        model=beat.model,
        weights_fingerprint=beat.weights_fingerprint,
        tokenizer_fingerprint=beat.tokenizer_fingerprint,
        layout_fingerprint=beat.layout_fingerprint,
        draining=beat.draining,
        leaving=beat.leaving,
        max_model_len=beat.max_model_len,
        load=Load(
            num_waiting=load.num_waiting,
            num_running=load.num_running,
            num_receiving=load.num_receiving,
            backlog_tokens=load.backlog_tokens,
            tokens_per_s=load.tokens_per_s,
            step_s=load.step_s,
            num_blocks=load.num_blocks,
            num_free_blocks=load.num_free_blocks,
        ),
        runnable=beat.progress.runnable,
        since_last_step_s=beat.progress.since_last_step_s,
    )


def parse_token_batch(payload: bytes) -> TokenBatch | None:
    """A token message from the bus; None where it is not one."""
    try:
        batch = token_events_pb2.TokenBatch.FromString(payload)
    except DecodeError:
        return None
    events = [
        TokenEvent(
            event.attempt.handoff_id,
            event.choice,
            event.first_index,
            [token(each) for each in event.tokens],
            finish(event.finish_reason),
            event.error,
        )
        for event in batch.events
    ]
    return TokenBatch(WorkerKey(batch.worker.worker_id, batch.worker.epoch), events)


def token(one: common_pb2.Token) -> Token:
    """A sampled token."""
    if not one.top_logprobs:
        return Token(one.token_id, one.logprob)
    return Token(one.token_id, one.logprob, tuple((top.token_id, top.logprob) for top in one.top_logprobs))


def attempt_id(ref: AttemptRef) -> common_pb2.AttemptId:
    """Which attempt, on the wire."""
    return common_pb2.AttemptId(request_id=ref.request_id, attempt=ref.number, handoff_id=ref.handoff_id)


def peer(info: WorkerInfo) -> common_pb2.Peer:
    """A worker that another may call, on the wire."""
    process = common_pb2.ProcessId(worker_id=info.key.worker_id, epoch=info.key.epoch)
    return common_pb2.Peer(process=process, address=info.address)


def finish(reason: int) -> Finish | None:
    """The wire's finish reason; None where the choice has not ended."""
    return _FINISH.get(reason)


def work(
    ref: AttemptRef,
    gateway: common_pb2.ProcessId,
    request: GenerationRequest,
    forced: Sequence[int],
    time_left_s: float,
) -> common_pb2.Work:
    """What both workers are told of an attempt."""
    sampling, service = request.sampling, request.service
    return common_pb2.Work(
        attempt=attempt_id(ref),
        gateway=gateway,
        tenant=service.tenant,
        priority_class=common_pb2.PriorityClass.ValueType(service.priority.value),
        time_left_s=time_left_s,
        ttft_target_s=service.ttft_target_s,
        itl_target_s=service.itl_target_s,
        num_choices=1,
        prompt_token_ids=request.prompt_token_ids,
        forced_token_ids=forced,
        sampling=common_pb2.SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            stop_token_ids=sampling.stop_token_ids,
            ignore_eos=sampling.ignore_eos,
            logprobs=sampling.logprobs,
            num_top_logprobs=sampling.num_top_logprobs,
        ),
        cache_salt=service.cache_salt,
        traceparent=service.traceparent,
    )
