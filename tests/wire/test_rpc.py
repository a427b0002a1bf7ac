"""A unary call whose server says at once that it has the request, against a real gRPC server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from services.wire import rpc

Handler = Callable[[bytes, Any], Awaitable[bytes]]


def ask(handler: Handler, scenario: Callable[[Any, asyncio.Event], Awaitable[None]]) -> None:
    """Runs `scenario` with a function that opens the call, and an event that is set when the server has it."""

    async def body() -> None:
        server = rpc.RpcServer()
        methods = {"M": grpc.unary_unary_rpc_method_handler(handler)}
        server.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("S", methods),))
        port = await server.start("127.0.0.1", 0)
        received = asyncio.Event()
        async with rpc.channel(f"127.0.0.1:{port}") as channel:
            await scenario(
                lambda: rpc.until_answered(channel.unary_stream("/S/M")(b"q", timeout=5), received.set), received
            )
        await server.stop(0)

    asyncio.run(asyncio.wait_for(body(), 20))


def test_it_is_heard_before_the_answer() -> None:
    go_on = asyncio.Event()

    async def answers(request: bytes, context: Any) -> bytes:
        await context.send_initial_metadata(rpc.RECEIVED)
        await go_on.wait()
        return b"a"

    async def scenario(call: Any, received: asyncio.Event) -> None:
        answering = asyncio.create_task(call())
        await received.wait()
        assert not answering.done()
        go_on.set()
        assert await answering == b"a"

    ask(answers, scenario)


def test_a_server_that_says_nothing_is_not_heard() -> None:
    async def answers(request: bytes, context: Any) -> bytes:
        return b"a"

    async def scenario(call: Any, received: asyncio.Event) -> None:
        assert await call() == b"a"
        assert not received.is_set()

    ask(answers, scenario)


@pytest.mark.parametrize("code", [grpc.StatusCode.ABORTED, grpc.StatusCode.CANCELLED])
@pytest.mark.parametrize("says", [False, True])
def test_a_failure_is_raised_with_its_status(code: grpc.StatusCode, says: bool) -> None:
    async def fails(request: bytes, context: Any) -> bytes:
        if says:
            await context.send_initial_metadata(rpc.RECEIVED)
            await asyncio.sleep(0.05)
        await context.abort(code, "why")
        return b""

    async def scenario(call: Any, received: asyncio.Event) -> None:
        with pytest.raises(grpc.RpcError) as caught:
            await call()
        assert (caught.value.code(), caught.value.details()) == (code, "why")  # type: ignore[attr-defined]
        assert received.is_set() is says

    ask(fails, scenario)


def test_a_call_that_is_cancelled_here_is_cancelled_there() -> None:
    cancelled = asyncio.Event()

    async def waits(request: bytes, context: Any) -> bytes:
        await context.send_initial_metadata(rpc.RECEIVED)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return b""

    async def scenario(call: Any, received: asyncio.Event) -> None:
        answering = asyncio.create_task(call())
        await received.wait()
        answering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answering
        await cancelled.wait()

    ask(waits, scenario)


def test_nobody_there_fails_to_connect() -> None:
    async def body() -> None:
        async with rpc.channel("127.0.0.1:1") as channel:
            with pytest.raises(grpc.RpcError, match="failed to connect"):
                await rpc.until_answered(channel.unary_stream("/S/M")(b"q", timeout=5), lambda: None)

    asyncio.run(body())
