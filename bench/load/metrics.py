"""From what became of each request to the figures, under the names of `vllm bench serve`'s result JSON.

Of a request that succeeded, in seconds, from its origin (see generator.py: due in open loop, sent in closed loop):

    ttft   first event with output
    e2el   last event with a choice in it ("latency")
    tpot   (e2el - ttft) / (output tokens - 1), where there is more than one output token
    itl    between one event with output and the next; several tokens in one event are one interval

Output tokens are those of the server's usage; where it sends none, events with output are counted and a note says so.
`..._from_send` are the same from the moment of sending, which is what vLLM reports. Percentiles interpolate linearly.
What cannot be known (the mean of nothing) is null, where vLLM writes 0. Peak concurrency counts failed requests too.
"""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.load.generator import Outcome, Run

METRICS = ("ttft", "tpot", "itl", "e2el")
QUEUE_METRICS = ("client_queue_time", "e2el_including_client_queue")
FROM_SEND = ("ttft", "e2el")
GOODPUT = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class Asked:
    """Which figures are wanted. Goodput: the most milliseconds by metric."""

    metrics: tuple[str, ...] = METRICS
    percentiles: tuple[float, ...] = (99.0,)
    goodput: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Times:
    """The latencies of one request that succeeded, in seconds."""

    ttft: float
    e2el: float
    itls: list[float]
    tpot: float | None  # None: at most one output token
    ttft_from_send: float
    e2el_from_send: float
    num_output_tokens: int

    @classmethod
    def of(cls, outcome: Outcome, is_open: bool) -> "Times":
        """What the events say."""
        chunks, end_s = outcome.stream.chunk_times_s, outcome.stream.last_choice_s
        assert outcome.sent_s is not None
        origin_s = outcome.due_s if is_open else outcome.sent_s
        num_tokens = output_tokens(outcome)
        return cls(
            ttft=chunks[0] - origin_s,
            e2el=end_s - origin_s,
            itls=[later - earlier for earlier, later in itertools.pairwise(chunks)],
            tpot=(end_s - chunks[0]) / (num_tokens - 1) if num_tokens > 1 else None,
            ttft_from_send=chunks[0] - outcome.sent_s,
            e2el_from_send=end_s - outcome.sent_s,
            num_output_tokens=num_tokens,
        )


def output_tokens(outcome: Outcome) -> int:
    """As the server counts them; as the events do where it does not."""
    usage = outcome.stream.usage
    counted = usage.completion_tokens if usage is not None else None
    return len(outcome.stream.chunk_times_s) if counted is None else counted


def input_tokens(outcome: Outcome) -> int:
    """As the server counts them; as they were meant where it does not."""
    usage = outcome.stream.usage
    counted = usage.prompt_tokens if usage is not None else None
    return outcome.prompt.num_tokens if counted is None else counted


def measure(run: Run, is_open: bool, asked: Asked) -> dict[str, Any]:
    """All figures of a run, the lists with an entry per request included (0 and [] where it failed, as vLLM's)."""
    times = [None if outcome.error else Times.of(outcome, is_open) for outcome in run.outcomes]
    good = [each for each in times if each is not None]
    whole = [outcome for outcome in run.outcomes if not outcome.error]
    total_input, total_output = sum(map(input_tokens, whole)), sum(each.num_output_tokens for each in good)
    seconds = run.duration_s
    result: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(times) - len(good),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(good) / seconds,
        "request_goodput": _goodput(good, asked.goodput) / seconds if asked.goodput else None,
        "output_throughput": total_output / seconds,
        "total_token_throughput": (total_input + total_output) / seconds,
        "max_output_tokens_per_s": peak_per_second([chunk for each in whole for chunk in each.stream.chunk_times_s]),
        "max_concurrent_requests": peak_concurrency(run.outcomes),
        "latency_origin": "due" if is_open else "sent",
    }
    values: dict[str, Sequence[float]] = {
        "ttft": [each.ttft for each in good],
        "tpot": [each.tpot for each in good if each.tpot is not None],
        "itl": [gap for each in good for gap in each.itls],
        "e2el": [each.e2el for each in good],
        "ttft_from_send": [each.ttft_from_send for each in good],
        "e2el_from_send": [each.e2el_from_send for each in good],
        "client_queue_time": [each.ready_s - each.due_s for each in whole],
        "e2el_including_client_queue": [each.stream.last_choice_s - each.due_s for each in whole],
    }
    wanted = [*asked.metrics, *(f"{name}_from_send" for name in FROM_SEND if name in asked.metrics)]
    for name in wanted:
        result |= statistics_of(name, values[name], asked.percentiles)
    return result | {
        "input_lens": [input_tokens(outcome) for outcome in run.outcomes],
        "output_lens": [each.num_output_tokens if each else 0 for each in times],
        "ttfts": [each.ttft if each else 0.0 for each in times],
        "itls": [each.itls if each else [] for each in times],
        "latencies": [each.e2el if each else 0.0 for each in times],
        "start_times": [outcome.sent_s for outcome in run.outcomes],
        "due_times": [outcome.due_s for outcome in run.outcomes],
        "queue_times": [outcome.ready_s - outcome.due_s for outcome in run.outcomes],
        "send_lags": [send_lag(outcome) for outcome in run.outcomes],
        "generated_texts": ["".join(outcome.stream.pieces) for outcome in run.outcomes],
        "errors": [outcome.error for outcome in run.outcomes],
    }


def send_lag(outcome: Outcome) -> float:
    """Seconds by which the generator sent too late; until the end of the try where it could not send at all."""
    return (outcome.settled_s if outcome.sent_s is None else outcome.sent_s) - outcome.ready_s


def statistics_of(name: str, seconds: Sequence[float], percentiles: Iterable[float]) -> dict[str, float | None]:
    """mean, median, std (of the population) and pXX in milliseconds, as fields of the result."""
    some = bool(seconds)
    found: dict[str, float | None] = {
        f"mean_{name}_ms": statistics.fmean(seconds) * 1e3 if some else None,
        f"median_{name}_ms": percentile(seconds, 50) * 1e3 if some else None,
        f"std_{name}_ms": statistics.pstdev(seconds) * 1e3 if some else None,
    }
    for q in percentiles:
        found[f"p{q:g}_{name}_ms"] = percentile(seconds, q) * 1e3 if some else None
    return found


def percentile(values: Iterable[float], q: float) -> float:
    """The value below which q percent lie, on the line between neighbours. Raises ValueError where there is none."""
    ranked = sorted(values)
    if not ranked:
        raise ValueError("no values")
    rank = (len(ranked) - 1) * q / 100
    low = math.floor(rank)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (rank - low)


def peak_per_second(times_s: Sequence[float]) -> float:
    """Most events in one whole second, counted from the first."""
    if not times_s:
        return 0.0
    first_s = min(times_s)
    return float(max(Counter(int(each - first_s) for each in times_s).values()))


def peak_concurrency(outcomes: Iterable[Outcome]) -> int:
    """Most requests between sent and settled at one time; one that ends as another begins does not meet it."""
    steps = []
    for outcome in outcomes:
        if outcome.sent_s is not None:
            steps += [(outcome.sent_s, 1), (outcome.settled_s, -1)]
    return max(itertools.accumulate(change for _, change in sorted(steps)), default=0)


def _goodput(times: Iterable[Times], most_ms: Mapping[str, float]) -> int:
    """How many keep every bound; without a second token there is no tpot to miss."""
    return sum(all((getattr(each, name) or 0.0) * 1e3 <= most for name, most in most_ms.items()) for each in times)
