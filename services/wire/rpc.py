"""gRPC servers and channels with the same limits everywhere: message size, keepalive, health service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

MAX_MESSAGE_BYTES = 16 * 2**20
RECEIVED = (("pdserve-received", "1"),)  # initial metadata: the server has the request

_LIMITS: Sequence[tuple[str, int]] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)
_SERVER_OPTIONS: Sequence[tuple[str, int]] = (
    *_LIMITS,
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 2_000),
)
_CHANNEL_OPTIONS: Sequence[tuple[str, int]] = (
    *_LIMITS,
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),  # a restarted peer must not inherit an old connection's backoff
)

Answer = TypeVar("Answer")


def channel(address: str) -> aio.Channel:
    """A channel to `host:port`; the caller closes it."""
    return aio.insecure_channel(address, options=list(_CHANNEL_OPTIONS))


async def until_answered(call: aio.UnaryStreamCall[Any, Answer], on_received: Callable[[], None]) -> Answer:
    """The one answer of a unary method; `on_received` is called when the server says RECEIVED, if it ever does.

    The method is to be called as if it streamed its answer, which on the wire is the same: of a unary call grpc.aio
    hands out the initial metadata only together with the answer. Raises grpc.RpcError.
    """
    listening = asyncio.create_task(_listen(call, on_received))
    try:
        answer: Answer = await call.read()
        if await call.code() is not grpc.StatusCode.OK:
            await call.read()  # raises it
        return answer
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)


async def _listen(call: aio.UnaryStreamCall[Any, Answer], on_received: Callable[[], None]) -> None:
    if dict(await call.initial_metadata()).get(RECEIVED[0][0]) == RECEIVED[0][1]:
        on_received()


class RpcServer:
    """One gRPC server with the standard health service; add servicers to `.server`, then `start()`."""

    def __init__(self) -> None:
        self.server: aio.Server = aio.server(options=list(_SERVER_OPTIONS))
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)

    async def start(self, host: str, port: int) -> int:
        """Listens; returns the port really taken. Raises RuntimeError where the port is taken."""
        bound = int(self.server.add_insecure_port(f"{host}:{port}"))
        if bound == 0:
            raise RuntimeError(f"cannot listen on {host}:{port}")
        await self.server.start()
        await self.set_serving(False)
        return bound

    async def set_serving(self, serving: bool) -> None:
        """What the health service answers for the whole server."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set("", status)

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls at once and ends running ones after `grace_s` seconds."""
        await self.server.stop(grace_s)


async def is_serving(address: str, timeout_s: float) -> bool:
    """Asks the health service of a process; False where it says no, is gone, or does not answer in time."""
    async with channel(address) as link:
        stub = health_pb2_grpc.HealthStub(link)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=timeout_s)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
