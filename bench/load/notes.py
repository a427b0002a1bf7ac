"""What a reader has to know before believing the figures: the generator's own lateness, disagreements, failures."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from bench.load.generator import Run
from bench.load.metrics import input_tokens, output_tokens, percentile, send_lag

LATE_S = 0.010  # p99 of send lag or loop lag from which on the generator is said to be late
BUSY = 0.8  # share of one core from which on the generator is said to be busy


def books(run: Run) -> dict[str, Any]:
    """How the generator fared and what was counted differently, as fields of the result."""
    lags = [send_lag(outcome) for outcome in run.outcomes]
    loop_lags = run.loop_lags_s or [0.0]
    whole = [outcome for outcome in run.outcomes if not outcome.error]
    counts = [(output_tokens(each), len(each.stream.chunk_times_s), each) for each in whole]
    busy = run.cpu_s / run.duration_s
    num_chunks = sum(chunks for _, chunks, _ in counts)
    p99_send, p99_loop = percentile(lags, 99), percentile(loop_lags, 99)
    return {
        "mean_send_lag_ms": sum(lags) / len(lags) * 1e3,
        "p99_send_lag_ms": p99_send * 1e3,
        "max_send_lag_ms": max(lags) * 1e3,
        "p99_loop_lag_ms": p99_loop * 1e3,
        "max_loop_lag_ms": max(loop_lags) * 1e3,
        "generator_cpu_share": busy,
        "generator_cpu_us_per_chunk": run.cpu_s / num_chunks * 1e6 if num_chunks else None,
        "generator_was_bottleneck": p99_send > LATE_S or p99_loop > LATE_S or busy > BUSY,
        "late_connections": sum(outcome.connected_late for outcome in run.outcomes),
        "total_output_chunks": num_chunks,
        "coalesced_chunks": num_chunks - sum(len(set(each.stream.chunk_times_s)) for _, _, each in counts),
        "requests_without_usage": sum(each.stream.usage is None for each in whole),
        "requests_where_chunks_differ_from_usage": sum(tokens != chunks for tokens, chunks, _ in counts),
        "requests_where_output_len_differs": sum(tokens != each.prompt.num_output_tokens for tokens, _, each in counts),
        "requests_where_input_len_differs": sum(input_tokens(each) != each.prompt.num_tokens for each in whole),
        "failed_output_chunks": sum(len(each.stream.chunk_times_s) for each in run.outcomes if each.error),
        "error_counts": dict(Counter(outcome.error for outcome in run.outcomes if outcome.error).most_common()),
    }


def notes(result: dict[str, Any], failed_warmups: Sequence[str]) -> list[str]:
    """Sentences for whatever spoils or bends the figures; none where all is well."""
    said = []
    if result["generator_was_bottleneck"]:
        why = "it was busy" if result["generator_cpu_share"] > BUSY else "something kept it from running"
        said.append(
            f"THE GENERATOR WAS A BOTTLENECK ({why}), latencies and rates are partly its own: send lag "
            f"p99 {result['p99_send_lag_ms']:.1f} ms, its event loop late by p99 {result['p99_loop_lag_ms']:.1f} ms, "
            f"{result['generator_cpu_share']:.0%} of a core in use"
        )
    for error, count in list(result["error_counts"].items())[:10]:
        said.append(f"{count} failed: {error}")
    if result["failed_output_chunks"]:
        said.append(f"{result['failed_output_chunks']} chunks of failed requests are in no figure")
    if failed_warmups:
        said.append(f"{len(failed_warmups)} warm-ups failed: {failed_warmups[0]}")
    if result["late_connections"]:
        said.append(f"{result['late_connections']} connections had to be made while requests waited for them")
    if count := result["requests_without_usage"]:
        said.append(f"{count} answers had no usage: their output tokens are chunks, their input tokens as meant")
    if count := result["requests_where_chunks_differ_from_usage"]:
        told = f"{result['total_output_chunks']} chunks, {result['total_output_tokens']} tokens in all"
        said.append(f"in {count} answers chunks are not tokens, so an inter-token latency is one of chunks ({told})")
    if count := result["coalesced_chunks"]:
        said.append(f"{count} chunks were read together with the one before: an inter-token latency of 0")
    if count := result["requests_where_output_len_differs"]:
        said.append(f"{count} answers are not as long as asked for")
    if count := result["requests_where_input_len_differs"]:
        said.append(f"{count} prompts are not as long, as the server counts, as was meant")
    return said
