"""The tiny model in every mode: borders of blocks and chunks, one token, preemption, eviction, sampling."""

from __future__ import annotations

import random

import pytest

from tests.e2e import reference
from tests.e2e.conftest import TINY
from tests.e2e.house import LEASE_MARGIN_S, House

pytestmark = [pytest.mark.e2e]

BORDERS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)  # blocks of 16, chunks of 64


def random_prompts(lengths: tuple[int, ...], seed: int) -> list[list[int]]:
    chooser = random.Random(seed)
    return [[chooser.randrange(256) for _ in range(length)] for length in lengths]


def check(served: House, prompts: list[list[int]], num_new: int) -> None:
    expected = reference.here(TINY, prompts, num_new)
    answers = served.complete_all(prompts, num_new)
    assert reference.assert_identical(TINY, prompts, [answer.token_ids for answer in answers], expected) == 0


def test_borders(tiny_house: House, mode: str) -> None:
    prompts = random_prompts(BORDERS, seed=1)
    for some in (prompts[:8], prompts[8:]):  # all at once want 71 of the 64 blocks: whoever is preempted recomputes
        check(tiny_house, some, 20)
    assert tiny_house.total("decode", "pdserve_worker_preemptions") == 0
    if mode != "colocated":
        assert tiny_house.total("decode", "pdserve_worker_prompt_tokens_computed") == 0
        assert tiny_house.total("decode", "pdserve_decode_handoffs_total", outcome="joined") >= len(BORDERS)
    tiny_house.assert_books_close(LEASE_MARGIN_S)


def test_one_token(tiny_house: House, mode: str) -> None:
    prompts = random_prompts((1, 16, 40), seed=2)
    expected = reference.here(TINY, prompts, 1)
    for prompt, wanted in zip(prompts, expected, strict=True):
        answer = tiny_house.complete(prompt, 1)
        assert (answer.token_ids, answer.finish_reason) == (wanted, "length")
        assert answer.usage["completion_tokens"] == 1
    if mode != "colocated":
        assert tiny_house.total("decode", "pdserve_decode_handoffs_total", outcome="finished_at_prefill") == 3
    tiny_house.assert_books_close(LEASE_MARGIN_S)


def test_a_stop_string_leaves_an_account(tiny_house: House, mode: str) -> None:
    """The gateway finds it and cancels: decode still says what it did, and what it had cached."""
    prompt = random_prompts((100,), seed=6)[0]
    body = {"model": TINY, "prompt": prompt, "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    reply = tiny_house.client.post(f"{tiny_house.deployment.gateway_url}/v1/completions", json=body).json()
    stop = max(reply["choices"][0]["text"][20:150].split("\ufffd"), key=len)  # no part of a character
    for number in range(2):
        answer = tiny_house.complete(prompt, 300, stop=stop)
        assert answer.finish_reason == "stop" and len(answer.token_ids) < 300
        view = tiny_house.timeline(answer.request_id)
        assert view["stages"]["decode"] > 0 and view["num_attempts"] == 1, number
        cached = answer.usage["prompt_tokens_details"]["cached_tokens"]
        assert cached == 96  # the first request left 6 full blocks
        assert (view["num_pulled_blocks"] > 0) is (mode != "colocated")
    tiny_house.assert_books_close(LEASE_MARGIN_S)


def test_eviction(tiny_house: House) -> None:
    """Twice the pool's blocks go through it; what was evicted is computed again, and right."""
    prompts = random_prompts((300,) * 7, seed=3)
    for _ in range(2):
        check(tiny_house, prompts, 8)
    assert tiny_house.total("decode", "pdserve_worker_evictions") > 0
    tiny_house.assert_books_close(LEASE_MARGIN_S)


def test_seeded_sampling_does_not_depend_on_the_company(tiny_house: House) -> None:
    prompts = random_prompts((20, 30, 40), seed=4)
    alone = [tiny_house.complete(p, 16, temperature=1.0, seed=i).token_ids for i, p in enumerate(prompts)]
    many = [p for p in prompts for _ in range(3)]
    assert tiny_house.complete_all(many, 4, temperature=0.7, seed=9)[0].token_ids
    again = [tiny_house.complete(p, 16, temperature=1.0, seed=i).token_ids for i, p in enumerate(prompts)]
    assert again == alone
    assert alone[0] != tiny_house.complete(prompts[0], 16, temperature=1.0, seed=99).token_ids


def test_preemption(tiny_house: House) -> None:
    """Eight sequences that want 22 blocks each in the end, in a pool of 64: three at once are too many."""
    before = tiny_house.total("decode", "pdserve_worker_preemptions")
    check(tiny_house, random_prompts((40,) * 8, seed=5), 300)
    assert tiny_house.total("decode", "pdserve_worker_preemptions") > before
    tiny_house.assert_books_close(LEASE_MARGIN_S)
