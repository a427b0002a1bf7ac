"""One generation over HTTP, from the checked body to the last byte.

1. Tokenise, prove the fit, and start one dispatch task per prompt.
2. Tasks feed their choices; the writer takes what is new and sends it. Headers wait for the first token, so that what
   fails before it is an HTTP status, or for the first ping, so that no proxy gives up on a queued request.
3. The client's disconnect is watched all along. It cancels everything, whatever stage it meets.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge, Histogram
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway import intake
from services.gateway.choice import Choice, Delta
from services.gateway.errors import GatewayError, InternalError
from services.gateway.formats import PING, Usage, Writer, error_event
from services.gateway.intake import Ask
from services.gateway.request import GenerationRequest, Service, Token
from services.gateway.timeline import Timeline
from services.runtime import log

if TYPE_CHECKING:
    from services.gateway.gateway import Gateway

TTFT = Histogram(
    "pdserve_gateway_ttft_seconds",
    "arrival to first token",
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
ITL = Histogram(
    "pdserve_gateway_itl_seconds",
    "gap between token deliveries of a choice",
    buckets=(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
E2E = Histogram(
    "pdserve_gateway_e2e_seconds",
    "arrival to last token of requests that finished",
    buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600),
)
PROMPT_TOKENS = Counter("pdserve_gateway_prompt_tokens_total", "prompt tokens of requests dispatched")
OUTPUT_TOKENS = Counter("pdserve_gateway_output_tokens_total", "tokens received for clients")
OUTCOMES = Counter("pdserve_gateway_generations_total", "generations by how they ended", ["route", "outcome"])
LIVE = Gauge("pdserve_gateway_live_requests", "generations in flight")

SSE_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class _Feeder:
    """A choice as dispatch sees it: takes tokens, stamps times, wakes the writer."""

    def __init__(self, choice: Choice, timeline: Timeline, news: asyncio.Event) -> None:
        self.choice = choice
        self._timeline = timeline
        self._news = news
        self._last_s = 0.0

    def __call__(self, tokens: Sequence[Token]) -> bool:
        now = time.monotonic()
        if self._timeline.first_token_s is None:
            self._timeline.first_token_s = now
            TTFT.observe(now - self._timeline.arrived_s)
        if self._last_s:
            ITL.observe(now - self._last_s)
        self._last_s = now
        OUTPUT_TOKENS.inc(len(tokens))
        self._news.set()
        return self.choice.feed(tokens)


class Exchange(Response):
    """The answer to one generation request; does its work while it is being sent."""

    def __init__(self, gateway: Gateway, ask: Ask, service: Service, timeline: Timeline) -> None:
        super().__init__()
        self._gateway = gateway
        self._ask = ask
        self._service = service
        self._timeline = timeline
        self._created = int(time.time())
        self._news = asyncio.Event()
        self._started = False  # headers are out
        self._sent_s = 0.0
        self._log = log.get_logger()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Works until the answer is sent or the client has left."""
        work = asyncio.create_task(self._answer(send))
        gone = asyncio.create_task(_disconnected(receive))
        self._count(+1)
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            left = not work.done()
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            self._count(-1)
            self._end("cancelled" if left else "failed")

    def _count(self, change: int) -> None:
        self._gateway.num_live += change
        LIVE.set(self._gateway.num_live)

    async def _answer(self, send: Send) -> None:
        try:
            await self._generate(send)
            self._end("ok")
        except GatewayError as error:
            await self._fail(error, send)
        except OSError:
            self._end("cancelled")  # the client left while we were sending
        except Exception as error:  # noqa: BLE001 the edge of the process: logged by type, since a message may hold text
            where = error.__traceback__
            while where is not None and where.tb_next is not None:
                where = where.tb_next
            place = f"{where.tb_frame.f_code.co_filename}:{where.tb_lineno}" if where is not None else ""
            self._log.error(
                "request broke", kind=type(error).__name__, place=place, request_id=self._timeline.request_id
            )
            await self._fail(InternalError("internal error"), send)

    async def _generate(self, send: Send) -> None:
        ask, timeline = self._ask, self._timeline
        limits = self._gateway.limits()
        prompts = await intake.tokenise(ask, self._gateway.tokenizer, limits)
        timeline.tokenise_s = time.monotonic() - timeline.arrived_s
        samplings = [intake.fitted(ask, len(prompt), limits) for prompt in prompts]
        timeline.num_prompt_tokens = sum(map(len, prompts))
        PROMPT_TOKENS.inc(timeline.num_prompt_tokens)
        usage_in_stream = ask.stream and ask.include_usage
        name = self._gateway.public_name
        writer = Writer(ask.form, timeline.request_id, self._created, name, usage_in_stream, ask.return_token_ids)
        tasks: list[asyncio.Task[None]] = []
        choices: list[Choice] = []
        try:
            for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
                choice = Choice(index, self._gateway.tokenizer, sampling, ask.stops, ask.return_token_ids)
                deadline_s = timeline.arrived_s + self._gateway.settings.request_timeout_s
                name = timeline.request_id if len(prompts) == 1 else f"{timeline.request_id}-{index}"
                request = GenerationRequest(name, prompt, sampling, self._service, deadline_s)
                choices.append(choice)
                tasks.append(asyncio.create_task(self._serve(request, choice)))
            await (
                self._stream(writer, choices, tasks, send) if ask.stream else self._whole(writer, choices, tasks, send)
            )
            E2E.observe(time.monotonic() - timeline.arrived_s)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            timeline.num_output_tokens = sum(choice.num_tokens for choice in choices)

    async def _serve(self, request: GenerationRequest, choice: Choice) -> None:
        """One choice, to its end."""
        feed = _Feeder(choice, self._timeline, self._news)
        records = self._timeline.open_choice()
        try:
            choice.end(await self._gateway.dispatcher.serve(request, feed, records))
        finally:
            self._news.set()

    async def _whole(
        self, writer: Writer, choices: Sequence[Choice], tasks: Sequence[asyncio.Task[None]], send: Send
    ) -> None:
        await asyncio.gather(*tasks)
        deltas = [choice.take() or Delta("", (), choice.finish_reason) for choice in choices]
        body = writer.whole(deltas, self._usage(choices))
        await self._send_whole(200, body, {}, send)
        self._timeline.sent_s = time.monotonic()

    async def _stream(
        self, writer: Writer, choices: Sequence[Choice], tasks: Sequence[asyncio.Task[None]], send: Send
    ) -> None:
        self._sent_s = time.monotonic()
        pinger = asyncio.create_task(self._wake_for_pings())
        opening = writer.opening(len(choices))
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                done = all(task.done() for task in tasks)
                chunks = [writer.delta(choice.index, delta) for choice in choices if (delta := choice.take())]
                if chunks:
                    await self._send_part(opening + b"".join(chunks), send)
                    opening = b""
                elif time.monotonic() - self._sent_s >= self._gateway.settings.ping_s:
                    await self._send_part(PING, send)
                for task in tasks:
                    if task.done():
                        task.result()  # raises what ended the request
                if done:
                    break
            await self._send_part(writer.ending(self._usage(choices)), send, more=False)
            self._timeline.sent_s = time.monotonic()
        finally:
            pinger.cancel()

    async def _wake_for_pings(self) -> None:
        """Wakes the writer whenever a ping may be due."""
        ping_s = self._gateway.settings.ping_s
        while True:
            await asyncio.sleep(max(0.001, self._sent_s + ping_s - time.monotonic()))
            self._news.set()

    async def _send_part(self, body: bytes, send: Send, *, more: bool = True) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": list(SSE_HEADERS)})
        await send({"type": "http.response.body", "body": body, "more_body": more})
        self._sent_s = time.monotonic()

    async def _fail(self, error: GatewayError, send: Send) -> None:
        self._end(type(error).__name__)
        try:
            if self._started:
                await send({"type": "http.response.body", "body": error_event(error.body()), "more_body": False})
            else:
                await self._send_whole(error.status, error.body(), error.headers(), send)
        except OSError:
            return  # the client left

    async def _send_whole(self, status: int, body: bytes, headers: Mapping[str, str], send: Send) -> None:
        named = {"content-type": "application/json", "content-length": str(len(body))} | dict(headers)
        raw = [(name.encode(), value.encode()) for name, value in named.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})
        await send({"type": "http.response.body", "body": body})

    def _usage(self, choices: Sequence[Choice]) -> Usage:
        timeline = self._timeline
        cached = sum(records[0].num_cached_tokens for records in timeline.choices if records)
        return Usage(timeline.num_prompt_tokens, sum(choice.num_tokens for choice in choices), cached)

    def _end(self, outcome: str) -> None:
        if self._timeline.ended_s is None:
            self._timeline.end(time.monotonic(), outcome)
            OUTCOMES.labels(self._timeline.route, outcome).inc()


def begin(request: Request, route: str, client_request_id: str, arrived_s: float) -> Timeline:
    """The timeline of a request that just arrived, under a random id of our own."""
    request_id = secrets.token_hex(16)
    return Timeline(request_id, client_request_id or request_id, route, arrived_s)


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
