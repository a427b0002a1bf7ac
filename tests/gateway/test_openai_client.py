"""The `openai` client notices nothing."""

from __future__ import annotations

import asyncio

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.gateway.conftest import REPLY, World, WorldMaker, until

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def client(w: World, **more: object) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{w.url}/v1", api_key="k", **more)  # type: ignore[arg-type]


async def test_streaming_with_usage(world: WorldMaker) -> None:
    async with world() as w, client(w) as ai:
        text, reasons, usage = "", [], None
        stream = await ai.chat.completions.create(
            model="fake", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reasons.append(choice.finish_reason)
            usage = chunk.usage or usage
        assert text == REPLY
        assert [reason for reason in reasons if reason] == ["stop"]
        assert usage is not None and usage.completion_tokens == len(w.script.reply) + 1
        assert usage.prompt_tokens_details.cached_tokens == 3
        whole = await ai.chat.completions.create(model="fake", messages=MESSAGES)
        assert whole.choices[0].message.content == REPLY
        assert whole.usage.completion_tokens == usage.completion_tokens
        assert whole.usage.prompt_tokens == usage.prompt_tokens


async def test_the_synchronous_client_text_and_models(world: WorldMaker) -> None:
    async with world() as w:

        def use() -> str:
            with OpenAI(base_url=f"{w.url}/v1", api_key="k") as ai:
                assert [model.id for model in ai.models.list()] == ["fake"]
                assert ai.models.retrieve("fake").owned_by == "pdserve"
                stream = ai.completions.create(model="fake", prompt="a", max_tokens=7, stream=True)
                return "".join(chunk.choices[0].text for chunk in stream)

        assert await asyncio.to_thread(use) == w.gateway.tokenizer.rust.decode(w.script.reply[:7])


async def test_a_wrong_field_is_named(world: WorldMaker) -> None:
    async with world() as w, client(w) as ai:
        with pytest.raises(openai.BadRequestError) as error:
            await ai.chat.completions.create(model="fake", messages=MESSAGES, temperature=-1)
        assert error.value.param == "temperature" and error.value.status_code == 400
        with pytest.raises(openai.NotFoundError) as missing:
            await ai.chat.completions.create(model="none", messages=MESSAGES)
        assert missing.value.code == "model_not_found"


async def test_closing_a_stream_cancels_it(world: WorldMaker) -> None:
    async with world() as w, client(w) as ai:
        w.script.step_s = 0.05
        stream = await ai.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        assert w.decodes[0].live
        await stream.close()
        await w.idle()
        await until(lambda: w.decodes[0].cancel_requests)


async def test_an_error_in_mid_stream_is_raised(world: WorldMaker) -> None:
    async with world(prefills=0, retry_wait_s=0.1) as w, client(w, max_retries=0) as ai:
        w.script.step_s = 0.02
        stream = await ai.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError) as error:
            async for chunk in stream:
                if chunk.choices[0].delta.content and w.decodes[0].live:
                    await w.decodes[0].stop()
        assert error.value.type == "service_unavailable_error"


async def test_retry_after_503(world: WorldMaker) -> None:
    async with world(decodes=0) as w, client(w, max_retries=3) as ai:
        request = asyncio.create_task(ai.chat.completions.create(model="fake", messages=MESSAGES))
        await asyncio.sleep(0.3)
        await w.add("decode", "late")
        assert (await request).choices[0].message.content == REPLY
