"""The prefill worker's gRPC service: protobuf in, protobuf out, nothing else."""

from __future__ import annotations

from typing import Any, TypeAlias, cast

from grpc import aio

from services.prefill.worker import Arrive, Prefilled
from services.wire.pb import common_pb2, prefill_pb2, prefill_pb2_grpc
from services.wire.rpc import RpcServer
from services.worker.desk import refuse
from services.worker.intake import RefusedWorkError, read_attempt, read_sequence
from services.worker.main import Parts
from services.worker.publisher import FINISH_TO_PROTO, token_to_proto

Context: TypeAlias = "aio.ServicerContext[Any, Any]"


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """Calls wait at the desk."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def Prefill(  # noqa: N802
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> prefill_pb2.PrefillResponse:
        """Computes a prompt; answers when token 0 is sampled."""
        assembly = self._parts.assembly
        try:
            attempt = read_attempt(request.work)
            seq = read_sequence(
                request.work, assembly.eos_token_ids, assembly.vocab_size, leaves_after_first_token=True
            )
        except RefusedWorkError as error:
            await refuse(context, error)
            raise
        done = cast("Prefilled", await self._parts.desk.serve(attempt, seq, Arrive(attempt, seq), context))
        identity = self._parts.process.identity
        return prefill_pb2.PrefillResponse(
            worker=common_pb2.ProcessId(worker_id=identity.worker_id, epoch=identity.epoch),
            num_prompt_tokens=done.num_prompt_tokens,
            num_cached_tokens=done.num_cached_tokens,
            queue_s=done.queue_s,
            prefill_s=done.prefill_s,
            first_token=token_to_proto(done.first_token) if done.first_token else None,
            finish_reason=FINISH_TO_PROTO[done.finish],
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


def add_service(parts: Parts, rpc: RpcServer) -> None:
    """Serves PrefillService there."""
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(PrefillServicer(parts), rpc.server)
