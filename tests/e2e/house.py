"""What the end-to-end tests do with a deployment: generate, look at the books, count what happened."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2

from services.launcher.deployment import Deployment

QUICK = {"PDSERVE_LEASE_S": "2", "PDSERVE_LOG_LEVEL": "warning"}
SMALL = QUICK | {"PDSERVE_NUM_BLOCKS": "512"}  # twice the tiny model's context; books of few blocks are read fast
BOOKS_S = 1.0
LEASE_MARGIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Answer:
    token_ids: list[int]
    finish_reason: str
    usage: dict[str, Any]
    request_id: str


@dataclass(slots=True)
class House:
    """A running deployment and a client."""

    deployment: Deployment
    model: str
    client: httpx2.Client

    def complete(self, prompt: Sequence[int] | str, max_tokens: int = 32, **more: Any) -> Answer:
        """One completion, greedy, that does not stop early; its token ids."""
        body = {
            "model": self.model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        }
        response = self.client.post(f"{self.deployment.gateway_url}/v1/completions", json=body)
        assert response.status_code == 200, response.text
        reply = response.json()
        choice = reply["choices"][0]
        return Answer(choice["token_ids"], choice["finish_reason"], reply["usage"], response.headers["x-request-id"])

    def complete_all(self, prompts: Sequence[Sequence[int]], max_tokens: int = 32, **more: Any) -> list[Answer]:
        """Many at once."""
        with ThreadPoolExecutor(max(1, len(prompts))) as pool:
            return list(pool.map(lambda prompt: self.complete(prompt, max_tokens, **more), prompts))

    def stream(self, body: dict[str, Any], route: str = "completions") -> Iterator[dict[str, Any]]:
        """The chunks of a stream; ends at [DONE]."""
        with self.client.stream("POST", f"{self.deployment.gateway_url}/v1/{route}", json=body) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "))
        raise AssertionError("the stream ended without [DONE]")

    def timeline(self, request_id: str) -> dict[str, Any]:
        """What the gateway measured of a request."""
        response = self.client.get(f"{self.deployment.gateway_url}/debug/requests/{request_id}")
        assert response.status_code == 200, response.text
        result: dict[str, Any] = response.json()
        return result

    def books(self) -> dict[str, dict[str, int]]:
        """Blocks and holders of every worker that runs."""
        workers = [w.name for w in self.deployment.workers if self.deployment.pid(w.name) is not None]
        return {name: self.books_of(name) for name in workers}

    def books_of(self, name: str) -> dict[str, int]:
        """One worker's; the connection is kept, so that a test may look often."""
        response = self.client.get(f"{self.deployment.members[name].admin_url}/debug/blocks")
        assert response.status_code == 200, response.text
        books: dict[str, int] = response.json()
        return books

    def metric(self, name: str, metric: str, **labels: str) -> float:
        """One number of one process; 0 where it was never set."""
        samples = self.deployment.samples(name)
        return samples.total(metric, **labels)

    def total(self, role: str, metric: str, **labels: str) -> float:
        """The sum over a pool."""
        return sum(self.metric(w.name, metric, **labels) for w in self.deployment.workers if w.role == role)

    def assert_books_close(self, within_s: float = BOOKS_S) -> None:
        """free + cached == total on every worker, nothing leased, quarantined, in transfer, or living."""
        deadline = time.monotonic() + within_s
        while (left := self._open_books()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, f"after {within_s} s: {left}"

    def _open_books(self) -> dict[str, dict[str, int]]:
        return {
            name: books
            for name, books in self.books().items()
            if books["free"] + books["cached"] != books["total"]
            or any(books[key] for key in ("leased", "quarantined", "sequences", "leases", "transfers"))
        }


@contextmanager
def house(model: str, **options: Any) -> Iterator[House]:
    """A deployment in float32, ready, and its client."""
    with Deployment(model=model, dtype="float32", **options) as deployment, httpx2.Client(timeout=120) as client:
        yield House(deployment, model, client)


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)
