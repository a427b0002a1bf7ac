"""Everything a client can get wrong is a 4xx with an OpenAI error object that names the field."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.gateway.conftest import REPLY, World, WorldMaker, until
from tests.gateway.test_chat import chat, events

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def text(**more: Any) -> dict[str, Any]:
    return {"model": "fake", "prompt": "a", **more}


def check(answer: Any, status: int, param: str | None) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    body = answer.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["param"] == param, body
    assert body["error"]["message"]
    found: dict[str, Any] = body["error"]
    return found


BAD_FIELDS: list[tuple[str, Any, str]] = [
    (CHAT, chat(messages=[]), "messages"),
    (CHAT, chat(messages="hello"), "messages"),
    (CHAT, chat(messages=[{"role": "wizard", "content": "a"}]), "messages"),
    (CHAT, chat(messages=[{"role": "user", "content": 5}]), "messages"),
    (CHAT, chat(messages=[{"role": "user"}]), "messages"),
    (CHAT, chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]), "messages"),
    (CHAT, chat(temperature=-0.1), "temperature"),
    (CHAT, chat(temperature="hot"), "temperature"),
    (CHAT, chat(temperature=True), "temperature"),
    (CHAT, chat(top_p=0), "top_p"),
    (CHAT, chat(top_p=1.5), "top_p"),
    (CHAT, chat(top_k=-2), "top_k"),
    (CHAT, chat(top_k=1.5), "top_k"),
    (CHAT, chat(min_p=2), "min_p"),
    (CHAT, chat(seed="x"), "seed"),
    (CHAT, chat(seed=2**64), "seed"),
    (CHAT, chat(max_tokens=0), "max_tokens"),
    (CHAT, chat(max_tokens=-1), "max_tokens"),
    (CHAT, chat(max_tokens=100000), "max_tokens"),
    (CHAT, chat(max_completion_tokens=100000), "max_completion_tokens"),
    (CHAT, chat(min_tokens=9, max_tokens=8), "min_tokens"),
    (CHAT, chat(stop=["a"] * 17), "stop"),
    (CHAT, chat(stop=""), "stop"),
    (CHAT, chat(stop=[1]), "stop"),
    (CHAT, chat(stream="yes"), "stream"),
    (CHAT, chat(stream_options={"include_usage": True}), "stream_options"),
    (CHAT, chat(stream=True, stream_options=[]), "stream_options"),
    (CHAT, chat(n=2), "n"),
    (CHAT, chat(n=0), "n"),
    (CHAT, chat(logprobs=3), "logprobs"),
    (CHAT, chat(top_logprobs=3), "top_logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    (CHAT, chat(tools=[{"type": "function"}]), "tools"),
    (CHAT, chat(response_format={"type": "json_object"}), "response_format"),
    (CHAT, chat(logit_bias={"5": 1}), "logit_bias"),
    (CHAT, chat(frequency_penalty=0.5), "frequency_penalty"),
    (CHAT, {"model": "fake"}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "a"}]}, "model"),
    (TEXT, text(prompt=""), "prompt"),
    (TEXT, text(prompt=[]), "prompt"),
    (TEXT, text(prompt=["a", ""]), "prompt"),
    (TEXT, text(prompt=[[]]), "prompt"),
    (TEXT, text(prompt=[1, "a"]), "prompt"),
    (TEXT, text(prompt=[320]), "prompt"),
    (TEXT, text(prompt=[-1]), "prompt"),
    (TEXT, text(prompt=[True]), "prompt"),
    (TEXT, text(prompt={"a": 1}), "prompt"),
    (TEXT, text(prompt=None), "prompt"),
    (TEXT, text(prompt=["a"] * 65), "prompt"),
    (TEXT, text(prompt="word " * 2000), "prompt"),
    (TEXT, text(prompt=[5] * 512), "prompt"),
    (TEXT, text(logprobs=True), "logprobs"),
    (TEXT, text(echo=True), "echo"),
    (TEXT, text(best_of=2), "best_of"),
    (TEXT, text(suffix="z"), "suffix"),
]

RAW: list[tuple[bytes, str | None]] = [
    (b"", None),
    (b"{", None),
    (b"[]", None),
    (b'"text"', None),
    (b"null", None),
    (b"[" * 100_000, None),
    (b'{"model":"fake","prompt":"\xff\xfe"}', None),
    (b'{"model":"fake","prompt":"\\ud800"}', None),
    (b'{"model":"fake","prompt":"a","temperature":NaN}', "temperature"),
    (b'{"model":"fake","prompt":"a","temperature":Infinity}', "temperature"),
    (b'{"model":"fake","prompt":"a","top_p":1e999}', "top_p"),
    (b'{"model":"fake","prompt":"a","seed":' + b"9" * 400 + b"}", "seed"),
]


async def test_wrong_fields_are_named_and_other_streams_run_on(world: WorldMaker) -> None:
    async with world() as w:
        w.script.step_s = 0.02
        other = asyncio.create_task(w.http.post(CHAT, json=chat(stream=True)))
        await until(lambda: w.decodes[0].held)
        for path, body, param in BAD_FIELDS:
            check(await w.http.post(path, json=body), 400, param)
        for raw, param in RAW:
            check(await w.http.post(TEXT, content=raw), 400, param)
        chunks = events((await other).text)
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == REPLY
        assert len(w.decodes[0].works) == 1


async def test_numbers_are_named_where_something_is_too_long(world: WorldMaker) -> None:
    async with world() as w:
        error = check(await w.http.post(TEXT, json=text(prompt=[5] * 600)), 400, "prompt")
        assert "512" in error["message"] and "600" in error["message"]
        assert error["code"] == "context_length_exceeded"
        error = check(await w.http.post(TEXT, json=text(prompt=[5] * 500, max_tokens=13)), 400, "max_tokens")
        assert "513" in error["message"]
        assert (await w.http.post(TEXT, json=text(prompt=[5] * 500, max_tokens=12))).status_code == 200
        w.decodes[0].num_blocks = 10  # a pool of 160 tokens
        await w.decodes[0].say()
        await until(lambda: w.gateway.limits().pool_tokens == 160)
        error = check(await w.http.post(TEXT, json=text(prompt=[5] * 160)), 400, "prompt")
        assert "160" in error["message"]
        check(await w.http.post(TEXT, json=text(prompt=[5] * 100, max_tokens=61)), 400, "max_tokens")
        assert (await w.http.post(TEXT, json=text(prompt=[5] * 100, max_tokens=60))).status_code == 200
        work = w.decodes[0].works[-1]
        assert (await w.http.post(CHAT, json=chat())).status_code == 200  # the default length is cut to the pool
        work = w.decodes[0].works[-1]
        assert work.sampling.max_tokens == 160 - len(work.prompt_token_ids)


async def test_routes_models_and_methods(world: WorldMaker) -> None:
    async with world() as w:
        check(await w.http.get("/v1/nothing"), 404, None)
        check(await w.http.get(CHAT), 405, None)
        check(await w.http.delete("/v1/models"), 405, None)
        check(await w.http.post("/v1/responses", json={}), 404, None)
        error = check(await w.http.post(CHAT, json=chat(model="gpt-9")), 404, "model")
        assert error["code"] == "model_not_found"
        check(await w.http.get("/v1/models/gpt-9"), 404, "model")
        for path in (
            "/health",
            "/live",
            "/ready",
            "/version",
            "/metrics",
            "/v1/models",
            "/v1/models/fake",
            "/openapi.json",
        ):
            assert (await w.http.get(path)).status_code == 200
        model = (await w.http.get("/v1/models/fake")).json()
        assert model["object"] == "model" and model["max_model_len"] == 512
        metrics = (await w.http.get("/metrics")).text
        assert 'pdserve_gateway_workers{role="decode"} 1.0' in metrics


async def test_client_request_ids(world: WorldMaker) -> None:
    async with world() as w:
        for given, echoed in (("a-B_9", True), ("x" * 64, True), ("x" * 65, False), ("a b", False), ("a\tb", False)):
            answer = await w.http.get("/version", headers={"x-request-id": given})
            assert (answer.headers["x-request-id"] == given) == echoed
            assert answer.headers["x-request-id"]


async def test_wrong_targets_in_headers(world: WorldMaker) -> None:
    async with world() as w:
        for value in ("fast", "-1", "nan", "0", "inf"):
            headers = {"x-llm-d-slo-ttft-ms": value}
            check(await w.http.post(CHAT, json=chat(), headers=headers), 400, "x-llm-d-slo-ttft-ms")


async def test_too_large_a_body_by_its_stated_length(world: WorldMaker) -> None:
    async with world() as w:
        answer = await w.http.post(TEXT, content=b"x" * (50 * 2**20))
        assert check(answer, 413, None)["code"] == "request_too_large"
        assert (await w.http.post(TEXT, json=text(max_tokens=1))).status_code == 200


async def raw_request(w: World, *parts: bytes) -> bytes:
    """Sends bytes as they are; what comes back until the server closes or is silent."""
    port = int(w.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    got = b""
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        while part := await asyncio.wait_for(reader.read(65536), 3.0):
            got += part
            if got.endswith(b"}}") or got.endswith(b"}}\r\n0\r\n\r\n"):
                break
    except TimeoutError:
        pass
    finally:
        writer.close()
        await writer.wait_closed()
    return got


async def test_a_large_length_is_refused_before_a_byte_of_it_came(world: WorldMaker) -> None:
    async with world() as w:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 52428800\r\n\r\n"
        got = await raw_request(w, head)
        assert got.startswith(b"HTTP/1.1 413 ")
        assert json.loads(got.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_too_large"


async def test_a_chunked_body_is_refused_while_it_is_read(world: WorldMaker) -> None:
    async with world(max_body_bytes=4096) as w:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        got = await raw_request(w, head, *([b"800\r\n" + b"x" * 0x800 + b"\r\n"] * 3))
        assert got.startswith(b"HTTP/1.1 413 ")


async def test_a_body_that_never_comes(world: WorldMaker) -> None:
    async with world(body_timeout_s=0.2) as w:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"
        got = await raw_request(w, head)
        assert got.startswith(b"HTTP/1.1 408 ")


async def test_more_requests_than_allowed_at_once(world: WorldMaker) -> None:
    async with world(max_live_requests=1) as w:
        w.script.prefill_s = 30
        first = asyncio.create_task(w.http.post(CHAT, json=chat()))
        await until(lambda: w.prefills[0].live)
        answer = await w.http.post(CHAT, json=chat())
        check(answer, 503, None)
        assert int(answer.headers["retry-after"]) >= 1
        first.cancel()
        await w.idle()


async def test_unknown_fields_and_neutral_values_are_ignored(world: WorldMaker) -> None:
    async with world() as w:
        neutral = {
            "frequency_penalty": 0,
            "presence_penalty": 0.0,
            "logit_bias": {},
            "n": 1,
            "tools": [],
            "tool_choice": "none",
            "response_format": {"type": "text"},
            "user": "me",
            "store": False,
            "metadata": {"a": "b"},
            "parallel_tool_calls": True,
            "temperature": None,
            "stop": None,
        }
        assert (await w.http.post(CHAT, json=chat(**neutral))).status_code == 200
