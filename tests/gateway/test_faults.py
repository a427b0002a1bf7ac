"""What the client sees when messages are lost and workers die: the same text, after a pause."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from services.gateway import dispatch, keeper
from services.gateway.membership import Role
from tests.conftest import NatsServer
from tests.gateway.conftest import REPLY, World, WorldMaker, until
from tests.gateway.fake_worker import FakeWorker
from tests.gateway.test_chat import chat, events

pytestmark = pytest.mark.anyio


def count(counter: Any, *labels: str) -> float:
    return float(counter.labels(*labels)._value.get())


async def stream_text(w: World, **more: Any) -> str:
    """The text of a streamed chat, which must have ended well."""
    answer = await w.http.post("/v1/chat/completions", json=chat(stream=True, **more))
    assert answer.status_code == 200, answer.text
    chunks = events(answer.text)
    assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")
    return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)


class Mangler:
    """Loses, repeats and reorders messages of a worker."""

    def __init__(self, seed: int, lost: float = 0.2, repeated: float = 0.2, late: float = 0.2) -> None:
        self._random = random.Random(seed)
        self._shares = (lost, repeated, late)
        self._late: list[Any] = []

    def __call__(self, batch: Any) -> Sequence[Any]:
        lost, repeated, late = self._shares
        draw = self._random.random()
        waiting, self._late = self._late, []
        if draw < lost:
            return waiting
        if draw < lost + repeated:
            return [batch, *waiting, batch]
        if draw < lost + repeated + late:
            self._late = [batch]
            return waiting
        return [batch, *waiting]


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_lost_repeated_and_reordered_messages(world: WorldMaker, seed: int) -> None:
    async with world() as w:
        for worker in w.workers:
            worker.mangle = Mangler(seed)
        texts = await asyncio.gather(*(stream_text(w) for _ in range(4)))
        assert texts == [REPLY] * 4


async def test_every_message_lost(world: WorldMaker) -> None:
    async with world(silence_s=0.2) as w:
        for worker in w.workers:
            worker.mangle = lambda _: []
        assert await stream_text(w) == REPLY
        assert w.decodes[0].replays


async def test_a_lost_finish(world: WorldMaker) -> None:
    async with world() as w:
        w.decodes[0].mangle = lambda batch: [] if batch.events[0].finish_reason else [batch]
        before = count(keeper.REPLAYS, "finish")
        assert await stream_text(w) == REPLY
        assert count(keeper.REPLAYS, "finish") == before + 1


async def test_silence_is_a_gap(world: WorldMaker) -> None:
    """The worker stalls after a token that was lost: no later event shows the gap, and renewals do."""
    async with world(renew_s=0.1, silence_s=30) as w:
        w.decodes[0].stall_at = 10
        w.decodes[0].mangle = lambda batch: [] if batch.events[0].first_index == 9 else [batch]
        before = count(keeper.REPLAYS, "renewal")
        request = asyncio.create_task(stream_text(w))
        await until(lambda: w.decodes[0].replays)
        assert w.decodes[0].replays[0][1] == 9
        assert count(keeper.REPLAYS, "renewal") > before
        request.cancel()
        await w.idle()


async def test_events_of_strangers_are_ignored(world: WorldMaker) -> None:
    """Neither another epoch of the worker, nor another worker, nor another attempt may add tokens."""

    def forge(batch: Any) -> list[Any]:
        forged = []
        for change in ("epoch", "worker_id", "handoff"):
            copy = type(batch)()
            copy.CopyFrom(batch)
            copy.events[0].tokens[0].token_id = 77
            if change == "handoff":
                copy.events[0].attempt.handoff_id = "0" * 32
            else:
                setattr(copy.worker, change, "f" * 32)
            forged.append(copy)
        return [*forged, batch]

    async with world() as w:
        for worker in w.workers:
            worker.mangle = forge
        assert await stream_text(w) == REPLY


async def test_nats_restarts_in_mid_stream(world: WorldMaker) -> None:
    server = NatsServer()
    server.start()
    try:
        async with world(nats=server.url, silence_s=30) as w:
            w.script.step_s = 0.02
            before = count(keeper.REPLAYS, "reconnect")
            request = asyncio.create_task(stream_text(w))
            await until(lambda: w.decodes and any(len(held.tokens) > 10 for held in w.decodes[0].held.values()))
            server.stop()
            await asyncio.sleep(0.3)
            server.start()
            assert await request == REPLY
            assert count(keeper.REPLAYS, "reconnect") > before
    finally:
        server.stop()


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_decode_lost_in_mid_stream(world: WorldMaker, how: str) -> None:
    """The other worker is forced to continue behind what was received; the client sees a pause."""
    async with world(prefills=1, decodes=2, renew_s=0.1, renew_deadline_s=0.2) as w:
        w.script.step_s = 0.01
        request = asyncio.create_task(stream_text(w, seed=5))
        await until(lambda: any(len(held.tokens) > 20 for d in w.decodes for held in d.held.values()))
        first = next(d for d in w.decodes if d.works)
        other = next(d for d in w.decodes if d is not first)
        await (first.stop() if how == "killed" else _freeze(first))
        assert await request == REPLY
        again = other.works[0]
        assert again.attempt.attempt == 2
        assert again.attempt.request_id == first.works[0].attempt.request_id
        assert again.attempt.handoff_id != first.works[0].attempt.handoff_id
        num_forced = len(again.forced_token_ids)
        assert num_forced > 15
        assert list(again.forced_token_ids) == w.script.reply[:num_forced]
        assert again.sampling.seed == 5


async def _freeze(worker: FakeWorker) -> None:
    worker.freeze()


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_prefill_lost(world: WorldMaker, how: str) -> None:
    """Another prefill worker takes over; without one, decode serves alone, and that is counted."""
    async with world(prefills=2, renew_s=0.1, renew_deadline_s=0.2) as w:
        for _ in range(2):
            w.script.prefill_s = 5.0
            request = asyncio.create_task(stream_text(w))
            await until(lambda: any(p.live for p in w.prefills))
            victim = next(p for p in w.prefills if p.live)
            w.script.prefill_s = 0.005
            await (victim.stop() if how == "killed" else _freeze(victim))
            before = count(dispatch.FALLBACKS, "no_prefill"), count(dispatch.ATTEMPTS, "colocated")
            assert await request == REPLY
        after = count(dispatch.FALLBACKS, "no_prefill"), count(dispatch.ATTEMPTS, "colocated")
        assert after == (before[0] + 1, before[1] + 1)
        assert w.decodes[0].works[-1].attempt.attempt == 2


async def test_no_prefill_pool_at_all(world: WorldMaker) -> None:
    async with world(prefills=0) as w:
        before = count(dispatch.ATTEMPTS, "colocated")
        assert await stream_text(w) == REPLY
        assert count(dispatch.ATTEMPTS, "colocated") == before + 1


async def test_no_decode_worker(world: WorldMaker) -> None:
    async with world(decodes=0) as w:
        answer = await w.http.post("/v1/chat/completions", json=chat())
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["type"] == "service_unavailable_error"
        ready = await w.http.get("/ready")
        assert ready.status_code == 503 and ready.json()["error"]["message"] == "no decode worker is known"
        assert (await w.http.get("/v1/models")).json()["data"][0]["id"] == "fake"


async def test_the_only_decode_worker_restarts(world: WorldMaker) -> None:
    """Behind the same name: the request waits for the next life and goes on."""
    async with world(prefills=0, renew_s=0.1) as w:
        w.script.step_s = 0.01
        request = asyncio.create_task(stream_text(w))
        await until(lambda: any(len(held.tokens) > 20 for held in w.decodes[0].held.values()))
        port = int(w.decodes[0].address.rpartition(":")[2])
        await w.decodes[0].stop()
        await asyncio.sleep(0.3)
        again = FakeWorker(w.script, w.bus, "decode", "d0")
        await again.start(port)
        w.decodes.append(again)
        assert await request == REPLY
        assert len(again.works[0].forced_token_ids) > 15


@pytest.mark.parametrize(
    ("code", "leg", "retried"),
    [
        (grpc.StatusCode.UNAVAILABLE, "decode", True),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "decode", True),
        (grpc.StatusCode.ABORTED, "prefill", True),
        (grpc.StatusCode.INTERNAL, "prefill", True),
        (grpc.StatusCode.FAILED_PRECONDITION, "decode", True),
        (grpc.StatusCode.INVALID_ARGUMENT, "prefill", False),
    ],
)
async def test_one_worker_refuses(world: WorldMaker, code: grpc.StatusCode, leg: str, retried: bool) -> None:
    async with world(prefills=2, decodes=2) as w:
        refused: list[str] = []

        def refuse_once(work: Any) -> tuple[grpc.StatusCode, str] | None:
            if refused:
                return None
            refused.append(work.attempt.handoff_id)
            return code, "no such luck"

        for worker in w.decodes if leg == "decode" else w.prefills:
            worker.fail_with = refuse_once
        answer = await w.http.post("/v1/chat/completions", json=chat())
        if retried:
            assert answer.json()["choices"][0]["message"]["content"] == REPLY
        else:
            assert answer.status_code == 400
            assert answer.json()["error"]["message"] == "no such luck"
        assert len(refused) == 1
        await w.idle()


@pytest.mark.parametrize(
    ("code", "status", "attempts"),
    [
        (grpc.StatusCode.INTERNAL, 500, 2),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 503, 3),
        (grpc.StatusCode.FAILED_PRECONDITION, 503, 3),
    ],
)
async def test_every_worker_refuses(world: WorldMaker, code: grpc.StatusCode, status: int, attempts: int) -> None:
    async with world() as w:
        w.decodes[0].fail_with = lambda _: (code, "no")
        answer = await w.http.post("/v1/chat/completions", json=chat())
        assert answer.status_code == status
        assert ("retry-after" in answer.headers) == (status == 503)
        assert len(w.decodes[0].works) == attempts
        await w.idle()


async def test_a_request_that_kills_workers_is_given_up(world: WorldMaker) -> None:
    async with world(prefills=0, decodes=3, renew_s=0.1) as w:
        w.script.step_s = 0.01

        async def kill_whoever_serves() -> None:
            left = list(w.decodes)
            while left:
                await until(lambda: any(d.works for d in left))
                victim = next(d for d in left if d.works)
                left.remove(victim)
                await victim.stop()

        killing = asyncio.create_task(kill_whoever_serves())
        answer = await w.http.post("/v1/chat/completions", json=chat(stream=True))
        killing.cancel()
        assert sum(bool(d.works) for d in w.decodes) == 2
        if answer.status_code == 200:  # tokens went out before
            assert "workers_lost" in answer.text and "[DONE]" not in answer.text
        else:
            assert answer.status_code == 503


async def test_a_worker_that_finishes_with_an_error(world: WorldMaker) -> None:
    async with world(prefills=0, decodes=2) as w:
        broken: list[int] = []

        def break_once(batch: Any) -> list[Any]:
            if batch.events[0].first_index == 5 and not broken:
                broken.append(1)
                serving = next(d for d in w.decodes if d.process == batch.worker)
                serving.stall_at = 0
                batch.events[0].finish_reason = 4
                batch.events[0].error = "out of paper"
                del batch.events[0].tokens[:]
            return [batch]

        for decode in w.decodes:
            decode.mangle = break_once
        assert await stream_text(w) == REPLY
        assert broken and all(len(d.works) == 1 for d in w.decodes)


async def test_deadline(world: WorldMaker) -> None:
    async with world(request_timeout_s=0.3) as w:
        w.script.prefill_s = 10
        answer = await w.http.post("/v1/chat/completions", json=chat())
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "timeout"
        await w.idle()


async def test_pairs_with_different_models_are_never_made(world: WorldMaker) -> None:
    async with world(prefills=0, decodes=1) as w:
        await w.add("prefill", "p-other", weights_fingerprint="another")
        await w.add("prefill", "p-layout", layout_fingerprint="another")
        await w.known()
        before = count(dispatch.FALLBACKS, "mismatch")
        assert await stream_text(w) == REPLY
        assert count(dispatch.FALLBACKS, "mismatch") == before + 1
        assert not any(p.works for p in w.prefills)


async def test_draining_workers_get_no_new_work_and_finish_what_they_have(world: WorldMaker) -> None:
    async with world(prefills=1, decodes=2) as w:
        w.script.step_s = 0.01
        request = asyncio.create_task(stream_text(w))
        await until(lambda: any(d.works for d in w.decodes))
        first = next(d for d in w.decodes if d.works)
        first.draining = True
        await first.say()
        await until(lambda: any(i.draining for i in w.gateway.membership.workers(Role.DECODE)))
        for _ in range(3):
            assert await stream_text(w, max_tokens=3)
        assert await request == REPLY
        assert len(first.works) == 1


async def test_a_prefill_that_has_answered_is_told_when_nobody_takes_its_blocks(world: WorldMaker) -> None:
    """Its lease would else stay until it expires. A request that ends well tells nobody anything."""
    async with world() as w:
        decode, prefill = w.decodes[0], w.prefills[0]

        async def refuse_late(request: Any, context: Any) -> Any:
            await w.script.kv_ready(request.work.attempt.handoff_id).wait()
            await asyncio.sleep(0.1)  # prefill's answer has reached the gateway
            decode.decode_instead = None
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room for the handoff's blocks in time")

        decode.decode_instead = refuse_late
        assert await stream_text(w) == REPLY
        first, second = (work.attempt.handoff_id for work in prefill.works)
        await until(lambda: bool(prefill.cancel_requests))
        assert prefill.cancel_requests == [first]
        assert second not in prefill.cancel_requests


async def test_cancel_on_disconnect_reaches_both_workers(world: WorldMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world() as w:
        # in mid-prefill
        w.script.prefill_s = 30
        request = asyncio.create_task(w.http.post("/v1/chat/completions", json=chat(stream=True)))
        await until(lambda: w.prefills[0].live and w.decodes[0].live)
        handoff_id = w.prefills[0].works[0].attempt.handoff_id
        request.cancel()
        await w.idle()
        await until(lambda: handoff_id in w.decodes[0].cancel_requests)
        assert handoff_id in w.prefills[0].cancel_requests
        assert w.prefills[0].cancelled_calls == [handoff_id]
        # while it is tokenised
        seen = len(w.decodes[0].works)
        tokenising = asyncio.Event()

        async def slow_encode(*_: object, **__: object) -> tuple[int, ...]:
            tokenising.set()
            await asyncio.sleep(0.3)
            return (5,)

        monkeypatch.setattr(w.gateway.tokenizer, "encode", slow_encode)
        request = asyncio.create_task(w.http.post("/v1/chat/completions", json=chat()))
        await asyncio.wait_for(tokenising.wait(), 5)
        request.cancel()
        await asyncio.sleep(0.5)
        assert len(w.decodes[0].works) == seen
        monkeypatch.undo()
        # in mid-decode, not streamed
        w.script.prefill_s, w.script.step_s = 0.005, 1.0
        request = asyncio.create_task(w.http.post("/v1/chat/completions", json=chat()))
        await until(lambda: any(len(held.tokens) > 1 for held in w.decodes[0].held.values()))
        request.cancel()
        await w.idle()
        timeline = w.gateway.timelines.find(w.decodes[0].works[-1].attempt.request_id)
        assert timeline is not None
        await until(lambda: timeline.outcome == "cancelled")


async def test_a_handoff_that_fails_is_tried_again_with_the_only_prefill_worker_then_colocated(
    world: WorldMaker,
) -> None:
    async with world() as w:
        failures = 0

        def fail(work: Any) -> tuple[grpc.StatusCode, str] | None:
            nonlocal failures
            failures += 1
            return (grpc.StatusCode.ABORTED, "corrupt blocks [3]") if failures <= 2 else None

        w.decodes[0].fail_with = fail
        assert await stream_text(w) == REPLY
        handed = [work.attempt.handoff_id for work in w.prefills[0].works]
        assert [work.attempt.handoff_id in handed for work in w.decodes[0].works] == [True, True, False]


async def test_a_handoff_to_a_dead_prefill_worker_is_not_tried_again(world: WorldMaker) -> None:
    async with world() as w:
        failed: list[int] = []

        def fail_once(work: Any) -> tuple[grpc.StatusCode, str] | None:
            if failed:
                return None
            failed.append(1)
            return grpc.StatusCode.UNAVAILABLE, "handoff: the peer answers nothing"

        w.decodes[0].fail_with = fail_once
        assert await stream_text(w) == REPLY
        assert len(w.prefills[0].works) == 1 and len(w.decodes[0].works) == 2


async def test_a_call_says_more_than_the_error_on_the_bus(world: WorldMaker) -> None:
    """The worker publishes an ERROR event, then its call ends with INVALID_ARGUMENT: a 400, not a broken worker."""
    async with world(prefills=0) as w:

        def as_error(batch: Any) -> list[Any]:
            batch.events[0].finish_reason = 4
            batch.events[0].error = "does not fit"
            del batch.events[0].tokens[:]
            return [batch]

        async def refuse(request: Any, context: Any) -> None:
            worker = w.decodes[0]
            await worker.publish(request.work, 0, [])
            await asyncio.sleep(0.05)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "does not fit")

        w.decodes[0].mangle = as_error
        w.decodes[0].decode_instead = refuse
        answer = await w.http.post("/v1/chat/completions", json=chat())
        assert answer.status_code == 400 and answer.json()["error"]["message"] == "does not fit"
