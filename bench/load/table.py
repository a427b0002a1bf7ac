"""The figures on a terminal."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.load.metrics import Asked

HEADS = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
    "client_queue_time": "client queue time",
    "e2el_including_client_queue": "end to end, with client queue",
}
SINCE = {"due": "from the moment each request was due", "sent": "from the moment each request was sent"}


def show(console: Console, result: Mapping[str, Any], asked: Asked, notes: Iterable[str]) -> None:
    """Two tables, counts and latencies, then the notes."""
    counts = Table(title="serving", title_justify="left", show_header=False)
    counts.add_column()
    counts.add_column(justify="right")
    for name, value in _counts(result):
        counts.add_row(name, value)
    console.print(counts)
    ends = [f"p{q:g}" for q in asked.percentiles]
    latencies = Table(title=f"milliseconds, {SINCE[result['latency_origin']]}", title_justify="left")
    latencies.add_column("")
    for head in ("mean", "median", "std", *ends):
        latencies.add_column(head, justify="right")
    for name in asked.metrics:
        latencies.add_row(HEADS[name], *_row(result, name, ends))
        if f"mean_{name}_from_send_ms" in result and result["latency_origin"] == "due":
            latencies.add_row(f"  from sending ({name})", *_row(result, f"{name}_from_send", ends), style="dim")
    console.print(latencies)
    for note in notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)


def _counts(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    goodput = result["request_goodput"]
    rows = [
        ("requests completed / failed", f"{result['completed']} / {result['failed']}"),
        (
            "request rate asked, /s; concurrency allowed",
            f"{result['request_rate']}; {result['max_concurrency'] or 'any'}",
        ),
        ("duration, s", f"{result['duration']:.2f}"),
        ("input / output tokens", f"{result['total_input_tokens']} / {result['total_output_tokens']}"),
        ("requests/s", f"{result['request_throughput']:.2f}"),
        ("good requests/s", "" if goodput is None else f"{goodput:.2f}"),
        (
            "output tokens/s (peak chunks/s)",
            f"{result['output_throughput']:.1f} ({result['max_output_tokens_per_s']:.0f})",
        ),
        ("input + output tokens/s", f"{result['total_token_throughput']:.1f}"),
        ("peak concurrency", str(result["max_concurrent_requests"])),
        ("send lag p99 / max, ms", f"{result['p99_send_lag_ms']:.2f} / {result['max_send_lag_ms']:.2f}"),
        ("event loop lag p99 / max, ms", f"{result['p99_loop_lag_ms']:.2f} / {result['max_loop_lag_ms']:.2f}"),
        ("generator's share of a core", f"{result['generator_cpu_share']:.1%}"),
    ]
    return [row for row in rows if row[1]]


def _row(result: Mapping[str, Any], name: str, ends: Iterable[str]) -> list[str]:
    values = [result[f"{figure}_{name}_ms"] for figure in ("mean", "median", "std", *ends)]
    return ["-" if value is None else f"{value:.2f}" for value in values]
