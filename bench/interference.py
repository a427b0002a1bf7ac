"""`python -m bench.interference`: what running streams feel of long prompts, the reason for the split.

1. Three deployments, all on the same cores and alive throughout: a colocated worker that computes a prompt in one step
   (2 threads, token budget 4,096); the same in chunks of 512; one prefill and one decode worker of a thread each.
2. Each round, in random order: four streams, first alone, then while one 1,500-token prompt, always a fresh one, is
   always in prefill (interference_load.py). The disaggregated one is measured twice: the difference is the noise.
3. Of the streams, beside long prompts: inter-token latency p99 and maximum, and the share of their time in gaps of more
   than twice the quiet median of the same trial. As the price beside it: time to first token of the long prompts, and
   tokens/s, prompts and outputs together.

Bars for --check, medians of the rounds: disaggregated, p99, maximum and gap share are each cut by at least half against
the worker without chunks, and lie (by 0.01 at least) below the one with chunks of 512.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop

from bench import report
from bench.interference_load import LONG_LENGTHS, TrialError, Windows, figures, run
from services.launcher.deployment import Deployment

MODEL = "smollm2-135m"
WHOLE, CHUNKED, SPLIT, AGAIN = "colocated, no chunks", "colocated, 512", "disaggregated", "disaggregated again"
MEMORY: Mapping[str, Any] = {"kv_memory_mb_prefill": 512, "kv_memory_mb_decode": 512}
BLOCK_SIZE = 16
KINDS: Mapping[str, Mapping[str, Any]] = {
    WHOLE: {"prefill": 0, "decode": 1, "threads": 2, "env": {"*": {"PDSERVE_TOKEN_BUDGET": "4096"}}},
    CHUNKED: {"prefill": 0, "decode": 1, "threads": 2, "env": {"*": {"PDSERVE_TOKEN_BUDGET": "512"}}},
    SPLIT: {"prefill": 1, "decode": 1, "threads": 1, "env": {"*": {"PDSERVE_TOKEN_BUDGET": "512"}}},
}
WINDOWS, QUICK_WINDOWS, WARM_UP = Windows(3.0, 8.0), Windows(1.0, 2.0), Windows(1.0, 1.0)
QUICK_ROUNDS = 1
IDLE_S = 3.0
FELT = {"itl_p99_ms": "ITL p99", "itl_max_ms": "ITL maximum", "gap_share": "gap share"}
LEAST_CUT = {WHOLE: 0.5, CHUNKED: 0.01}
Figures = dict[str, float]
Values = Mapping[str, Mapping[str, list[float]]]


def cut(mine: float, theirs: float) -> float:
    """By what share mine is less than theirs: 1 - mine / theirs. Against nothing, 0 for nothing and -1 for anything."""
    if theirs <= 0:
        return 0.0 if mine <= 0 else -1.0
    return 1 - mine / theirs


def cpu_s(pids: list[int]) -> float:
    """Seconds of CPU time that processes have used, user and system."""
    ticks = 0
    for pid in pids:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(after_name[11]) + int(after_name[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def idle_cpu(houses: Mapping[str, Deployment]) -> dict[str, float]:
    """The share of a core that each deployment takes while nobody asks anything of any."""
    pids = {kind: [pid for name in house.members if (pid := house.pid(name))] for kind, house in houses.items()}
    before = {kind: cpu_s(each) for kind, each in pids.items()}
    time.sleep(IDLE_S)
    return {kind: (cpu_s(each) - before[kind]) / IDLE_S for kind, each in pids.items()}


class Contestant:
    """One deployment under a name: a trial a round, with prompts that are the same for all but one that runs again."""

    def __init__(self, house: Deployment, windows: Windows, name: str = "") -> None:
        self._house, self._windows, self._name = house, windows, name
        self._splits = "prefill-0" in house.members

    def __call__(self, number: int) -> Figures:
        """The figures of a trial; of a short one where it only warms up. Raises TrialError."""
        windows = WARM_UP if number < 0 else self._windows
        before = self._num_pulled()
        found = figures(uvloop.run(run(self._house.gateway_url, MODEL, windows, f"{number}{self._name}")))
        if self._splits and self._num_pulled() - before < found["num_long"] * (LONG_LENGTHS.num_input // BLOCK_SIZE):
            raise TrialError("prompts were not handed from prefill to decode")
        return found

    def _num_pulled(self) -> float:
        return self._house.samples("decode-0").total("pdserve_kvtransfer_pulled_blocks_total")


def measure(given: report.Options) -> tuple[Values, dict[str, float]]:
    """The figures of every round by contestant, and the idle deployments' share of a core."""
    with ExitStack() as stack:
        houses = {}
        for kind, options in KINDS.items():
            report.progress(f"starting: {kind}")
            houses[kind] = stack.enter_context(Deployment(model=MODEL, **MEMORY, **options))
        windows = QUICK_WINDOWS if given.quick else WINDOWS
        contestants = {kind: Contestant(house, windows) for kind, house in houses.items()}
        contestants[AGAIN] = Contestant(houses[SPLIT], windows, " again")
        idle = idle_cpu(houses)
        return report.rounds(contestants, given.num_rounds), idle


def cuts(values: Values, other: str, mine: str = SPLIT) -> dict[str, dict[str, float]]:
    """By figure: how much less the streams felt than in the other deployment, round by round."""
    return {
        name: report.spread([cut(*pair) for pair in zip(values[mine][name], values[other][name], strict=True)])
        for name in FELT
    }


def bars(cut_from: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[report.Bar]:
    """Those of the docstring."""
    return [
        report.Bar(f"{FELT[name]} of disaggregated, cut from that of {other}", spread["median"], least)
        for other, least in LEAST_CUT.items()
        for name, spread in cut_from[other].items()
    ]


def print_table(result: Mapping[str, Any]) -> None:
    """A line for each deployment, then the cuts."""
    print("\nfour streams beside one 1,500-token prompt always in prefill: median (lowest to highest round)")
    heads = f"{'quiet ITL, ms':>20} {'ITL p99, ms':>24} {'ITL max, ms':>24} {'gap share':>18}"
    print(f"{'':<22}{heads} {'long TTFT, ms':>26} {'tokens/s':>20} {'out tok/s':>20}")
    for kind, row in result["deployments"].items():
        shown = report.show
        print(
            f"{kind:<22}{shown(row['quiet_itl_ms'], 1):>20} {shown(row['itl_p99_ms'], 0):>24} "
            f"{shown(row['itl_max_ms'], 0):>24} {shown(row['gap_share']):>18} {shown(row['long_ttft_ms'], 0):>26} "
            f"{shown(row['tokens_per_s'], 0):>20} {shown(row['output_tokens_per_s'], 1):>20}"
        )
    for other, row in result["cuts"].items():
        told = ", ".join(f"{FELT[name]} {report.show(spread)}" for name, spread in row.items())
        print(f"disaggregated, cut from {other}: {told}")
    print(f"noise, disaggregated again over disaggregated, ITL p99: {report.show(result['noise'])}")
    idle = ", ".join(f"{kind} {share:.1%}" for kind, share in result["idle_cpu"].items())
    print(f"idle deployments, share of a core: {idle}")


def plot(rows: Mapping[str, Mapping[str, Mapping[str, float]]], path: Path) -> None:
    """What streams feel, and the price, a panel each; whiskers from the lowest to the highest round."""
    from matplotlib import pyplot

    panels = {**FELT, "long_ttft_ms": "TTFT of long prompts", "tokens_per_s": "tokens/s"}
    drawing, all_axes = pyplot.subplots(1, len(panels), figsize=(14, 3.6))
    for axes, (name, title) in zip(all_axes, panels.items(), strict=True):
        for at, kind in enumerate(KINDS):
            each = rows[kind][name]
            whiskers = [[each["median"] - each["min"]], [each["max"] - each["median"]]]
            axes.bar(at, each["median"], 0.7, yerr=whiskers, capsize=4, label=kind)
        axes.set(title=title + (", ms" if name.endswith("_ms") else ""), xticks=[])
        if name.startswith("itl"):
            axes.set_yscale("log")
    all_axes[0].legend(fontsize=7)
    drawing.tight_layout()
    drawing.savefig(path)
    pyplot.close(drawing)


def main() -> None:
    """Measure, print, write result.json and interference.svg."""
    given = report.options("interference", __doc__, rounds=report.FEWEST_ROUNDS)
    given = replace(given, num_rounds=QUICK_ROUNDS) if given.quick else given
    where = report.machine(given.threads)
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    values, idle = measure(given)
    rows = {kind: {name: report.spread(each) for name, each in found.items()} for kind, found in values.items()}
    result: dict[str, Any] = {
        "machine": where,
        "model": MODEL,
        "deployments": rows,
        "cuts": {other: cuts(values, other) for other in LEAST_CUT},
        "noise": report.spread(report.ratios(values[AGAIN]["itl_p99_ms"], values[SPLIT]["itl_p99_ms"])),
        "idle_cpu": idle,
        "values": values,
    }
    print_table(result)
    p99 = {kind: row["itl_p99_ms"]["median"] for kind, row in rows.items()}
    ttft = {kind: row["long_ttft_ms"]["median"] / 1e3 for kind, row in rows.items()}
    report.finish(
        given,
        result,
        bars(result["cuts"]),
        f"Beside long prompts a stream's ITL p99 is {p99[SPLIT]:.0f} ms disaggregated, {p99[CHUNKED]:.0f} ms colocated "
        f"in chunks of 512, {p99[WHOLE]:.0f} ms without; the long prompts' first token takes {ttft[SPLIT]:.1f}, "
        f"{ttft[CHUNKED]:.1f} and {ttft[WHOLE]:.1f} s.",
        {"interference.svg": lambda path: plot(rows, path)},
    )


if __name__ == "__main__":
    main()
