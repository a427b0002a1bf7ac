"""The decode worker's gRPC service: protobuf in, protobuf out, nothing else."""

from __future__ import annotations

from typing import Any, TypeAlias, cast

from grpc import aio

from services.decode.choice import Decoded
from services.decode.worker import Arrive
from services.kvtransfer.transport import PeerRef
from services.wire.pb import common_pb2, decode_pb2, decode_pb2_grpc
from services.wire.rpc import RpcServer
from services.worker.desk import refuse
from services.worker.intake import GatewayRef, RefusedWorkError, read_attempt, read_sequence
from services.worker.main import Parts
from services.worker.publisher import FINISH_TO_PROTO, token_to_proto

Context: TypeAlias = "aio.ServicerContext[Any, Any]"


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """Calls wait at the desk."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def Decode(  # noqa: N802
        self, request: decode_pb2.DecodeRequest, context: Context
    ) -> decode_pb2.DecodeResponse:
        """Generates a choice to its end."""
        assembly = self._parts.assembly
        try:
            attempt = read_attempt(request.work)
            seq = read_sequence(
                request.work, assembly.eos_token_ids, assembly.vocab_size, leaves_after_first_token=False
            )
            holder = _read_holder(request)
        except RefusedWorkError as error:
            await refuse(context, error)
            raise
        done = cast("Decoded", await self._parts.desk.serve(attempt, seq, Arrive(attempt, seq, holder), context))
        identity = self._parts.process.identity
        return decode_pb2.DecodeResponse(
            worker=common_pb2.ProcessId(worker_id=identity.worker_id, epoch=identity.epoch),
            finish_reason=FINISH_TO_PROTO[done.finish],
            num_output_tokens=done.num_output_tokens,
            num_cached_tokens=done.num_cached_tokens,
            num_pulled_blocks=done.num_pulled_blocks,
            num_pulled_bytes=done.num_pulled_bytes,
            queue_s=done.queue_s,
            prefill_s=done.prefill_s,
            transfer_s=done.transfer_s,
            exposed_transfer_s=done.exposed_transfer_s,
            first_decode_s=done.first_decode_s,
            decode_s=done.decode_s,
            num_preemptions=done.num_preemptions,
        )

    async def Cancel(  # noqa: N802
        self, request: common_pb2.CancelRequest, context: Context
    ) -> common_pb2.CancelResponse:
        """Ends an attempt, also one that has not come yet."""
        return self._parts.desk.cancel(request)

    async def Renew(  # noqa: N802
        self, request: common_pb2.RenewRequest, context: Context
    ) -> common_pb2.RenewResponse:
        """Keeps attempts alive."""
        return self._parts.desk.renew(request)

    async def Replay(  # noqa: N802
        self, request: decode_pb2.ReplayRequest, context: Context
    ) -> decode_pb2.ReplayResponse:
        """Tokens again, from an index on."""
        tokens = self._parts.tokens
        tokens.hear(GatewayRef(request.gateway.worker_id, request.gateway.epoch))
        response = decode_pb2.ReplayResponse()
        for wanted in getattr(request, "from"):
            answer = tokens.replay(wanted.handoff_id, wanted.index)
            replayed = response.replayed.add(
                handoff_id=wanted.handoff_id, known=answer is not None, choice=wanted.choice
            )
            if answer is not None:
                first_index, sampled, finish = answer
                replayed.first_index = first_index
                replayed.tokens.extend(token_to_proto(token) for token in sampled)
                replayed.finish_reason = FINISH_TO_PROTO[finish]
        return response


def add_service(parts: Parts, rpc: RpcServer) -> None:
    """Serves DecodeService there."""
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(DecodeServicer(parts), rpc.server)


def _read_holder(request: decode_pb2.DecodeRequest) -> PeerRef | None:
    """Who computes the prompt; None: this worker. Raises RefusedWorkError."""
    if not request.HasField("prefill"):
        return None
    process = request.prefill.process
    if not (process.worker_id and process.epoch and request.prefill.address):
        raise RefusedWorkError("prefill: worker_id, epoch and address are required")
    return PeerRef(process.worker_id, process.epoch, request.prefill.address)
