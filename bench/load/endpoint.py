"""What has to be known of the endpoint before the load: its model, and whether it takes token ids."""

from collections.abc import Mapping
from typing import Any

import httpx2

from bench.load.stream import message_of

BOUNDS = (32_000, 8_000, 1_000, 256)  # vocabulary sizes to try where no tokenizer is at hand
LOWEST_SHARE = 8  # ids below bound/8 are left out: special tokens lie there, or single bytes


class EndpointError(RuntimeError):
    """Nothing answers there, or not as an OpenAI-compatible server does."""


class Endpoint:
    """A server, asked one thing at a time, before any clock runs."""

    def __init__(self, base_url: str, headers: Mapping[str, str]) -> None:
        self._client = httpx2.Client(base_url=base_url, headers=dict(headers), timeout=120.0, trust_env=False)

    def close(self) -> None:
        """Closes its connection."""
        self._client.close()

    def first_model(self) -> str:
        """The first that /v1/models lists. Raises EndpointError."""
        answer = self._ask("GET", "/v1/models", None)
        try:
            answer.raise_for_status()
            return str(answer.json()["data"][0]["id"])
        except (httpx2.HTTPStatusError, ValueError, KeyError, IndexError, TypeError) as error:
            raise EndpointError(f"/v1/models names no model: {answer.status_code}: {answer.text[:200]}") from error

    def largest_vocabulary(self, endpoint: str, model: str, extra: Mapping[str, Any]) -> int | None:
        """The largest of BOUNDS below which token ids are taken; None where only text is. Raises EndpointError."""
        for bound in BOUNDS:
            body = {"model": model, "prompt": [bound - 1], "max_tokens": 1} | dict(extra)
            answer = self._ask("POST", endpoint, body)
            if answer.status_code == 200:
                return bound
            if answer.status_code not in (400, 422):
                raise EndpointError(f"{endpoint} answers {answer.status_code}: {_said(answer)}")
        return None

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> httpx2.Response:
        try:
            return self._client.request(method, path, json=body)
        except httpx2.HTTPError as error:
            raise EndpointError(f"{method} {path}: {type(error).__name__}: {error}") from error


def _said(answer: httpx2.Response) -> str:
    try:
        return message_of(answer.json().get("error"))
    except (ValueError, AttributeError):
        return answer.text[:200]
