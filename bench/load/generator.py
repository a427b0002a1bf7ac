"""Sends requests when they are due, or when a slot is free, and keeps the books of its own lateness.

The life of a request:

1. *due*: the time the schedule says; the start, for all, where the rate is infinite.
2. *ready*: due, and with limited concurrency also a slot free. Between due and ready it waits in the client's queue.
3. *sent*: its first byte goes to the socket. From ready to sent is the generator's own fault: the send lag.
4. Chunks; the last choice; the end of the HTTP answer: *settled*. The slot is free again.

Open loop (a finite rate, or no limit on concurrency): latencies count from *due*, whatever the server did in between,
so that a slow server cannot slow down the clock that measures it. Closed loop (infinite rate, limited concurrency): a
request exists only once its predecessor is done, and latencies count from *sent*.
"""

import asyncio
import gc
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.load.connections import Connection, Pool, WireError
from bench.load.stream import Stream, message_of
from bench.load.workload import Prompt

WATCH_S = 0.02
BURST = 16  # requests that are due together are sent so many between two looks at what came in


@dataclass(frozen=True, slots=True)
class Job:
    """A request, ready to be written, and when it is due after the start."""

    prompt: Prompt
    body: bytes
    due_s: float


@dataclass(frozen=True, slots=True)
class Limits:
    """How many at once (None: no limit), how long one may take, and whether what was generated is kept."""

    max_concurrency: int | None
    request_timeout_s: float
    keeps_text: bool = False


@dataclass(slots=True)
class Outcome:
    """What became of one request; all times in `perf_counter` seconds."""

    prompt: Prompt
    due_s: float
    ready_s: float
    stream: Stream
    sent_s: float | None = None  # None: no connection could be made
    settled_s: float = 0.0
    connected_late: bool = False  # no idle connection was there: the send lag holds the making of one
    error: str = ""  # "": the answer is whole


@dataclass(slots=True)
class Run:
    """All outcomes, in the order of the schedule, and how the generator fared."""

    outcomes: list[Outcome] = field(default_factory=list)
    started_s: float = 0.0
    duration_s: float = 0.0
    cpu_s: float = 0.0  # of this process
    loop_lags_s: list[float] = field(default_factory=list)  # how late the event loop woke, asked every 20 ms


async def run(jobs: Sequence[Job], pool: Pool, limits: Limits) -> Run:
    """Sends every job and waits for every end. An outcome that failed says why; nothing is left out."""
    this = Run()
    gc.collect()
    gc.freeze()  # the requests are not garbage; looking at them again takes milliseconds
    cpu_s = time.process_time()
    this.started_s = time.perf_counter()
    free: asyncio.Queue[float] | None = None  # a slot is the time at which it became free
    if limits.max_concurrency is not None:
        free = asyncio.Queue()
        for _ in range(limits.max_concurrency):
            free.put_nowait(this.started_s)
    async with asyncio.TaskGroup() as outer:
        watch = outer.create_task(_watch_loop(this.loop_lags_s))
        async with asyncio.TaskGroup() as group:
            for index, job in enumerate(jobs):
                due_s = this.started_s + job.due_s
                await _sleep_until(due_s)
                ready_s = due_s if free is None else max(due_s, await free.get())
                outcome = Outcome(job.prompt, due_s, ready_s, Stream(keeps_text=limits.keeps_text))
                this.outcomes.append(outcome)
                group.create_task(_send(job, outcome, pool, limits.request_timeout_s, free))
                if index % BURST == BURST - 1:
                    await asyncio.sleep(0)
        this.duration_s = time.perf_counter() - this.started_s
        this.cpu_s = time.process_time() - cpu_s
        watch.cancel()
    gc.unfreeze()
    return this


async def _sleep_until(due_s: float) -> None:
    while (left_s := due_s - time.perf_counter()) > 0:  # noqa: ASYNC110 (nothing but the clock to wait for)
        await asyncio.sleep(left_s)  # uvloop rounds to milliseconds, and may wake too early


async def _watch_loop(lags_s: list[float]) -> None:
    while True:
        due_s = time.perf_counter() + WATCH_S
        await asyncio.sleep(WATCH_S)
        lags_s.append(max(0.0, time.perf_counter() - due_s))


async def _send(job: Job, outcome: Outcome, pool: Pool, timeout_s: float, free: asyncio.Queue[float] | None) -> None:
    connection = pool.take()
    stream = outcome.stream
    try:
        async with asyncio.timeout(timeout_s):
            if connection is None:
                outcome.connected_late = True
                connection = await pool.connect()
            await connection.exchange(pool.target.request(job.body), stream.feed)
        outcome.error = _fault(connection, stream)
    except TimeoutError:
        outcome.error = f"not over within {timeout_s:g} s"
    except (WireError, OSError) as error:
        # where the length is "until I hang up", an answer is over with [DONE], and one that is not 200 is over
        if connection is not None and connection.status and (stream.done or stream.error or connection.status != 200):
            outcome.error = _fault(connection, stream)
        else:
            outcome.error = str(error) or type(error).__name__
    finally:
        outcome.settled_s = time.perf_counter()
        if connection is not None:
            outcome.sent_s = connection.sent_s
            pool.give(connection)
        if free is not None:
            free.put_nowait(outcome.settled_s)


def _fault(connection: Connection, stream: Stream) -> str:
    """What is wrong with an answer that came to its end; "" where nothing is."""
    if connection.status != 200:
        return f"{connection.status}: {_said(connection.error_body)}"
    if stream.error:
        return stream.error
    if not stream.done:
        return "the stream ended without [DONE]"
    return "" if stream.chunk_times_s else "the stream had no output in it"


def _said(body: bytes) -> str:
    try:
        answer = json.loads(body)
    except ValueError:
        return body.decode("utf-8", "replace").strip()[:200]
    return message_of(answer.get("error", answer) if isinstance(answer, dict) else answer)
