"""Faults made for real, restarts switched off: kills, freezes, corruption, a lossy bus, a drain."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import httpx2
import pytest

from services.launcher.deployment import Deployment
from tests.e2e import reference
from tests.e2e.conftest import TINY
from tests.e2e.house import LEASE_MARGIN_S, SMALL, Answer, House, wait_until
from tests.e2e.house import house as open_house
from tests.e2e.nats_proxy import Mischief, NatsProxy
from tests.e2e.test_tiny import random_prompts

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SLOW_CHUNKS = {"PDSERVE_TOKEN_BUDGET": "1"}  # a step per token


def served(prefill: int, decode: int, env: dict[str, dict[str, str]] | None = None) -> AbstractContextManager[House]:
    return open_house(TINY, prefill=prefill, decode=decode, env={"*": SMALL, **(env or {})})


def in_background(house: House, prompt: list[int], num_new: int, **more: Any) -> Future[Answer]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(house.complete, prompt, num_new, **more)
    pool.shutdown(wait=False)
    return future


def busy(house: House, role: str) -> list[str]:
    """Workers of a pool that run something now."""
    workers = [w.name for w in house.deployment.workers if w.role == role and house.deployment.pid(w.name) is not None]
    return [name for name in workers if house.books_of(name)["sequences"] > 0]


def test_prefill_workers_are_killed_mid_prefill_until_none_is_left() -> None:
    """Of two, one: the other takes over. Then the only one: decode serves alone, and says so in a metric."""
    first, second = random_prompts((1500, 1500), seed=11)
    expected = reference.here(TINY, [first, second], 16)
    with served(2, 1, {"prefill": SLOW_CHUNKS}) as house:
        answer = killed_mid_prefill(house, first)
        assert answer.token_ids == expected[0]
        timeline = house.timeline(answer.request_id)
        assert (timeline["num_attempts"], timeline["path"]) == (2, "disaggregated")
        assert house.total("decode", "pdserve_worker_prompt_tokens_computed") == 0
        house.assert_books_close(LEASE_MARGIN_S)
        answer = killed_mid_prefill(house, second)
        assert answer.token_ids == expected[1]
        assert house.timeline(answer.request_id)["path"] == "colocated"
        assert house.metric("gateway", "pdserve_gateway_fallbacks_total") >= 1
        assert house.metric("gateway", "pdserve_gateway_attempts_total", path="colocated") >= 1
        assert house.total("decode", "pdserve_worker_prompt_tokens_computed") > 0
        house.assert_books_close(LEASE_MARGIN_S)


def killed_mid_prefill(house: House, prompt: list[int]) -> Answer:
    """Sends the prompt and kills whoever computes it."""
    answer = in_background(house, prompt, 16)
    wait_until(lambda: bool(busy(house, "prefill")), "some prefill worker computes")
    house.deployment.kill(busy(house, "prefill")[0])
    return answer.result(60)


def test_decode_is_lost_mid_stream_and_the_stream_goes_on() -> None:
    """One decode worker is killed; then one of those left is frozen."""
    prompts = random_prompts((50, 50), seed=13)
    num_new = 400
    expected = reference.here(TINY, prompts, num_new)
    with served(1, 3) as house:
        assert stream_while_hurt(house, prompts[0], num_new, signal.SIGKILL) == expected[0]
        house.assert_books_close(LEASE_MARGIN_S)
        assert stream_while_hurt(house, prompts[1], num_new, signal.SIGSTOP) == expected[1]
        house.assert_books_close(LEASE_MARGIN_S)


def stream_while_hurt(house: House, prompt: list[int], num_new: int, number: signal.Signals) -> list[int]:
    """The tokens of a stream whose decode worker gets a signal after 20 of them; a frozen one is killed at the end."""
    body = {"model": TINY, "prompt": prompt, "max_tokens": num_new, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True}
    got: list[int] = []
    hurt = ""
    for chunk in house.stream(body):
        got += [token for choice in chunk["choices"] for token in choice.get("token_ids") or ()]
        if not hurt and len(got) > 20:
            hurt = busy(house, "decode")[0]
            house.deployment.signal(hurt, number)
    house.deployment.kill(hurt)
    return got


def test_a_flipped_byte_is_caught_and_recomputed() -> None:
    (prompt,) = random_prompts((200,), seed=14)
    expected = reference.here(TINY, [prompt], 24)
    with served(1, 1, {"decode": {"PDSERVE_FAULT": "corrupt_block:3"}}) as house:
        answer = house.complete(prompt, 24)
        assert answer.token_ids == expected[0]
        assert house.total("decode", "pdserve_decode_corrupt_blocks_total") == 1
        assert house.timeline(answer.request_id)["num_attempts"] == 2
        # The block and its descendants were dropped at their source, so the prompt was computed there again.
        assert house.total("prefill", "pdserve_worker_prompt_tokens_computed") > len(prompt)
        house.assert_books_close(LEASE_MARGIN_S)


def test_a_frozen_prefill_workers_late_bytes_change_nobodys_tokens() -> None:
    """Over tcp: stopped in mid-transfer, its request cancelled, the pool filled with others, then thawed."""
    (victim,) = random_prompts((3000,), seed=15)
    others = random_prompts((200,) * 6, seed=16)
    expected = reference.here(TINY, others, 40)
    tcp = {"UCX_TLS": "tcp"}
    env = {
        "prefill": {**tcp, "PDSERVE_NUM_BLOCKS": "400", "PDSERVE_MAX_LEASED_SHARE": "1"},
        "decode": {**tcp, "PDSERVE_NUM_BLOCKS": "260", "PDSERVE_MAX_INBOUND_SHARE": "1"},
    }
    env["decode"]["PDSERVE_FAULT"] = "slow_transfer_s:0.5"
    with served(1, 1, env) as house:
        stop = threading.Event()
        client = threading.Thread(target=lambda: disconnected_stream(house, victim, stop))
        client.start()
        froze = freeze_in_transfer(house)
        stop.set()
        client.join()
        assert froze
        wait_until(lambda: decode_books(house)["quarantined"] > 0, "the cancel reached decode")
        quarantined = house.total("decode", "pdserve_decode_quarantined_blocks_total")
        assert quarantined > 0
        assert decode_books(house)["quarantined"] == quarantined
        answers = house.complete_all(others, 40)  # no prefill worker answers: decode serves alone
        house.deployment.signal("prefill-0", signal.SIGCONT)
        wait_until(lambda: decode_books(house)["quarantined"] == 0, "late bytes landed, quarantine ended", 30)
        assert house.total("decode", "pdserve_kvtransfer_late_blocks_total") > 0
        again = house.complete_all(others, 40)
        for got in (answers, again):
            assert [answer.token_ids for answer in got] == expected
        house.assert_books_close(LEASE_MARGIN_S)


def decode_books(house: House) -> dict[str, int]:
    """The books of decode-0; a frozen prefill worker answers nothing."""
    return house.books_of("decode-0")


def disconnected_stream(house: House, prompt: list[int], stop: threading.Event) -> None:
    """A client that reads nothing and leaves when told to."""
    body = json.dumps({"model": TINY, "prompt": prompt, "max_tokens": 50, "ignore_eos": True, "stream": True}).encode()
    host, port = house.deployment.members["gateway"].address.split(":")
    with socket.create_connection((host, int(port))) as link:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        link.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        stop.wait(60)


def freeze_in_transfer(house: House) -> bool:
    """Stops the prefill worker once decode has room reserved, before its delayed pull; sees the pull in progress."""
    wait_until(lambda: decode_books(house)["used"] > 0, "decode reserved room")
    house.deployment.signal("prefill-0", signal.SIGSTOP)
    wait_until(lambda: decode_books(house)["transfers"] > 0, "a pull is in progress")
    time.sleep(0.5)
    return bool(decode_books(house)["transfers"] > 0)


def stream_of(house: House, prompt: list[int], num_new: int) -> tuple[list[int], str, str | None]:
    """Token ids, text and finish reason of a stream, in order."""
    body = {"model": TINY, "prompt": prompt, "max_tokens": num_new, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True}
    tokens: list[int] = []
    text = ""
    finish = None
    for chunk in house.stream(body):
        for choice in chunk["choices"]:
            tokens += choice.get("token_ids") or ()
            text += choice["text"]
            finish = choice["finish_reason"] or finish
    return tokens, text, finish


def test_a_bus_that_drops_repeats_and_reorders_changes_nothing() -> None:
    prompts = random_prompts((30, 60, 90, 120), seed=17)
    num_new = 200
    expected = reference.here(TINY, prompts, num_new)
    mischief = Mischief()
    gateway_env: dict[str, str] = {}
    deployment = Deployment(model=TINY, dtype="float32", env={"*": SMALL, "gateway": gateway_env})
    proxy = NatsProxy(deployment.members["nats"].port, mischief, seed=1)
    gateway_env["PDSERVE_NATS_URL"] = f"nats://127.0.0.1:{proxy.port}"
    try:
        with deployment, httpx2.Client(timeout=120) as client:
            house = House(deployment, TINY, client)
            quiet = [stream_of(house, prompt, num_new) for prompt in prompts]
            assert [tokens for tokens, _, _ in quiet] == expected
            mischief.drop = mischief.repeat = mischief.reorder = 0.05
            assert [stream_of(house, prompt, num_new) for prompt in prompts] == quiet
            assert min(mischief.counts.values()) > 0, mischief.counts
            assert house.total("decode", "pdserve_worker_replays_total", answer="tokens") > 0
            house.assert_books_close(LEASE_MARGIN_S)
    finally:
        proxy.close()


def test_a_nats_restart_a_drain_and_a_killed_gateway() -> None:
    """One after another on the same processes; the books close after each."""
    with served(1, 2) as house:
        nats_restarts_mid_stream(house)
        a_drained_decode_worker_finishes_what_it_has(house)
        a_killed_gateway_leaves_nothing_behind(house)


def nats_restarts_mid_stream(house: House) -> None:
    (prompt,) = random_prompts((50,), seed=18)
    num_new = 500
    expected = reference.here(TINY, [prompt], num_new)
    body = {"model": TINY, "prompt": prompt, "max_tokens": num_new, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True}
    got: list[int] = []
    restarted = False
    for chunk in house.stream(body):
        got += [token for choice in chunk["choices"] for token in choice.get("token_ids") or ()]
        if not restarted and len(got) > 30:
            restarted = True
            house.deployment.kill("nats")
            house.deployment.restart("nats")
    assert restarted and got == expected[0]
    house.assert_books_close(LEASE_MARGIN_S)


def a_drained_decode_worker_finishes_what_it_has(house: House) -> None:
    (prompt,) = random_prompts((50,), seed=19)
    expected = reference.here(TINY, [prompt], 1000)
    answer = in_background(house, prompt, 1000)
    wait_until(lambda: bool(busy(house, "decode")), "decode runs")
    assert house.deployment.stop(busy(house, "decode")[0]) == 0
    assert answer.result(60).token_ids == expected[0]
    assert house.timeline(answer.result().request_id)["num_attempts"] == 1
    assert len(house.complete(prompt, 4).token_ids) == 4
    house.assert_books_close(LEASE_MARGIN_S)


def a_killed_gateway_leaves_nothing_behind(house: House) -> None:
    (prompt,) = random_prompts((50,), seed=20)
    answer = in_background(house, prompt, 3000)
    wait_until(lambda: bool(busy(house, "decode")), "decode runs")
    house.deployment.kill("gateway")
    with pytest.raises(httpx2.HTTPError):
        answer.result(10)
    house.assert_books_close(LEASE_MARGIN_S)
