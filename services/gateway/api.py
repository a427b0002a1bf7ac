"""The routes. Every answer that is not 2xx is an OpenAI error object."""

from __future__ import annotations

import asyncio
import importlib.metadata
import re
import secrets
import time
from collections.abc import Callable
from typing import TypeVar

import orjson
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, Counter, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway import body, exchange, intake
from services.gateway.errors import (
    BodyTooLargeError,
    GatewayError,
    NotFoundError,
    SlowBodyError,
    UnavailableError,
    from_status,
)
from services.gateway.gateway import Gateway
from services.gateway.intake import Ask
from services.gateway.schema import ChatBody, CompletionBody, GenerationBody, parse
from services.gateway.tokenizer import Tokenizer

REQUESTS = Counter("pdserve_gateway_requests_total", "HTTP requests answered", ["route", "status"])

INLINE_BODY_BYTES = 64 * 1024  # larger bodies are parsed in a thread
RETRY_AFTER_S = 1.0
_CLIENT_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/health",
    "/live",
    "/ready",
    "/metrics",
    "/version",
    "/openapi.json",
)

B = TypeVar("B", bound=GenerationBody)


def make_app(gateway: Gateway) -> ASGIApp:
    """The ASGI application."""
    app = FastAPI(title="pdserve", version=_version(), docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_exception_handler(GatewayError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    _add_generation(app, gateway)
    _add_models(app, gateway)
    _add_state(app, gateway)
    return Edge(app)


def _add_generation(app: FastAPI, gateway: Gateway) -> None:
    async def generate(request: Request, cls: type[B], make: Callable[[B, Tokenizer], Ask]) -> Response:
        arrived_s = time.monotonic()
        settings = gateway.settings
        if gateway.draining:
            raise UnavailableError("the gateway is draining", code="draining", retry_after_s=RETRY_AFTER_S)
        raw = await body.read(request, settings.max_body_bytes, settings.body_timeout_s)
        parsed = parse(cls, raw) if len(raw) <= INLINE_BODY_BYTES else await asyncio.to_thread(parse, cls, raw)
        _check_model(gateway, parsed.model)
        ask = make(parsed, gateway.tokenizer)
        service = intake.service_of(request.headers, parsed.priority)
        if gateway.num_live >= settings.max_live_requests:
            raise UnavailableError("too many requests are in flight", code="overloaded", retry_after_s=RETRY_AFTER_S)
        timeline = exchange.begin(request, request.url.path, request.scope["client_request_id"], arrived_s)
        gateway.timelines.add(timeline)
        return exchange.Exchange(gateway, ask, service, timeline)

    @app.post("/v1/chat/completions", openapi_extra=_takes(ChatBody))
    async def chat(request: Request) -> Response:
        return await generate(request, ChatBody, intake.of_chat)

    @app.post("/v1/completions", openapi_extra=_takes(CompletionBody))
    async def complete(request: Request) -> Response:
        return await generate(request, CompletionBody, intake.of_text)


def _add_models(app: FastAPI, gateway: Gateway) -> None:
    def view() -> dict[str, object]:
        return {
            "id": gateway.public_name,
            "object": "model",
            "created": gateway.created,
            "owned_by": "pdserve",
            "max_model_len": gateway.limits().context_tokens,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [view()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        _check_model(gateway, name)
        return _json(view())


def _add_state(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/health")
    @app.get("/live")
    async def live() -> Response:
        return _json({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        waits_for = gateway.ready()
        if waits_for is not None:
            raise UnavailableError(waits_for, code="not_ready", retry_after_s=RETRY_AFTER_S)
        return _json({"status": "ready"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/version")
    async def version() -> Response:
        return _json({"version": _version()})

    @app.get("/debug/requests/{name}")
    async def timeline(name: str) -> Response:
        found = gateway.timelines.find(name)
        if found is None:
            raise NotFoundError("no such request among the last ones", param="id", code="not_found")
        return _json(found.view(time.monotonic()))


class Edge:
    """The outermost layer: request ids in and out, every answer counted. Holds no state and buffers nothing."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request; X-Request-Id is the client's where it is well-formed, else ours."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"), "")
        request_id = given if _CLIENT_ID.fullmatch(given) else secrets.token_hex(16)
        scope["client_request_id"] = request_id

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                REQUESTS.labels(_route(scope["path"]), str(message["status"])).inc()
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        await self._app(scope, receive, send_named)


def _check_model(gateway: Gateway, name: str) -> None:
    if name != gateway.public_name:
        raise NotFoundError("the model does not exist here; see /v1/models", param="model", code="model_not_found")


def _json(value: object) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")


def _route(path: str) -> str:
    """A path as a metric label: of a fixed set, never a client's text."""
    if path.startswith("/v1/models/"):
        return "/v1/models"
    return path if path in _ROUTES else "/debug" if path.startswith("/debug/") else "other"


def _takes(cls: type[GenerationBody]) -> dict[str, object]:
    schema = cls.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _version() -> str:
    try:
        return importlib.metadata.version("pdserve")
    except importlib.metadata.PackageNotFoundError:
        return "0.0.0+source"


async def _on_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    refused = isinstance(error, BodyTooLargeError | SlowBodyError)
    cls = body.Refusal if refused else Response
    return cls(error.body(), error.status, error.headers(), media_type="application/json")


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = {404: "no such route", 405: f"{request.method} is not allowed here"}.get(error.status_code, error.detail)
    answer = await _on_error(request, from_status(error.status_code, message))
    answer.headers.update(error.headers or {})
    return answer


async def _on_disconnect(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it
