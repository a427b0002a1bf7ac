"""The books close after 200 disconnects: at least 20 while queued, in prefill, in transfer and in decode."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from tests.e2e.conftest import TINY
from tests.e2e.house import LEASE_MARGIN_S, SMALL, House, house, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

PER_STAGE = 50
WANTED = 20


@pytest.fixture(scope="module")
def slow_house() -> Iterator[House]:
    """Prefill computes one prompt at a time in steps of one token; every transfer starts 0.4 s late."""
    env = {
        "*": SMALL,
        "prefill": {"PDSERVE_TOKEN_BUDGET": "1", "PDSERVE_MAX_NUM_SEQS": "1"},
        "decode": {"PDSERVE_FAULT": "slow_transfer_s:0.4"},
    }
    with house(TINY, env=env) as made:
        yield made


def body(num_prompt: int, num_new: int, seed: int) -> dict[str, Any]:
    chooser = random.Random(seed)
    prompt = [chooser.randrange(256) for _ in range(num_prompt)]
    return {"model": TINY, "prompt": prompt, "max_tokens": num_new, "ignore_eos": True, "stream": True, "seed": seed}


def leave_after(house: House, request: dict[str, Any], seconds: float) -> None:
    """Hangs up on a stream that has said nothing yet."""
    url = f"{house.deployment.gateway_url}/v1/completions"
    with httpx2.Client(timeout=httpx2.Timeout(30, read=seconds), verify=False) as client:
        try:
            with client.stream("POST", url, json=request) as response:
                for _ in response.iter_lines():
                    pass
        except httpx2.ReadTimeout:
            return


def leave_after_tokens(house: House, request: dict[str, Any], num_tokens: int) -> None:
    """Hangs up after so many chunks with text or tokens."""
    url = f"{house.deployment.gateway_url}/v1/completions"
    request = request | {"return_token_ids": True}
    seen = 0
    with httpx2.Client(timeout=60, verify=False) as client, client.stream("POST", url, json=request) as response:
        for line in response.iter_lines():
            seen += line.startswith("data: {") and '"token_ids":[' in line.replace(" ", "")
            if seen >= num_tokens:
                return
    raise AssertionError(f"the stream ended after {seen} chunks")


def cancelled(house: House, role: str, stage: str) -> float:
    return house.total(role, "pdserve_worker_cancelled_total", stage=stage)


def test_two_hundred_disconnects(slow_house: House) -> None:
    with ThreadPoolExecutor(10) as pool:
        # One long prompt holds the only seat for about a second; those behind it are queued and leave.
        for wave in range(PER_STAGE // 10):
            holder = pool.submit(leave_after, slow_house, body(3000, 4, 1000 + wave), 1.2)
            time.sleep(0.15)
            list(pool.map(lambda i: leave_after(slow_house, body(64, 4, i), 0.3), range(wave * 100, wave * 100 + 9)))
            holder.result()
        wait_until(lambda: cancelled(slow_house, "prefill", "queued") >= WANTED, "20 left while queued")
        # One at a time, in the middle of a long prompt.
        for i in range(PER_STAGE):
            leave_after(slow_house, body(1500, 4, 2000 + i), 0.15)
        # Token 0 has been sampled, the blocks wait for their delayed transfer.
        list(pool.map(lambda i: leave_after_tokens(slow_house, body(40, 64, 3000 + i), 1), range(PER_STAGE)))
        # Well into decode.
        list(pool.map(lambda i: leave_after_tokens(slow_house, body(20, 400, 4000 + i), 6), range(PER_STAGE)))
    counts = {
        "queued": cancelled(slow_house, "prefill", "queued"),
        "prefill": cancelled(slow_house, "prefill", "prefill"),
        "transfer": cancelled(slow_house, "decode", "transfer"),
        "decode": cancelled(slow_house, "decode", "decode"),
    }
    assert all(count >= WANTED for count in counts.values()), counts
    slow_house.assert_books_close(LEASE_MARGIN_S)
    answer = slow_house.complete([5] * 20, 4)
    assert len(answer.token_ids) == 4
