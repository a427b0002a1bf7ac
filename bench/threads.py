"""`python -m bench.threads`: how many threads a worker should have, and whether they should spin while they wait.

1. Whole deployments, asked over HTTP: *alone*, one colocated worker, and *sharing*, a prefill and a decode worker on
   the same cores. Each with the launcher's own choice of threads and of waiting in OpenMP, or with --threads per
   worker and a waiting that is named. Those of a scenario are all up while it runs.
2. Each round, in random order: tokens/s of 1 and of 8 streams, their 32-word prompts included (where pools share cores,
   one stream may end before another begins); the time to the first token of a 512-word prompt (see
   bench/peer/measures.py); and *mixed*: 8 at a time of 16 requests with 128-word prompts, 32 tokens each.
3. The launcher's own choice runs twice: the ratio of the two is the noise.

Spinning is libgomp's GOMP_SPINCOUNT: how often a thread looks before it sleeps; 0 with OMP_WAIT_POLICY=passive.

Bar for --check: in neither scenario is another choice more than 10 % better, by the geometric mean of the four ratios.
"""

import statistics
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import uvloop

from bench import report
from bench.load.connections import Target
from bench.load.generator import Job, Limits
from bench.load.workload import Lengths, bodies, make_prompts, words
from bench.peer.measures import PATH, TTFT, Asker, Sizes, send, whole_name
from bench.peer.server import Wants
from bench.peer.window import whole
from services.launcher.deployment import Deployment

MODEL = "smollm2-135m"
STREAMS = (1, 8)
MIXED = "mixed"
NUM_MIXED, MOST_MIXED, NUM_MIXED_TOKENS = 16, 8, 32
MOST_BETTER = 1.10
EXTRA = {"temperature": 0, "ignore_eos": True}
OWN, AGAIN = "as pdserve up does", "as pdserve up does, again"
FULL, QUICK = Sizes(num_new_tokens=48, num_long_prompts=2), Sizes(num_new_tokens=16, num_long_prompts=1)
Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Choice:
    """Threads per worker (None: the launcher's own choice) and the environment that says how they wait."""

    threads: int | None
    env: Mapping[str, str]


def spinning(count: int) -> dict[str, str]:
    """Environment of threads that look `count` times before they sleep."""
    return {"GOMP_SPINCOUNT": str(count)}


def scenarios(threads: int) -> dict[str, tuple[dict[str, Any], dict[str, Choice]]]:
    """Pools, and the choices that are tried on them, by scenario."""
    own = {OWN: Choice(None, {})}
    some = {
        f"{threads} threads, asleep": Choice(threads, spinning(0)),
        f"{threads} threads, spin 10,000": Choice(threads, spinning(10_000)),
    }
    most = {f"{threads} threads, spin 300,000": Choice(threads, spinning(300_000))}
    return {
        "alone": ({"prefill": 0, "decode": 1}, own | some | most),
        "sharing": ({"prefill": 1, "decode": 1}, own | some),
    }


class Contestant:
    """A deployment, asked over HTTP."""

    def __init__(self, house: Deployment, name: str, sizes: Sizes) -> None:
        self._house = house
        self._name = name
        self._asker = Asker(house.gateway_url, Wants(MODEL, EXTRA), sizes)

    def __call__(self, number: int) -> Figures:
        """All measures of one round, the higher the better."""
        turn = f"{self._name} {number}"
        self._asker.warm_up(turn)
        found = {}
        for streams in STREAMS:
            batch = self._asker.batch(streams, turn)
            found[whole_name(streams)] = whole(batch.answers, batch.sent_s)
        return found | {TTFT: 1e3 / self._asker.ttft_ms(turn), MIXED: self._mixed(turn)}

    def _mixed(self, turn: str) -> float:
        """Tokens/s of requests that come and go."""
        prompts = make_prompts(NUM_MIXED, Lengths(128, NUM_MIXED_TOKENS), words(), f"mixed {turn}")
        requests = bodies(prompts, PATH, MODEL, EXTRA)
        jobs = [Job(prompt, body, 0.0) for prompt, body in zip(prompts, requests, strict=True)]
        done = uvloop.run(send(Target(self._house.gateway_url, PATH, {}), jobs, Limits(MOST_MIXED, 180.0)))
        failed = [outcome.error for outcome in done.outcomes if outcome.error]
        if failed:
            raise RuntimeError(f"{self._name}: {failed[0]}")
        return NUM_MIXED * NUM_MIXED_TOKENS / done.duration_s


def measure(num_rounds: int, threads: int, sizes: Sizes) -> dict[str, Any]:
    """Figures and ratios to the launcher's choice, by scenario and choice."""
    found = {}
    for scenario, (pools, choices) in scenarios(threads).items():
        with ExitStack() as stack:
            contestants: dict[str, Callable[[int], Figures]] = {}
            for name, choice in choices.items():
                report.progress(f"{scenario}: starting {name}")
                env = {role: choice.env for role in ("prefill", "decode")}
                house = Deployment(model=MODEL, threads=choice.threads, env=env, **pools)
                contestants[name] = Contestant(stack.enter_context(house), name, sizes)
            contestants[AGAIN] = contestants[OWN]
            values = report.rounds(contestants, num_rounds, f"{scenario},")
        found[scenario] = summarise(values)
    return found


def summarise(values: Mapping[str, Mapping[str, list[float]]]) -> dict[str, Any]:
    """For each choice its figures, their ratios to the launcher's choice, and the geometric mean of the medians."""
    own = values[OWN]
    found = {}
    for name, figures in values.items():
        ratios = {key: report.spread(report.ratios(figures[key], own[key])) for key in figures}
        found[name] = {
            "figures": {key: report.spread(value) for key, value in figures.items()},
            "ratios": ratios,
            "mean": statistics.geometric_mean(ratio["median"] for ratio in ratios.values()),
        }
    return found


def print_table(found: Mapping[str, Any]) -> None:
    """Figures and ratios, a line for each choice."""
    for scenario, choices in found.items():
        measures = list(next(iter(choices.values()))["figures"])
        print(f"\n{scenario:<28}" + "".join(f"{name:>26}" for name in measures) + f"{'mean ratio':>12}")
        for name, choice in choices.items():
            cells = []
            for key in measures:
                middle = choice["figures"][key]["median"]
                value = f"{1e3 / middle:.0f} ms" if key == TTFT else f"{middle:.1f} tok/s"
                cells.append(f"{value + ' x' + format(choice['ratios'][key]['median'], '.2f'):>26}")
            print(f"{name:<28}" + "".join(cells) + f"{choice['mean']:>12.2f}")


def main() -> None:
    """Measure, print, write result.json."""
    given = report.options("threads", __doc__, rounds=report.FEWEST_ROUNDS)
    where = report.machine(given.threads)
    print(", ".join(f"{name} {value}" for name, value in where.items() if name not in ("threads", "openmp")))
    found = measure(given.num_rounds, given.threads, QUICK if given.quick else FULL)
    print_table(found)
    better = {
        scenario: max((each["mean"], name) for name, each in choices.items() if name != AGAIN)
        for scenario, choices in found.items()
    }
    bars = [
        report.Bar(f"{scenario}: pdserve up over {name}", 1 / mean, 1 / MOST_BETTER)
        for scenario, (mean, name) in better.items()
    ]
    told = [f"{scenario}: {name} ({mean:.2f} times pdserve up)" for scenario, (mean, name) in better.items()]
    report.finish(given, {"machine": where, "model": MODEL, "scenarios": found}, bars, f"Best, {'; '.join(told)}.")


if __name__ == "__main__":
    main()
