"""The gateway's door to the workers: gRPC calls out, heartbeats and token batches in. Protobuf stops here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from grpc import aio

from services.gateway import messages
from services.gateway.membership import Role, WorkerInfo, WorkerKey
from services.gateway.messages import AttemptRef
from services.gateway.request import Finish, GenerationRequest, Token
from services.gateway.stream import TokenEvent
from services.runtime.process import Identity
from services.wire import rpc
from services.wire.pb import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)

CANCEL_DEADLINE_S = 1.0

T = TypeVar("T")


class CallFailedError(Exception):
    """A worker answered with an error, or not at all."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code  # name of the gRPC status
        self.detail = detail


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """What a prefill worker measured; times in seconds."""

    num_cached_tokens: int
    queue_s: float
    prefill_s: float
    first_token: Token | None
    finish: Finish | None


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """What a decode worker measured; times in seconds."""

    finish: Finish | None
    num_output_tokens: int
    num_cached_tokens: int
    num_pulled_blocks: int
    num_pulled_bytes: int
    queue_s: float
    prefill_s: float
    transfer_s: float
    exposed_transfer_s: float
    first_decode_s: float
    decode_s: float
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class AttemptStatus:
    """What a worker says of an attempt when it is renewed."""

    known: bool
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Replayed:
    """A worker's answer to a replay: an event with what it has, or `known` is False."""

    known: bool
    event: TokenEvent


class WorkerLink:
    """One channel to one life of a worker."""

    def __init__(self, info: WorkerInfo, gateway: Identity) -> None:
        self.key = info.key
        self.role = info.role
        self._gateway = common_pb2.ProcessId(worker_id=gateway.worker_id, epoch=gateway.epoch)
        self._channel = rpc.channel(info.address)
        self._prefill = prefill_pb2_grpc.PrefillServiceStub(self._channel)
        self._decode = decode_pb2_grpc.DecodeServiceStub(self._channel)
        self._open_prefill: aio.UnaryStreamMultiCallable[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse] = (
            self._channel.unary_stream(  # see rpc.until_answered
                "/pdserve.v1.PrefillService/Prefill",
                request_serializer=prefill_pb2.PrefillRequest.SerializeToString,
                response_deserializer=prefill_pb2.PrefillResponse.FromString,
            )
        )
        self._open_decode: aio.UnaryStreamMultiCallable[decode_pb2.DecodeRequest, decode_pb2.DecodeResponse] = (
            self._channel.unary_stream(
                "/pdserve.v1.DecodeService/Decode",
                request_serializer=decode_pb2.DecodeRequest.SerializeToString,
                response_deserializer=decode_pb2.DecodeResponse.FromString,
            )
        )

    async def prefill(
        self,
        ref: AttemptRef,
        request: GenerationRequest,
        forced: Sequence[int],
        decode: WorkerInfo,
        time_left_s: float,
        on_received: Callable[[], None],
    ) -> PrefillResult:
        """Computes the prompt there; returns when token 0 is sampled. Raises CallFailedError.

        `on_received` is called when the worker says that it has the request.
        """
        message = prefill_pb2.PrefillRequest(
            work=messages.work(ref, self._gateway, request, forced, time_left_s), decode=messages.peer(decode)
        )
        call = self._open_prefill(message, timeout=time_left_s)
        answer: prefill_pb2.PrefillResponse = await _call(rpc.until_answered(call, on_received))
        return PrefillResult(
            num_cached_tokens=answer.num_cached_tokens,
            queue_s=answer.queue_s,
            prefill_s=answer.prefill_s,
            first_token=messages.token(answer.first_token) if answer.HasField("first_token") else None,
            finish=messages.finish(answer.finish_reason),
        )

    async def decode(
        self,
        ref: AttemptRef,
        request: GenerationRequest,
        forced: Sequence[int],
        prefill: WorkerInfo | None,
        time_left_s: float,
        on_received: Callable[[], None],
    ) -> DecodeResult:
        """Generates there, to the end; without `prefill` it computes the prompt too. Raises CallFailedError.

        `on_received` is called when the worker says that it has the request.
        """
        message = decode_pb2.DecodeRequest(work=messages.work(ref, self._gateway, request, forced, time_left_s))
        if prefill is not None:
            message.prefill.CopyFrom(messages.peer(prefill))
        call = self._open_decode(message, timeout=time_left_s)
        answer: decode_pb2.DecodeResponse = await _call(rpc.until_answered(call, on_received))
        return DecodeResult(
            finish=messages.finish(answer.finish_reason),
            num_output_tokens=answer.num_output_tokens,
            num_cached_tokens=answer.num_cached_tokens,
            num_pulled_blocks=answer.num_pulled_blocks,
            num_pulled_bytes=answer.num_pulled_bytes,
            queue_s=answer.queue_s,
            prefill_s=answer.prefill_s,
            transfer_s=answer.transfer_s,
            exposed_transfer_s=answer.exposed_transfer_s,
            first_decode_s=answer.first_decode_s,
            decode_s=answer.decode_s,
            num_preemptions=answer.num_preemptions,
        )

    async def cancel(self, ref: AttemptRef, reason: str) -> None:
        """Ends an attempt there. Raises CallFailedError; a cancel that is lost is repaired by renewals that cease."""
        message = common_pb2.CancelRequest(attempt=messages.attempt_id(ref), reason=reason)
        await _call(self._stub().Cancel(message, timeout=CANCEL_DEADLINE_S))

    async def renew(
        self, refs: Iterable[AttemptRef], acknowledged: Sequence[str], deadline_s: float
    ) -> tuple[WorkerKey, dict[str, AttemptStatus]]:
        """Keeps attempts alive; returns who answered and its word on each, by handoff id. Raises CallFailedError."""
        message = common_pb2.RenewRequest(
            gateway=self._gateway,
            attempts=[messages.attempt_id(ref) for ref in refs],
            acknowledged_handoff_ids=acknowledged,
        )
        answer = await _call(self._stub().Renew(message, timeout=deadline_s))
        statuses = {status.handoff_id: AttemptStatus(status.known, status.num_tokens) for status in answer.attempts}
        return WorkerKey(answer.worker.worker_id, answer.worker.epoch), statuses

    async def replay(self, wanted: Mapping[str, int], deadline_s: float) -> list[Replayed]:
        """Asks a decode worker for tokens from an index on, by handoff id. Raises CallFailedError."""
        message = decode_pb2.ReplayRequest(gateway=self._gateway)
        for handoff_id, index in wanted.items():
            message.__getattribute__("from").add(handoff_id=handoff_id, index=index)
        answer = await _call(self._decode.Replay(message, timeout=deadline_s))
        return [
            Replayed(
                replayed.known,
                TokenEvent(
                    replayed.handoff_id,
                    replayed.choice,
                    replayed.first_index,
                    [messages.token(token) for token in replayed.tokens],
                    messages.finish(replayed.finish_reason),
                ),
            )
            for replayed in answer.replayed
        ]

    async def close(self) -> None:
        """Ends the channel and every call on it."""
        await self._channel.close()

    def _stub(self) -> Any:
        return self._prefill if self.role is Role.PREFILL else self._decode


async def who_is_at(info: WorkerInfo, gateway: Identity, deadline_s: float) -> WorkerKey | None:
    """Which process lives at a worker's address: an empty renewal tells. None: nobody, or it answers nothing."""
    link = WorkerLink(info, gateway)
    try:
        async with asyncio.timeout(deadline_s + 0.5):
            return (await link.renew((), (), deadline_s))[0]
    except (CallFailedError, TimeoutError):
        return None
    finally:
        await link.close()


async def _call(call: Awaitable[T]) -> T:
    try:
        return await call
    except grpc.RpcError as error:
        code = getattr(error, "code", lambda: None)()
        detail = getattr(error, "details", lambda: "")() or ""
        raise CallFailedError(code.name if code is not None else "UNKNOWN", detail) from None
