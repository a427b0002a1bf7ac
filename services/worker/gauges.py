"""The numbers of a worker that dashboards and per-pool autoscalers read. One process is one worker, so no labels."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from services.engine.block_pool import BlockCounts
from services.engine.counters import SchedulerCounters
from services.engine.engine import StepResult
from services.engine.scheduler import SchedulerLoad

WAITING = Gauge("pdserve_worker_waiting_sequences", "sequences that hold no blocks yet")
RUNNING = Gauge("pdserve_worker_running_sequences", "sequences that a step may compute")
RECEIVING = Gauge("pdserve_worker_receiving_sequences", "sequences whose KV is on its way")
BACKLOG = Gauge("pdserve_worker_backlog_tokens", "prompt tokens queued or half done")
OCCUPANCY = Gauge("pdserve_worker_kv_occupancy_ratio", "share of KV blocks that somebody holds, 0 to 1")
BLOCKS = Gauge("pdserve_worker_kv_blocks", "KV blocks by state; the states sum to the total", ["state"])
STEP_SECONDS = Histogram(
    "pdserve_worker_step_seconds",
    "one step: schedule, run, settle",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5),
)
TOKENS = Counter("pdserve_worker_tokens_total", "tokens computed", ["phase"])
OUTPUT_TOKENS = Counter("pdserve_worker_output_tokens_total", "tokens sampled here")
ATTEMPTS = Counter("pdserve_worker_attempts_total", "attempts that ended here", ["outcome"])
CANCELLED = Counter(
    "pdserve_worker_cancelled_total", "attempts given up by their gateway, by how far they were", ["stage"]
)
INFO = Gauge("pdserve_worker_info", "always 1; what this worker is", ["role", "model", "dtype", "transport"])

# What the scheduler counts itself; set, not added, so that the two can never differ.
STEPS = Gauge("pdserve_worker_steps", "steps since the start")
STEPS_MIXED = Gauge("pdserve_worker_steps_mixed", "steps that held prefill chunks and decodes together")
PREEMPTIONS = Gauge("pdserve_worker_preemptions", "sequences that gave their blocks back to others")
PREFIX_HIT_TOKENS = Gauge("pdserve_worker_prefix_hit_tokens", "prompt tokens whose KV was cached here")
PROMPT_TOKENS_COMPUTED = Gauge("pdserve_worker_prompt_tokens_computed", "prompt tokens computed here")
EVICTIONS = Gauge("pdserve_worker_evictions", "cached blocks given up for new ones")


def observe_step(result: StepResult) -> None:
    """Books a step that computed something."""
    STEP_SECONDS.observe(result.duration_s)
    TOKENS.labels("prefill").inc(result.num_prefill_tokens)
    TOKENS.labels("decode").inc(result.num_decode_tokens)
    OUTPUT_TOKENS.inc(sum(output.token is not None for output in result.outputs))


def show(load: SchedulerLoad, counts: BlockCounts, counters: SchedulerCounters, num_evictions: int) -> None:
    """Sets every gauge to what holds now."""
    WAITING.set(load.num_waiting)
    RUNNING.set(load.num_running)
    RECEIVING.set(load.num_receiving)
    BACKLOG.set(load.backlog_tokens)
    OCCUPANCY.set((counts.used + counts.leased + counts.quarantined) / counts.total)
    for state in ("free", "cached", "used", "leased", "quarantined"):
        BLOCKS.labels(state).set(getattr(counts, state))
    STEPS.set(counters.num_steps)
    STEPS_MIXED.set(counters.num_steps_mixed)
    PREEMPTIONS.set(counters.num_preemptions)
    PREFIX_HIT_TOKENS.set(counters.num_prefix_hit_tokens)
    PROMPT_TOKENS_COMPUTED.set(counters.num_prompt_tokens_computed)
    EVICTIONS.set(num_evictions)
