"""Figures from events at times that were chosen so that every figure can be worked out by hand."""

import pytest

from bench.load.generator import Outcome, Run
from bench.load.metrics import Asked, measure, peak_per_second, percentile
from bench.load.notes import books, notes
from bench.load.stream import Stream
from bench.load.workload import Prompt
from tests.bench.fake_server import DONE, event, text, usage


def stream_of(*events: tuple[float, bytes]) -> Stream:
    stream = Stream(keeps_text=True)
    for at_s, data in events:
        stream.feed(data, at_s)
    return stream


def run_of_four() -> Run:
    first = stream_of(
        (100.10, text("one")),
        (100.15, text("two")),
        (100.25, text("three")),
        (100.26, text("", "length")),  # names the reason only: ends the answer, is no token
        (100.29, usage(10, 3) + DONE),
    )
    second = stream_of((101.50, text("only", "stop")), (101.55, usage(20, 1) + DONE))
    third = stream_of((100.70, text("a")), (100.80, text("b")))
    fourth = stream_of(
        (101.21, text("two tokens")), (101.41, text("three more", "length")), (101.42, usage(30, 5) + DONE)
    )
    return Run(
        outcomes=[
            Outcome(Prompt([], 10, 3), 100.0, 100.0, first, 100.002, 100.3),
            Outcome(Prompt([], 20, 8), 100.5, 100.5, second, 100.5, 101.6),
            Outcome(Prompt([], 25, 8), 100.6, 100.6, third, 100.6, 101.02, error="the server hung up"),
            Outcome(Prompt([], 31, 5), 101.0, 101.005, fourth, 101.01, 101.5),
        ],
        started_s=100.0,
        duration_s=2.0,
        cpu_s=0.012,
        loop_lags_s=[0.001] * 200,
    )


def close(value: float) -> object:
    return pytest.approx(value, abs=1e-6)


def test_counts_and_rates():
    result = measure(run_of_four(), True, Asked())
    assert (result["completed"], result["failed"]) == (3, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (10 + 20 + 30, 3 + 1 + 5)
    assert result["request_throughput"] == close(3 / 2)
    assert result["output_throughput"] == close(9 / 2)
    assert result["total_token_throughput"] == close(69 / 2)
    assert result["request_goodput"] is None
    assert result["max_output_tokens_per_s"] == 3  # 100.1 to 101.1: three; 101.1 to 102.1: three
    assert result["max_concurrent_requests"] == 3  # from 101.01 to 101.02, the one that failed included
    assert result["duration"] == 2.0


def test_open_loop_latencies_count_from_due():
    result = measure(run_of_four(), True, Asked(percentiles=(50, 90, 99.9)))
    assert result["latency_origin"] == "due"
    # 100, 1000, 210: deviations from 436.667 are -336.667, 563.333, -226.667
    assert result["mean_ttft_ms"] == close(1310 / 3)
    assert result["median_ttft_ms"] == result["p50_ttft_ms"] == close(210)
    assert result["std_ttft_ms"] == pytest.approx(400.860, abs=1e-3)
    assert result["p90_ttft_ms"] == close(210 + 0.8 * 790)  # rank 0.9 x 2 = 1.8
    assert result["p99.9_ttft_ms"] == close(210 + 0.998 * 790)
    assert result["mean_e2el_ms"] == close((260 + 1000 + 410) / 3)  # to the last choice, not to the usage
    # (260 - 100)/2 and (410 - 210)/4; the second request has one token and no tpot
    assert result["mean_tpot_ms"] == close((80 + 50) / 2)
    assert result["mean_itl_ms"] == close((50 + 100 + 200) / 3)
    assert result["median_itl_ms"] == close(100)
    assert result["mean_ttft_from_send_ms"] == close((98 + 1000 + 200) / 3)
    assert result["mean_e2el_from_send_ms"] == close((258 + 1000 + 400) / 3)


def test_closed_loop_latencies_count_from_sending():
    result = measure(run_of_four(), False, Asked())
    assert result["latency_origin"] == "sent"
    assert result["mean_ttft_ms"] == close((98 + 1000 + 200) / 3)
    assert result["mean_e2el_ms"] == close((258 + 1000 + 400) / 3)
    assert result["mean_tpot_ms"] == close(65)


def test_lists_have_an_entry_for_every_request():
    result = measure(run_of_four(), True, Asked())
    assert result["input_lens"] == [10, 20, 25, 30]
    assert result["output_lens"] == [3, 1, 0, 5]
    assert result["ttfts"] == [close(0.1), close(1.0), 0.0, close(0.21)]
    assert result["itls"] == [[close(0.05), close(0.1)], [], [], [close(0.2)]]
    assert result["latencies"] == [close(0.26), close(1.0), 0.0, close(0.41)]
    assert result["errors"] == ["", "", "the server hung up", ""]
    assert result["start_times"] == [100.002, 100.5, 100.6, 101.01]
    assert result["queue_times"] == [0, 0, 0, close(0.005)]
    assert result["send_lags"] == [close(0.002), 0, 0, close(0.005)]
    assert result["generated_texts"] == ["onetwothree", "only", "ab", "two tokensthree more"]


@pytest.mark.parametrize(
    ("most_ms", "num_good"),
    [
        ({"ttft": 1000}, 3),  # exactly 1000 is good
        ({"ttft": 999.9}, 2),
        ({"tpot": 60}, 2),  # a single token has no tpot to miss
        ({"ttft": 300, "tpot": 60}, 1),
        ({"e2el": 300}, 1),
        ({"ttft": 0}, 0),
    ],
)
def test_goodput(most_ms, num_good):
    assert measure(run_of_four(), True, Asked(goodput=most_ms))["request_goodput"] == close(num_good / 2)


def test_queue_metrics_are_there_when_asked():
    result = measure(run_of_four(), True, Asked(metrics=("client_queue_time", "e2el_including_client_queue")))
    assert result["mean_client_queue_time_ms"] == close(5 / 3)
    assert result["mean_e2el_including_client_queue_ms"] == close(1670 / 3)
    assert "mean_ttft_ms" not in result


def test_nothing_completed_has_no_latency():
    run = run_of_four()
    run.outcomes = run.outcomes[2:3]
    result = measure(run, True, Asked())
    assert (result["completed"], result["failed"], result["request_throughput"]) == (0, 1, 0)
    assert result["mean_ttft_ms"] is None
    assert result["p99_itl_ms"] is None


def test_the_books():
    kept = books(run_of_four())
    assert kept["mean_send_lag_ms"] == close(7 / 4)
    assert kept["max_send_lag_ms"] == close(5)
    assert kept["p99_send_lag_ms"] == close(5 * 0.97 + 2 * 0.03)  # rank 0.99 x 3 = 2.97 of 0, 0, 2, 5
    assert kept["generator_cpu_share"] == close(0.006)
    assert kept["total_output_chunks"] == 3 + 1 + 2
    assert kept["generator_cpu_us_per_chunk"] == close(2000)
    assert kept["requests_where_chunks_differ_from_usage"] == 1
    assert kept["requests_where_output_len_differs"] == 1
    assert kept["requests_where_input_len_differs"] == 1
    assert kept["failed_output_chunks"] == 2
    assert kept["error_counts"] == {"the server hung up": 1}
    assert not kept["generator_was_bottleneck"]
    said = " | ".join(notes(measure(run_of_four(), True, Asked()) | kept, ["500: no"]))
    assert "1 failed: the server hung up" in said
    assert "6 chunks, 9 tokens" in said
    assert "1 warm-ups failed: 500: no" in said
    assert "BOTTLENECK" not in said


@pytest.mark.parametrize("harm", ["late sending", "late reading", "busy"])
def test_a_generator_that_cannot_keep_up_says_so(harm):
    run = run_of_four()
    if harm == "late sending":
        run.outcomes[0].sent_s = 100.05
    elif harm == "late reading":
        run.loop_lags_s = [0.02] * 10
    else:
        run.cpu_s = 1.9
    kept = books(run)
    assert kept["generator_was_bottleneck"]
    note = notes(measure(run, True, Asked()) | kept, [])[0]
    assert "THE GENERATOR WAS A BOTTLENECK" in note
    assert ("it was busy" in note) == (harm == "busy")


def test_without_usage_chunks_are_counted_and_it_is_said():
    stream = stream_of((10.1, text("a")), (10.2, text("b")), (10.4, text("c", "length") + DONE))
    run = Run([Outcome(Prompt([], 4, 3), 10.0, 10.0, stream, 10.0, 10.5)], 10.0, 1.0)
    result = measure(run, True, Asked())
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (4, 3)
    assert result["mean_tpot_ms"] == close(150)
    assert "1 answers had no usage" in " ".join(notes(result | books(run), []))


def test_role_and_finish_events_are_no_tokens_but_an_empty_text_is():
    def chat(delta: dict[str, object], finish_reason: str | None = None) -> bytes:
        return event(choices=[{"index": 0, "delta": delta, "finish_reason": finish_reason}])

    stream = stream_of(
        (1.0, chat({"role": "assistant", "content": ""})),
        (2.0, chat({"content": ""})),  # a token, but not yet a character
        (3.0, chat({"content": "é"})),
        (4.0, chat({"reasoning_content": "hm"})),
        (5.0, chat({"tool_calls": [{"index": 0}]})),
        (6.0, chat({}, "stop")),
    )
    assert stream.chunk_times_s == [2.0, 3.0, 4.0, 5.0]
    assert stream.last_choice_s == 6.0


def test_events_may_be_cut_anywhere():
    whole = (
        b": ping\r\n\r\n"
        + text("é")
        + b"event: x\r\ndata:"
        + text("b")[6:].replace(b"\n", b"\r\n")
        + usage(1, 2)
        + DONE
    )
    for size in (1, 2, 3, 7, len(whole)):
        stream = Stream(keeps_text=True)
        for start in range(0, len(whole), size):
            stream.feed(whole[start : start + size], 1.0)
        assert (stream.pieces, stream.num_events, stream.done, stream.error) == (["é", "b"], 3, True, "")
        assert stream.usage is not None
        assert stream.usage.completion_tokens == 2


def test_percentile_lies_between_neighbours():
    assert percentile([4, 1, 3, 2], 0) == 1
    assert percentile([4, 1, 3, 2], 25) == 1.75
    assert percentile([4, 1, 3, 2], 100) == 4
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_peak_per_second():
    assert peak_per_second([]) == 0
    assert peak_per_second([5.0, 5.9, 6.0, 6.5, 6.9, 8.0]) == 3
