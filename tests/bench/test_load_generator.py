"""The generator against a scripted server. Bounds are those of the script; above, only what no machine needs."""

import asyncio
import socket
from collections.abc import Sequence

import pytest

from bench.load.arrivals import due_times
from bench.load.connections import Pool, Target
from bench.load.generator import Job, Limits, Run, run
from bench.load.metrics import Asked, measure, peak_concurrency, send_lag
from bench.load.workload import Lengths, bodies, make_prompts, words
from tests.bench.fake_server import DONE, HANG_UP, FakeServer, answer, event, fake_server, text, usage

PATH = "/v1/completions"


def load(times: Sequence[float]) -> list[Job]:
    prompts = make_prompts(len(times), Lengths(7, 3), words(), 0)
    return [Job(*each) for each in zip(prompts, bodies(prompts, PATH, "fake", {}), times, strict=True)]


def drive(server: FakeServer | str, times: Sequence[float], limits: Limits, num_warm: int = 4) -> Run:
    async def go() -> Run:
        pool = Pool(Target(server if isinstance(server, str) else server.url, PATH, {"x-who": "me"}))
        try:
            await pool.warm(num_warm)
            return await run(load(times), pool, limits)
        finally:
            pool.close()

    return asyncio.run(go())


def test_latencies_are_those_of_the_script():
    with fake_server(lambda n, body: answer(0.2, 0.05, 3)) as server:
        done = drive(server, [0.0, 0.1], Limits(None, 30))
    result = measure(done, True, Asked())
    assert result["completed"] == 2
    # asyncio.sleep may be a clock tick short
    for ttft, latency, gaps in zip(result["ttfts"], result["latencies"], result["itls"], strict=True):
        assert 0.198 < ttft < 2
        assert 0.298 < latency < 2
        assert len(gaps) == 2
        assert sum(gaps) == pytest.approx(0.1, abs=0.5)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (14, 6)
    assert result["mean_tpot_ms"] == pytest.approx((result["mean_e2el_ms"] - result["mean_ttft_ms"]) / 2)
    assert done.outcomes[1].sent_s - done.started_s >= 0.1
    assert 0.398 < result["duration"] < 5


def test_open_loop_sends_while_nothing_is_answered():
    with fake_server(lambda n, body: answer(1.0, 0.0, 1)) as server:
        done = drive(server, [0.0, 0.05, 0.1, 0.15], Limits(None, 30))
    assert server.most_active == peak_concurrency(done.outcomes) == 4
    assert all(outcome.sent_s >= outcome.due_s for outcome in done.outcomes)
    assert [outcome.due_s - done.started_s for outcome in done.outcomes] == pytest.approx([0.0, 0.05, 0.1, 0.15])


def test_what_waits_for_a_slot_is_late_from_due_but_not_by_the_generator():
    with fake_server(lambda n, body: answer(0.3, 0.0, 1)) as server:
        done = drive(server, [0.0, 0.01, 0.02], Limits(1, 30))
    result = measure(done, True, Asked())
    assert server.most_active == 1
    assert result["ttfts"][2] > 0.85  # three answers of 0.3 s one after another, due at 0.02
    assert done.outcomes[2].ready_s - done.outcomes[2].due_s > 0.55
    assert send_lag(done.outcomes[2]) < 0.25
    assert result["median_ttft_from_send_ms"] < result["median_ttft_ms"]


@pytest.mark.parametrize("limit", [1, 3])
def test_closed_loop_never_exceeds_its_limit(limit):
    with fake_server(lambda n, body: answer(0.005 * (n % 4), 0.002, 1 + n % 5)) as server:
        done = drive(server, [0.0] * 40, Limits(limit, 30), num_warm=limit)
        assert server.most_active == limit
        assert server.num_connections == limit
    assert peak_concurrency(done.outcomes) == limit
    assert not any(outcome.error or outcome.connected_late for outcome in done.outcomes)
    ends = sorted(outcome.settled_s for outcome in done.outcomes)
    assert [outcome.ready_s for outcome in done.outcomes[limit:]] == ends[
        :-limit
    ]  # each takes the slot of one that ended


def test_every_failure_is_counted_and_says_why():
    scripts = [
        answer(0.0, 0.0, 2),
        (500, b'{"error":{"message":"out of luck"}}'),
        [text("a"), 0.01, text("b"), HANG_UP],
        [HANG_UP],
        [text("a"), event(error={"message": "the worker died", "code": 503}), DONE],
        [text("a"), text("b", "length"), usage(7, 2)],
        [usage(7, 0), DONE],
        [b"data: {nonsense\n\n", DONE],
        answer(30.0, 0.0, 1),
        (404, b"plain"),
        answer(0.0, 0.0, 1),
    ]
    with fake_server(lambda n, body: scripts[n]) as server:
        done = drive(server, [0.0] * len(scripts), Limits(1, 2.0), num_warm=1)
    errors = [outcome.error for outcome in done.outcomes]
    assert errors[1] == "500: out of luck"
    assert errors[2] == errors[3] == "the server hung up in the middle of the answer (status 200)"
    assert errors[4] == "error event: the worker died"
    assert errors[5] == "the stream ended without [DONE]"
    assert errors[6] == "the stream had no output in it"
    assert errors[7].startswith("not a chunk: ")
    assert errors[8] == "not over within 2 s"
    assert errors[9] == "404: plain"
    assert [n for n, error in enumerate(errors) if not error] == [0, 10]
    result = measure(done, False, Asked(goodput={"ttft": 1e6}))
    assert (result["completed"], result["failed"], len(result["errors"])) == (2, 9, 11)
    assert result["request_goodput"] == result["request_throughput"]
    assert result["total_output_tokens"] == 3


def test_nobody_listens():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        done = drive(url, [0.0, 0.0], Limits(None, 5), num_warm=0)
    assert all("refused" in outcome.error or "Connect" in outcome.error for outcome in done.outcomes)
    result = measure(done, True, Asked())
    assert (result["completed"], result["failed"], result["max_concurrent_requests"]) == (0, 2, 0)


def test_a_connection_that_the_server_closed_is_not_used_again():
    with fake_server(lambda n, body: [*answer(0.0, 0.0, 1), 0.0, HANG_UP] if n == 0 else answer(0.0, 0.0, 1)) as server:
        done = drive(server, [0.0, 0.3], Limits(None, 10), num_warm=1)
        assert server.num_connections == 2
    # the first is whole: [DONE] came, only the end of the HTTP message did not
    assert [outcome.error for outcome in done.outcomes] == ["", ""]
    assert [outcome.connected_late for outcome in done.outcomes] == [False, True]


def test_headers_and_bodies_arrive_as_they_were_made():
    with fake_server(lambda n, body: answer(0.0, 0.0, 1)) as server:
        drive(server, [0.0], Limits(None, 10))
        assert server.heads[0].startswith("POST /v1/completions HTTP/1.1\r\n")
        assert "\r\nx-who: me\r\n" in server.heads[0]
        assert server.bodies[0]["stream_options"] == {"include_usage": True}


def test_a_rate_is_kept():
    times = due_times(40, 100.0, 1.0, 0)
    with fake_server(lambda n, body: answer(0.01, 0.0, 1)) as server:
        done = drive(server, times, Limits(None, 10))
    sent = [outcome.sent_s - done.started_s for outcome in done.outcomes]
    assert all(at >= due for at, due in zip(sent, times, strict=True))  # never early
    assert sent[-1] < 0.4 + 2  # the last is due at 40/100


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://"])
def test_urls_that_are_none(url):
    with pytest.raises(ValueError, match="not the URL"):
        Target(url, PATH, {})


def test_a_header_cannot_smuggle_another():
    with pytest.raises(ValueError, match="one line"):
        Target("http://x", PATH, {"a": "b\r\nc: d"})
