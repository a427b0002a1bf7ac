"""The bus against a real nats-server that is killed and restarted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.wire import bus as bus_module
from services.wire.bus import Bus
from services.wire.subjects import heartbeat_subject, token_subject


async def until(condition: Any, timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def test_messages_arrive_in_order_and_the_link_survives_a_restart(nats_server: Any) -> None:
    async def body() -> None:
        got: list[bytes] = []
        back: list[int] = []

        async def on_message(subject: str, payload: bytes) -> None:
            assert subject == "pdserve.tokens.g.e"
            got.append(payload)

        sender = await Bus.connect(nats_server.url, "sender")
        receiver = await Bus.connect(nats_server.url, "receiver")
        receiver.on_reconnect(lambda: back.append(1))
        await receiver.subscribe(token_subject("g", "e"), on_message)
        for i in range(100):
            await sender.publish(token_subject("g", "e"), str(i).encode())
        await until(lambda: len(got) == 100)
        assert got == [str(i).encode() for i in range(100)]

        nats_server.stop()
        await until(lambda: not sender.connected and not receiver.connected)
        dropped = bus_module.DROPPED._value.get()
        await asyncio.wait_for(sender.publish(token_subject("g", "e"), b"lost"), 0.5)
        assert bus_module.DROPPED._value.get() == dropped + 1
        nats_server.start()
        await until(lambda: sender.connected and receiver.connected and bool(back))
        await asyncio.sleep(0.2)  # the subscription is replayed right after the reconnect
        await sender.publish(token_subject("g", "e"), b"again")
        await until(lambda: got[-1] == b"again")
        assert b"lost" not in got
        await sender.close()
        await receiver.close()
        await receiver.close()

    asyncio.run(body())


def test_no_server_is_a_clear_error() -> None:
    with pytest.raises(TimeoutError, match="no NATS server"):
        asyncio.run(Bus.connect("nats://127.0.0.1:1", "x", timeout_s=0.3))


@pytest.mark.parametrize("bad", ["a.b", "a*", ">", "a b", "a\r\nPUB x 1"])
def test_no_id_can_change_a_subjects_meaning(bad: str) -> None:
    for subject in (token_subject(bad, "e"), heartbeat_subject("decode", bad)):
        parts = subject.split(".")
        assert len(parts) == 4
        assert not any(c in subject for c in "*> \r\n")
    with pytest.raises(ValueError):
        token_subject("", "e")
