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
from tests.e2e.house import LEASE_MARGIN_S, SMALL, House, house

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

WAVES = 5  # of ten clients for each stage
MOST_WAVES = 20
WANTED = 20


@pytest.fixture(scope="module")
def slow_house() -> Iterator[House]:
    """Prefill computes one prompt at a time in steps of one token; every transfer starts 0.8 s late."""
    env = {
        "*": SMALL,
        "prefill": {"PDSERVE_TOKEN_BUDGET": "1", "PDSERVE_MAX_NUM_SEQS": "1"},
        "decode": {"PDSERVE_FAULT": "slow_transfer_s:0.8"},
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


STAGES = {"queued": "prefill", "prefill": "prefill", "transfer": "decode", "decode": "decode"}  # who counts it


def cancelled(house: House, stage: str) -> float:
    return house.total(STAGES[stage], "pdserve_worker_cancelled_total", stage=stage)


def leave_in(house: House, pool: ThreadPoolExecutor, stage: str, number: int) -> None:
    """Ten clients that mean to leave in a stage; on a machine that is slow or fast some leave in another."""
    seeds = [1000 * list(STAGES).index(stage) + 10 * number + i for i in range(10)]
    match stage:
        case "queued":  # one long prompt holds the only seat for about a second; those behind it leave
            holder = pool.submit(leave_after, house, body(3000, 4, seeds[0]), 1.2)
            time.sleep(0.15)
            list(pool.map(lambda seed: leave_after(house, body(64, 4, seed), 0.3), seeds[1:]))
            holder.result()
        case "prefill":  # one at a time, in the middle of a long prompt
            for seed in seeds:
                leave_after(house, body(1500, 4, seed), 0.15)
        case "transfer":  # token 0 has been sampled, the blocks wait for their delayed transfer
            list(pool.map(lambda seed: leave_after_tokens(house, body(16, 64, seed), 1), seeds))
        case "decode":
            list(pool.map(lambda seed: leave_after_tokens(house, body(16, 400, seed), 6), seeds))


def test_two_hundred_disconnects(slow_house: House) -> None:
    num_left = 0
    with ThreadPoolExecutor(10) as pool:
        for stage in STAGES:
            for number in range(MOST_WAVES):
                if number >= WAVES and cancelled(slow_house, stage) >= WANTED:
                    break
                leave_in(slow_house, pool, stage, number)
                num_left += 10
    assert num_left >= 200
    counts = {stage: cancelled(slow_house, stage) for stage in STAGES}
    assert all(count >= WANTED for count in counts.values()), counts
    slow_house.assert_books_close(LEASE_MARGIN_S)
    answer = slow_house.complete([5] * 20, 4)
    assert len(answer.token_ids) == 4
