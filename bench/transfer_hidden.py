"""How much of a transfer hides behind the prefill, by prompt length, through real workers.

1. Two deployments of one prefill and one decode worker over NIXL, a thread each: one computes prompts in chunks of 512
   tokens, whose blocks move while the next chunk is computed; one computes them whole, so that nothing can hide.
2. Each round asks both for one fresh prompt of each length, in random order, one at a time. The request's timeline
   (`/debug/requests/{id}`) says what of its transfer was *exposed*: from the first token sampled to the release arrived
   at the prefill worker, with the way of the news and of the release.
3. Hidden is 1 - exposed in chunks / exposed whole. The most it can be is (chunks - 1) / chunks: the last chunk moves
   when nothing is left to hide behind. One chunk is the control: its hidden share is noise about 0.

Beside it: *moving*, what pulls and their verification took in sum (the decode worker's metrics), and the share that
`pdserve demo` prints, whose transfer is a span that holds the wait for the next chunk, and so can exceed the bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import httpx2

from bench import report
from bench.load import workload
from services.launcher.deployment import Deployment
from services.launcher.timeline import read_timeline

MODEL = "smollm2-135m"
CHUNK, WHOLE = 512, 8192  # token budgets
BLOCK_SIZE = 16
LENGTHS, QUICK_LENGTHS = (512, 1024, 2048, 4096), (512, 2048)
ROUNDS, QUICK_ROUNDS = 5, 2
BAR_FROM, BAR = 2048, 0.5
IDS = range(1000, 40_000)  # of tokens that are text
KV_MEMORY_MB = 512
METRICS = {
    "pull_s": "pdserve_kvtransfer_pull_seconds_sum",
    "verify_s": "pdserve_kvtransfer_verify_seconds_sum",
}
Figures = dict[str, float]


def num_rounds(quick: bool) -> int:
    """How many prompts of each length, apart from the one that warms up."""
    return QUICK_ROUNDS if quick else ROUNDS


def bound(length: int) -> float:
    """The most of the transfer of so many tokens that can hide."""
    chunks = math.ceil(length / CHUNK)
    return (chunks - 1) / chunks


def hidden(chunked_s: list[float], whole_s: list[float]) -> list[float]:
    """Round by round: the share of the time exposed without overlap that is not exposed with it; below 0 if longer."""
    return [1 - ratio for ratio in report.ratios(chunked_s, whole_s)]


class Asker:
    """Sends prompts to a deployment, one at a time."""

    def __init__(self, house: Deployment) -> None:
        self._house = house
        self._client = httpx2.Client(base_url=house.gateway_url, timeout=600.0, trust_env=False)

    def close(self) -> None:
        """Hangs up."""
        self._client.close()

    def ask(self, length: int, number: int) -> Figures:
        """The figures of one fresh prompt of so many tokens. Raises RuntimeError where it took another path."""
        prompt = workload.make_prompts(1, workload.Lengths(length, 2), workload.token_ids(IDS), f"{length}-{number}")[0]
        body = {"model": MODEL, "prompt": prompt.content, "max_tokens": 2, "ignore_eos": True, "temperature": 0}
        before = self._moved()
        answer = self._client.post("/v1/completions", json=body).raise_for_status().json()
        found = self._client.get(f"/debug/requests/{answer['id']}").raise_for_status().json()
        moved = {name: value - before[name] for name, value in self._moved().items()}
        timeline = read_timeline(found, float(found["total_s"]))
        if timeline.path != "disaggregated" or timeline.num_blocks != math.ceil(length / BLOCK_SIZE):
            raise RuntimeError(f"{timeline.path}: {timeline.num_blocks} blocks moved for {length} tokens")
        return moved | {
            "exposed_s": timeline.stages_s["exposed_transfer"],
            "moving_s": sum(moved.values()),
            "prefill_s": timeline.stages_s["prefill"],
            "hidden_of_span": timeline.hidden_share,
        }

    def _moved(self) -> Figures:
        samples = self._house.samples("decode-0")
        return {name: samples.total(metric) for name, metric in METRICS.items()}


def measure(quick: bool) -> dict[str, Any]:
    """By length: the spreads of the figures in chunks and whole, the hidden share and its bound."""
    lengths = QUICK_LENGTHS if quick else LENGTHS
    with ExitStack() as stack:
        askers = {}
        for budget in (CHUNK, WHOLE):
            house = Deployment(
                model=MODEL,
                prefill=1,
                decode=1,
                threads=1,
                kv_memory_mb_prefill=KV_MEMORY_MB,
                kv_memory_mb_decode=KV_MEMORY_MB,
                env={"*": {"PDSERVE_TOKEN_BUDGET": str(budget)}},
            )
            report.progress(f"starting a deployment with a token budget of {budget}")
            askers[budget] = Asker(stack.enter_context(house))
            stack.callback(askers[budget].close)
        contestants = {
            f"{length} tokens in steps of {budget}": partial(askers[budget].ask, length)
            for length in lengths
            for budget in askers
        }
        values = report.rounds(contestants, num_rounds(quick), "hidden,")
    return {
        str(length): compare(length, *(_of(values, length, budget) for budget in (CHUNK, WHOLE))) for length in lengths
    }


def _of(values: Mapping[str, Mapping[str, list[float]]], length: int, budget: int) -> Mapping[str, list[float]]:
    return values[f"{length} tokens in steps of {budget}"]


def compare(length: int, chunked: Mapping[str, list[float]], whole: Mapping[str, list[float]]) -> dict[str, Any]:
    """The figures of one length."""
    return {
        "hidden": report.spread(hidden(chunked["exposed_s"], whole["exposed_s"])),
        "bound": bound(length),
        "chunked": {name: report.spread(each) for name, each in chunked.items()},
        "whole": {name: report.spread(each) for name, each in whole.items()},
    }


def print_table(found: Mapping[str, Any]) -> None:
    """A line for each length; medians in ms."""
    print("\nhidden behind the prefill (median, lowest to highest round); ms are medians")
    heads = f"{'hidden':>20} {'bound':>6} {'exposed':>8} {'exposed whole':>14} {'moving':>7} {'prefill':>8}"
    print(f"{'tokens':>7} {heads} {'of the span':>12}")
    for length, row in found.items():
        chunked = {name: each["median"] for name, each in row["chunked"].items()}
        print(
            f"{length:>7} {report.show(row['hidden']):>20} {row['bound']:>6.2f} {chunked['exposed_s'] * 1e3:>8.1f} "
            f"{row['whole']['exposed_s']['median'] * 1e3:>14.1f} {chunked['moving_s'] * 1e3:>7.1f} "
            f"{chunked['prefill_s'] * 1e3:>8.0f} {chunked['hidden_of_span']:>12.3f}"
        )


def bars(found: Mapping[str, Any]) -> list[report.Bar]:
    """At least half of it, from 2,048 tokens on."""
    return [
        report.Bar(f"share of the transfer of {length} tokens hidden behind the prefill", row["hidden"]["median"], BAR)
        for length, row in found.items()
        if int(length) >= BAR_FROM
    ]
