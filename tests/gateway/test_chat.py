"""Requests over HTTP against fake workers: what a client sees when all goes well."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.conftest import REPLY, World, WorldMaker, until

pytestmark = pytest.mark.anyio


def events(text: str) -> list[Any]:
    """The data of a well-formed SSE stream; the last is [DONE]."""
    assert text.endswith("\n\n")
    lines = [part for part in text.split("\n\n")[:-1] if not part.startswith(":")]
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": "Hi there"}], **more}


async def test_a_whole_answer(world: WorldMaker) -> None:
    async with world() as w:
        answer = await w.http.post("/v1/chat/completions", json=chat(), headers={"x-request-id": "mine-1"})
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert answer.headers["x-request-id"] == "mine-1"
        assert body["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": REPLY, "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ]
        assert body["object"] == "chat.completion"
        assert body["usage"]["completion_tokens"] == len(w.script.reply) + 1
        assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
        work = w.decodes[0].works[0]
        assert w.prefills[0].works[0].attempt == work.attempt
        assert work.attempt.request_id not in ("", "mine-1")
        assert body["id"] == f"chatcmpl-{work.attempt.request_id}"
        assert body["usage"]["prompt_tokens"] == len(work.prompt_token_ids)
        assert work.sampling.temperature == 1.0
        assert work.sampling.max_tokens == 512 - len(work.prompt_token_ids)


async def test_a_stream(world: WorldMaker) -> None:
    async with world() as w:
        body = chat(stream=True, stream_options={"include_usage": True}, max_tokens=9)
        answer = await w.http.post("/v1/chat/completions", json=body)
        chunks = events(answer.text)
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
        *parts, end, usage = chunks[1:]
        text = "".join(part["choices"][0]["delta"]["content"] for part in parts)
        assert text == w.gateway.tokenizer.rust.decode(w.script.reply[:9])
        assert end["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}]
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 9
        assert all(chunk["usage"] is None for chunk in chunks[:-1])


async def test_text_prompts_as_text_ids_and_batches(world: WorldMaker) -> None:
    async with world() as w:
        tokenizer = w.gateway.tokenizer.rust
        expected = tokenizer.decode(w.script.reply[:5])
        for prompt, ids in (
            ("the capital", [tokenizer.encode("the capital").ids]),
            ([5, 6, 7], [[5, 6, 7]]),
            (["a", "b"], [tokenizer.encode("a").ids, tokenizer.encode("b").ids]),
            ([[5], [6, 7]], [[5], [6, 7]]),
        ):
            seen = len(w.decodes[0].works)
            answer = await w.http.post("/v1/completions", json={"model": "fake", "prompt": prompt, "max_tokens": 5})
            body = answer.json()
            assert [choice["text"] for choice in body["choices"]] == [expected] * len(ids), body
            assert [choice["index"] for choice in body["choices"]] == list(range(len(ids)))
            assert body["object"] == "text_completion"
            works = w.decodes[0].works[seen:]
            assert sorted(list(work.prompt_token_ids) for work in works) == sorted(ids)
            assert body["usage"]["prompt_tokens"] == sum(map(len, ids))
            assert body["usage"]["completion_tokens"] == 5 * len(ids)


async def test_a_text_stream_of_two_prompts(world: WorldMaker) -> None:
    async with world() as w:
        body = {"model": "fake", "prompt": ["a", "b"], "max_tokens": 6, "stream": True}
        chunks = events((await w.http.post("/v1/completions", json=body)).text)
        for index in (0, 1):
            mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
            assert "".join(c["text"] for c in mine) == w.gateway.tokenizer.rust.decode(w.script.reply[:6])
            assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]
            assert mine[-1]["finish_reason"] == "length"


async def test_default_length_of_text_is_16(world: WorldMaker) -> None:
    async with world() as w:
        answer = await w.http.post("/v1/completions", json={"model": "fake", "prompt": "a"})
        assert answer.json()["usage"]["completion_tokens"] == 16


async def test_sampling_parameters_reach_the_workers(world: WorldMaker) -> None:
    async with world() as w:
        asked = {
            "temperature": 0.25,
            "top_p": 0.5,
            "top_k": 7,
            "min_p": 0.125,
            "seed": -1,
            "max_tokens": 4,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [9, 10],
        }
        await w.http.post(
            "/v1/completions",
            json={"model": "fake", "prompt": "a", **asked},
            headers={
                "authorization": "Bearer secret",
                "x-llm-d-inference-objective": "batch",
                "x-llm-d-slo-ttft-ms": "250",
            },
        )
        work = w.decodes[0].works[0]
        sampling = work.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.25, 0.5, 7, 0.125)
        assert (sampling.seed, sampling.max_tokens, sampling.min_tokens) == (2**64 - 1, 4, 2)
        assert sampling.ignore_eos and list(sampling.stop_token_ids) == [9, 10]
        assert work.priority_class == 3 and work.ttft_target_s == 0.25 and work.num_choices == 1
        assert work.tenant not in ("", "default") and "secret" not in work.tenant
        assert len(work.cache_salt) == 16
        await w.http.post("/v1/completions", json={"model": "fake", "prompt": "a", "max_tokens": 1})
        assert w.decodes[0].works[1].tenant == "default" and w.decodes[0].works[1].cache_salt == b""
        assert w.decodes[0].works[1].sampling.seed != 2**64 - 1


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_end_the_choice_and_both_workers(world: WorldMaker, stream: bool) -> None:
    async with world() as w:
        w.script.step_s = 0.01
        body = chat(stop=["Paris", "no such"], stream=stream)
        answer = await w.http.post("/v1/chat/completions", json=body)
        expected = REPLY[: REPLY.index("Paris")]
        if stream:
            chunks = events(answer.text)
            text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
            assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        else:
            text = answer.json()["choices"][0]["message"]["content"]
            assert answer.json()["choices"][0]["finish_reason"] == "stop"
        assert text == expected
        await w.idle()
        assert w.decodes[0].cancel_requests == [w.decodes[0].works[0].attempt.handoff_id]


async def test_logprobs_of_chat(world: WorldMaker) -> None:
    async with world() as w:
        body = chat(logprobs=True, top_logprobs=2, max_tokens=30)
        whole = (await w.http.post("/v1/chat/completions", json=body)).json()["choices"][0]
        content = whole["logprobs"]["content"]
        assert [entry["logprob"] for entry in content] == [-0.5 - i for i in range(30)]
        raw = b"".join(bytes(entry["bytes"]) for entry in content)
        assert raw.decode(errors="replace") == whole["message"]["content"]
        assert [len(entry["top_logprobs"]) for entry in content] == [2] * 30
        assert content[4]["top_logprobs"][0]["token"] == content[4]["token"]
        chunks = events((await w.http.post("/v1/chat/completions", json=body | {"stream": True})).text)
        parts = [c["choices"][0]["logprobs"] for c in chunks]
        assert [entry for part in parts if part for entry in part["content"]] == content


async def test_logprobs_of_text_stop_where_the_text_stops(world: WorldMaker) -> None:
    async with world() as w:
        body = {"model": "fake", "prompt": "a", "max_tokens": 60, "logprobs": 1, "stop": "France"}
        choice = (await w.http.post("/v1/completions", json=body)).json()["choices"][0]
        logprobs = choice["logprobs"]
        assert choice["text"] == REPLY[: REPLY.index("France")]
        assert all(offset < len(choice["text"]) for offset in logprobs["text_offset"])
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert REPLY[offset:].startswith(token)
        assert [list(top) for top in logprobs["top_logprobs"]] == [[token] for token in logprobs["tokens"]]


async def test_a_first_token_that_ends_the_choice(world: WorldMaker) -> None:
    async with world() as w:
        answer = await w.http.post("/v1/completions", json={"model": "fake", "prompt": "a", "max_tokens": 1})
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        assert answer.json()["usage"]["completion_tokens"] == 1
        w.script.reply = []
        body = chat(stream=True)
        chunks = events((await w.http.post("/v1/chat/completions", json=body)).text)
        assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, "stop"]
        await w.idle()


async def test_pings_while_nothing_comes(world: WorldMaker) -> None:
    async with world(ping_s=0.05) as w:
        w.script.prefill_s = 0.4
        answer = await w.http.post("/v1/chat/completions", json=chat(stream=True, max_tokens=3))
        assert answer.text.startswith(": ping\n\n: ping\n\n")
        assert events(answer.text)[-1]["choices"][0]["finish_reason"] == "length"


async def test_the_timeline_of_a_request(world: WorldMaker) -> None:
    async with world() as w:
        answer = await w.http.post("/v1/chat/completions", json=chat(max_tokens=5), headers={"x-request-id": "abc"})
        for name in ("abc", answer.json()["id"]):
            view = (await w.http.get(f"/debug/requests/{name}")).json()
            assert view["path"] == "disaggregated" and view["num_attempts"] == 1
            assert view["prefill_worker"] == "p0" and view["decode_worker"] == "d0"
            stages = view["stages"]
            workers_own = ["queue", "prefill", "exposed_transfer", "first_decode", "decode"]
            assert list(stages) == ["tokenise", "dispatch", *workers_own, "delivery"]
            assert stages["dispatch"] > 0 and stages["delivery"] > 0
            assert stages["queue"] == 0.001 and stages["prefill"] == w.script.prefill_s
            assert stages["exposed_transfer"] == 0.001 and stages["first_decode"] == 0.002
            assert stages["decode"] == 5 * w.script.step_s
            assert view["residual_s"] == pytest.approx(view["total_s"] - sum(stages.values()))
            assert 0 < view["ttft_s"] < view["total_s"]
            assert (view["num_pulled_blocks"], view["num_pulled_bytes"], view["transfer_s"]) == (4, 4096, 0.003)
            assert view["num_output_tokens"] == 5 and view["num_cached_tokens"] == 3
        assert (await w.http.get("/debug/requests/none")).status_code == 404
    async with world(prefills=0) as w:
        answer = await w.http.post("/v1/chat/completions", json=chat(max_tokens=5))
        view = (await w.http.get(f"/debug/requests/{answer.json()['id']}")).json()
        assert view["path"] == "colocated" and view["stages"]["prefill"] == 0.002
        assert view["stages"]["dispatch"] > 0
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 2


async def stages_of(w: World, **more: Any) -> dict[str, float]:
    answer = await w.http.post("/v1/chat/completions", json=chat(**({"max_tokens": 5} | more)))
    found: dict[str, float] = (await w.http.get(f"/debug/requests/{answer.headers['x-request-id']}")).json()["stages"]
    return found


@pytest.mark.parametrize("prefills", [0, 1])
async def test_dispatch_ends_when_the_worker_says_that_it_has_the_request(world: WorldMaker, prefills: int) -> None:
    async with world(prefills=prefills) as w:
        w.script.receive_s, w.script.prefill_s, w.script.step_s = 0.1, 0.5, 0.1
        stages = await stages_of(w)
        assert 0.1 <= stages["dispatch"] < 0.5  # either worker takes half a second and more from there
        w.script.receive_s = -1
        assert (await stages_of(w))["dispatch"] == 0.0


@pytest.mark.parametrize("stream", [False, True])
async def test_delivery_begins_when_the_last_token_arrives(world: WorldMaker, stream: bool) -> None:
    async with world() as w:
        w.script.account_s, w.script.step_s = 0.2, 0.1
        stages = await stages_of(w, stream=stream)
        assert 0.2 <= stages["delivery"] < 0.6  # the account is waited for; all tokens together take 0.5 s


@pytest.mark.parametrize("prefills", [0, 1])
async def test_a_stop_string_leaves_an_account(world: WorldMaker, prefills: int) -> None:
    async with world(prefills=prefills) as w:
        w.script.step_s = 0.01
        answer = await w.http.post("/v1/chat/completions", json=chat(stop="Paris"))
        assert answer.json()["choices"][0]["finish_reason"] == "stop"
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == (3 if prefills else 2)
        view = (await w.http.get(f"/debug/requests/{answer.json()['id']}")).json()
        assert view["stages"]["decode"] > 0 and view["stages"]["delivery"] > 0
        assert view["attempts"][0]["failure"] is None


async def test_ended_attempts_are_acknowledged(world: WorldMaker) -> None:
    async with world(renew_s=0.05) as w:
        await w.http.post("/v1/chat/completions", json=chat(max_tokens=5))
        handoff_id = w.decodes[0].works[0].attempt.handoff_id
        await until(lambda: all(worker.acknowledged for worker in w.workers))
        assert [worker.acknowledged for worker in w.workers] == [[handoff_id]] * 2
