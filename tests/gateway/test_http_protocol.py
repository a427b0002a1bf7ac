"""Bytes on a socket: heads that never end, offers to upgrade, garbage, any border between two pieces."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from services.gateway import http_protocol
from services.gateway.http_protocol import MAX_HEAD_BYTES
from tests.gateway.conftest import World, WorldMaker
from tests.gateway.test_chat import chat

pytestmark = pytest.mark.anyio


def post(*headers: str) -> bytes:
    body = json.dumps(chat()).encode()
    lines = ["POST /v1/chat/completions HTTP/1.1", "host: x", "content-type: application/json", *headers]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body


async def talk(w: World, *pieces: bytes, pause_s: float = 0.0) -> tuple[int, bytes]:
    """The first answer's status and body."""
    reader, writer = await asyncio.open_connection(*w.url.removeprefix("http://").split(":"))
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)
        return await answer(reader)
    finally:
        writer.close()


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    async with asyncio.timeout(10):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line)
        return int(head.split(b" ", 2)[1]), await reader.readexactly(length)


def error_of(body: bytes) -> str:
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


async def test_an_offer_to_upgrade_is_declined_and_the_body_kept(world: WorldMaker) -> None:
    """As Java's HttpClient sends it."""
    async with world() as w:
        offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAAAA")
        status, body = await talk(w, post(*offer))
        assert status == 200, body
        assert json.loads(body)["choices"]


async def test_any_border_between_pieces(world: WorldMaker) -> None:
    async with world() as w:
        request = post()
        status, body = await talk(w, *(request[i : i + 1] for i in range(len(request))))
        assert status == 200, body
        end = request.index(b"\r\n\r\n")
        for cut in (end, end + 1, end + 2, end + 3, end + 4, end + 5):
            status, body = await talk(w, request[:cut], request[cut:], pause_s=0.01)
            assert status == 200, (cut, body)


async def test_one_request_behind_the_other(world: WorldMaker) -> None:
    async with world() as w:
        reader, writer = await asyncio.open_connection(*w.url.removeprefix("http://").split(":"))
        request = post()
        writer.write(request + request[:40])
        writer.write(request[40:] + request)
        assert [(await answer(reader))[0] for _ in range(3)] == [200, 200, 200]
        writer.write(request)
        assert (await answer(reader))[0] == 200
        writer.close()


async def test_a_head_without_end_is_refused_at_once(world: WorldMaker) -> None:
    async with world() as w:
        started_s = time.monotonic()
        status, body = await talk(w, b"GET /live HTTP/1.1\r\nx-long: " + b"a" * (MAX_HEAD_BYTES + 1))
        assert status == 431
        assert str(MAX_HEAD_BYTES) in error_of(body)
        behind = post() + b"GET /live HTTP/1.1\r\nx-long: "
        reader, writer = await asyncio.open_connection(*w.url.removeprefix("http://").split(":"))
        writer.write(behind)
        assert (await answer(reader))[0] == 200
        writer.write(b"a" * (MAX_HEAD_BYTES + 1))
        assert (await answer(reader))[0] == 431
        assert await reader.read() == b""
        writer.close()
        assert time.monotonic() - started_s < 5
        assert (await w.http.get("/live")).status_code == 200


async def test_a_head_that_takes_too_long_is_given_up(world: WorldMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_S", 0.2)
    async with world() as w:
        for pieces in ((), (b"GET /live HT",)):
            status, body = await talk(w, *pieces)
            assert status == 408
            assert "headers" in error_of(body)
        reader, writer = await asyncio.open_connection(*w.url.removeprefix("http://").split(":"))
        writer.write(post())
        assert (await answer(reader))[0] == 200
        await asyncio.sleep(0.4)  # idle between requests is not late
        writer.write(post())
        assert (await answer(reader))[0] == 200
        writer.close()


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x02\x00\x01\x00", b"hello there\r\n\r\n", b"GET /live HTTP/9.9\r\n\r\n", b"\x00" * 20]
)
async def test_what_is_no_http_gets_an_error_object(world: WorldMaker, garbage: bytes) -> None:
    async with world() as w:
        status, body = await talk(w, garbage)
        assert status == 400
        assert error_of(body)


async def test_a_trailing_slash_is_another_route(world: WorldMaker) -> None:
    async with world() as w:
        refused = await w.http.post("/v1/chat/completions/", json=chat())
        assert refused.status_code == 404
        assert refused.json()["error"]["type"] == "invalid_request_error"
