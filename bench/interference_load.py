"""One trial of `bench.interference`: running streams, first alone, then beside long prompts; and what the streams felt.

1. The streams start. From the first token of the last of them on, for `quiet_s`, they are alone.
2. For `beside_s`, one long prompt is always in prefill: as soon as one is answered the next is sent, each a fresh one.
3. No further prompt is sent. Every stream's next token is awaited, so that a gap that began in the window is known
   whole, and the end of the last long prompt; then the streams are cut off.

An interval is from one chunk (a token) to the next, as the client read them. It belongs to a window where it overlaps
it, with its whole length; for shares of time only the part inside counts.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.load import workload
from bench.load.connections import Pool, Target, WireError
from bench.load.metrics import percentile
from bench.load.stream import Stream

ENDPOINT = "/v1/completions"
IDS = range(1000, 40_000)  # of tokens that are text
NUM_STREAMS = 4
STREAM_LENGTHS = workload.Lengths(16, 4000)  # never so many: they are cut off
LONG_LENGTHS = workload.Lengths(1500, 2)  # two tokens: with one, nothing would move to decode
EXTRA = {"ignore_eos": True, "temperature": 0}
GAP_FACTOR = 2.0  # of the quiet median, from which an interval is a gap
PATIENCE_S = 120.0
LOOK_S = 0.005
Interval = tuple[float, float]
Window = tuple[float, float]


class TrialError(RuntimeError):
    """The server failed a request, or took too long."""


@dataclass(frozen=True, slots=True)
class Windows:
    """How long the streams run alone, and beside long prompts, in seconds."""

    quiet_s: float
    beside_s: float


@dataclass(slots=True)
class Trial:
    """What the client saw; times are of `perf_counter`."""

    streams: list[Stream]
    quiet: Window = (0.0, 0.0)
    beside: Window = (0.0, 0.0)
    long_sent_s: list[float] = field(default_factory=list)
    long_first_s: list[float] = field(default_factory=list)
    long_ended_s: list[float] = field(default_factory=list)


def intervals(times_s: Sequence[float], window: Window) -> list[Interval]:
    """Those between neighbouring times that overlap the window."""
    begin, end = window
    return [(earlier, later) for earlier, later in itertools.pairwise(times_s) if later > begin and earlier < end]


def lengths(found: Sequence[Interval]) -> list[float]:
    """How long each is."""
    return [later - earlier for earlier, later in found]


def gap_share(found: Sequence[Interval], window: Window, longest_s: float, num_streams: int) -> float:
    """The share of all streams' time in the window that lies in intervals longer than `longest_s`."""
    begin, end = window
    inside = sum(min(b, end) - max(a, begin) for a, b in found if b - a > longest_s)
    return inside / ((end - begin) * num_streams)


def figures(trial: Trial) -> dict[str, float]:
    """By name: intervals in ms, shares, tokens/s. Raises TrialError where no long prompt was answered.

    Output tokens are counted in the window, tokens of long prompts up to the end of the last, which may lie behind it.
    """
    if not trial.long_ended_s:
        raise TrialError("no long prompt was answered")
    times = [stream.chunk_times_s for stream in trial.streams]
    quiet = [interval for each in times for interval in intervals(each, trial.quiet)]
    beside = [interval for each in times for interval in intervals(each, trial.beside)]
    quiet_s = statistics.median(lengths(quiet))
    begin, end = trial.beside
    num_tokens = sum(begin < at <= end for each in times for at in each)
    prompts_per_s = len(trial.long_ended_s) / (trial.long_ended_s[-1] - begin)
    output_per_s = num_tokens / (end - begin)
    ttfts = [first - sent for sent, first in zip(trial.long_sent_s, trial.long_first_s, strict=True)]
    return {
        "quiet_itl_ms": quiet_s * 1e3,
        "quiet_p99_ms": percentile(lengths(quiet), 99) * 1e3,
        "itl_p99_ms": percentile(lengths(beside), 99) * 1e3,
        "itl_max_ms": max(lengths(beside)) * 1e3,
        "gap_share": gap_share(beside, trial.beside, GAP_FACTOR * quiet_s, len(times)),
        "long_ttft_ms": statistics.median(ttfts) * 1e3,
        "output_tokens_per_s": output_per_s,
        "tokens_per_s": output_per_s + prompts_per_s * LONG_LENGTHS.num_input,
        "num_long": float(len(trial.long_ended_s)),
    }


def bodies(model: str, lengths: workload.Lengths, number: int, seed: str) -> list[bytes]:
    """Requests whose prompts nobody has seen, by seed."""
    prompts = workload.make_prompts(number, lengths, workload.token_ids(IDS), seed)
    return workload.bodies(prompts, ENDPOINT, model, EXTRA)


async def run(
    base_url: str, model: str, windows: Windows, seed: str, headers: Mapping[str, str] | None = None
) -> Trial:
    """The trial. Raises TrialError, OSError."""
    pool = Pool(Target(base_url, ENDPOINT, headers or {}))
    trial = Trial([Stream() for _ in range(NUM_STREAMS)])
    load = bodies(model, STREAM_LENGTHS, NUM_STREAMS, f"streams-{seed}")
    tasks = [asyncio.create_task(_ask(pool, *each)) for each in zip(load, trial.streams, strict=True)]
    try:
        async with asyncio.timeout(PATIENCE_S + windows.quiet_s + windows.beside_s):
            await _news(trial.streams, tasks, 0.0)
            begin = time.perf_counter()
            await asyncio.sleep(windows.quiet_s)
            trial.quiet = (begin, begin := time.perf_counter())
            trial.beside = (begin, begin + windows.beside_s)
            await _long_prompts(pool, model, trial, seed)
            await _news(trial.streams, tasks, trial.beside[1])
    except TimeoutError:
        raise TrialError(f"not over within {PATIENCE_S:g} s more than its windows") from None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        pool.close()
    return trial


async def _long_prompts(pool: Pool, model: str, trial: Trial, seed: str) -> None:
    for index in itertools.count():
        if time.perf_counter() >= trial.beside[1]:
            return
        (body,) = bodies(model, LONG_LENGTHS, 1, f"long-{seed}-{index}")
        stream = Stream()
        trial.long_sent_s.append(time.perf_counter())
        await _ask(pool, body, stream)
        trial.long_first_s.append(stream.chunk_times_s[0])
        trial.long_ended_s.append(stream.last_choice_s)


async def _ask(pool: Pool, body: bytes, stream: Stream) -> None:
    """One request on a connection of its own, which ends with it. Raises TrialError."""
    connection = await pool.connect()
    try:
        await connection.exchange(pool.target.request(body), stream.feed)
    except WireError as error:
        raise TrialError(str(error)) from error
    finally:
        connection.close()
    if connection.status != 200 or stream.error or not stream.chunk_times_s:
        raise TrialError(f"{connection.status}: {stream.error or connection.error_body.decode('utf-8', 'replace')}")


async def _news(streams: Sequence[Stream], tasks: Sequence[asyncio.Task[None]], since_s: float) -> None:
    """Waits until every stream has had a token after `since_s`. Raises TrialError where one is over."""
    while not all(stream.chunk_times_s and stream.chunk_times_s[-1] > since_s for stream in streams):
        for task in tasks:
            if task.done():
                task.result()
                raise TrialError("a stream ended before it was cut off")
        await asyncio.sleep(LOOK_S)
