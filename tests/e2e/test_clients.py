"""Real clients against real processes: the `openai` package, curl, and bad input of every kind beside a stream."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import openai
import pytest

from tests.e2e.conftest import TINY
from tests.e2e.house import House, wait_until

pytestmark = [pytest.mark.e2e]

HELLO: list[Any] = [{"role": "user", "content": "Say something with Umlauts: äöü 🙂"}]


@pytest.fixture
def client(pair: House) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{pair.deployment.gateway_url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_streams_and_reads_usage(client: openai.OpenAI, pair: House) -> None:
    whole = client.chat.completions.create(model=TINY, messages=HELLO, max_tokens=40, temperature=0)
    stream = client.chat.completions.create(
        model=TINY, messages=HELLO, max_tokens=40, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    text, finish, usage = "", None, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    assert text == whole.choices[0].message.content
    assert finish == whole.choices[0].finish_reason
    assert usage is not None and whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    pair.assert_books_close()


def test_bad_input_names_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=TINY, messages=HELLO, temperature=-1)
    assert caught.value.status_code == 400
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="no-such-model", messages=HELLO)
    assert missing.value.param == "model"


def test_cancels(client: openai.OpenAI, pair: House) -> None:
    stream = client.chat.completions.create(
        model=TINY, messages=HELLO, max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
    )
    before = pair.total("decode", "pdserve_worker_cancelled_total")
    for number, _ in enumerate(stream):
        if number == 5:
            break
    stream.close()
    wait_until(lambda: pair.total("decode", "pdserve_worker_cancelled_total") == before + 1, "decode was told", 2)
    pair.assert_books_close()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_shows_well_formed_sse(pair: House) -> None:
    body = json.dumps({"model": TINY, "messages": HELLO, "max_tokens": 8, "stream": True})
    url = f"{pair.deployment.gateway_url}/v1/chat/completions"
    command = ["curl", "-sSN", "-H", "content-type: application/json", "-d", body, url]
    output = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=60).stdout.decode()
    events = output.split("\n\n")
    assert events[-1] == "" and events[-2] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert all(event.startswith("data: {") and "\n" not in event for event in events[:-2])
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")
    assert len({chunk["id"] for chunk in chunks}) == 1


def bad_requests(limit: int) -> list[tuple[str, dict[str, Any] | bytes, int, str | None]]:
    """(what, body, status, field)."""
    good: dict[str, Any] = {"model": TINY, "prompt": "hello", "max_tokens": 4}
    return [
        ("empty prompt", good | {"prompt": ""}, 400, "prompt"),
        ("no tokens", good | {"prompt": []}, 400, "prompt"),
        ("unknown model", good | {"model": "nope"}, 404, "model"),
        ("beyond the context", good | {"prompt": [1] * 5000}, 400, "prompt"),
        ("max_tokens of 0", good | {"max_tokens": 0}, 400, "max_tokens"),
        ("max_tokens beyond", good | {"max_tokens": limit * 10}, 400, "max_tokens"),
        ("negative max_tokens", good | {"max_tokens": -1}, 400, "max_tokens"),
        ("NaN", b'{"model": "tiny-random-llama", "prompt": "x", "temperature": NaN}', 400, None),
        ("temperature too high", good | {"temperature": 1e9}, 400, "temperature"),
        ("top_p of 0", good | {"top_p": 0}, 400, "top_p"),
        ("a string for a number", good | {"top_p": "much"}, 400, "top_p"),
        ("invalid UTF-8", b'{"model": "tiny-random-llama", "prompt": "\xff\xfe"}', 400, None),
        ("a lone surrogate", b'{"model": "tiny-random-llama", "prompt": "\\ud800"}', 400, None),
        ("malformed JSON", b'{"model": ', 400, None),
        ("no object", b"[1, 2]", 400, None),
        ("a token outside the vocabulary", good | {"prompt": [10**6]}, 400, "prompt"),
    ]


def test_bad_input_is_refused_and_the_other_streams_run_on(pair: House) -> None:
    url = f"{pair.deployment.gateway_url}/v1/completions"
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(pair.complete, [7] * 30, 600)
        for what, body, status, field in bad_requests(4096):
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            reply = pair.client.post(url, content=data, headers={"content-type": "application/json"})
            assert reply.status_code == status, (what, reply.status_code, reply.text)
            error = reply.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}, what
            assert error["message"], what
            if field is not None:
                assert error["param"] == field, (what, error)
        assert len(other.result(60).token_ids) == 600
    pair.assert_books_close()


def test_a_body_of_50_mb_is_refused_by_its_length(pair: House) -> None:
    """Refused when the headers have arrived: hardly a byte of the body is taken."""
    started = time.monotonic()
    taken = 0

    def body() -> Iterator[bytes]:
        nonlocal taken
        for _ in range(50):
            taken += 1
            yield b"x" * 2**20

    headers = {"content-type": "application/json", "content-length": str(50 * 2**20)}
    with httpx2.Client(timeout=30) as client:
        try:
            reply = client.post(f"{pair.deployment.gateway_url}/v1/completions", content=body(), headers=headers)
        except httpx2.WriteError:  # the server hung up before all was sent
            assert taken < 50
            return
    assert reply.status_code == 413
    assert reply.json()["error"]["message"]
    assert time.monotonic() - started < 10


def test_longer_than_the_pool(pair: House) -> None:
    """A context that the pool could never hold is refused by the numbers, not queued for ever."""
    info = pair.client.get(f"{pair.deployment.gateway_url}/v1/models").json()["data"][0]
    assert info["max_model_len"] <= 4096
    reply = pair.client.post(
        f"{pair.deployment.gateway_url}/v1/completions",
        json={"model": TINY, "prompt": [1] * (info["max_model_len"] + 1), "max_tokens": 1},
    )
    assert reply.status_code == 400 and "param" in reply.json()["error"]
