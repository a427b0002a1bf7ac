"""What every bench has in common: flags, where it ran, interleaved rounds, medians with spread, bars, result.json.

    options = report.options("offline", __doc__)
    where = report.machine()
    seconds = report.rounds({"ours": run_ours, "ours again": run_ours, "theirs": run_theirs}, options.num_rounds)
    report.finish(options, {"machine": where, ...}, bars=[Bar("decode at batch 1", ratio, 1.3)], summary="...")

The control runs the same thing under two names: the ratio of the two is the noise of everything else that is printed.
"""

import argparse
import json
import os
import platform
import random
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FEWEST_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Options:
    """The flags that every bench takes."""

    out: Path | None
    quick: bool
    check: bool
    threads: int
    num_rounds: int


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure and the least it has to be."""

    name: str
    value: float
    least: float

    @property
    def missed(self) -> bool:
        """Whether the figure falls short."""
        return not self.value >= self.least


def options(name: str, doc: str | None, rounds: int = 7) -> Options:
    """Parse the command line of `python -m bench.NAME`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.{name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for result.json and plots")
    parser.add_argument("--quick", action="store_true", help="a minute, for a look")
    parser.add_argument("--check", action="store_true", help="exit 1, naming the figure, where a bar is missed")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="compute threads (all cores)")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"interleaved rounds, at least {FEWEST_ROUNDS}")
    given = parser.parse_args()
    num_rounds = FEWEST_ROUNDS if given.quick else max(FEWEST_ROUNDS, given.rounds)
    return Options(given.out, given.quick, given.check, given.threads, num_rounds)


def machine(threads: int) -> dict[str, Any]:
    """Where this runs, as far as figures depend on it. A load that is not near 0 spoils them."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    facts = dict(line.partition(":")[::2] for line in lines if ":" in line)
    cpu = {key.strip(): value.strip() for key, value in facts.items()}
    flags = cpu.get("flags", "").split()
    return {
        "cpu": cpu.get("model name", platform.machine()),
        "instructions": [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags],
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "openmp": openmp(),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def openmp() -> str:
    """The OpenMP runtimes in this process, and how their threads wait."""
    names = {Path(line.split()[-1]).name for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    runtimes = sorted(name for name in names if name.startswith(("libgomp", "libiomp", "libomp")))
    waiting = {
        key: os.environ[key] for key in ("OMP_WAIT_POLICY", "KMP_BLOCKTIME", "GOMP_SPINCOUNT") if key in os.environ
    }
    how = ", ".join(f"{key}={value}" for key, value in waiting.items()) or "default waiting (threads spin)"
    return f"{' + '.join(runtimes) or 'none loaded yet'}; {how}"


def rounds(
    contestants: Mapping[str, Callable[[int], Mapping[str, float]]], num_rounds: int, say: str = ""
) -> dict[str, dict[str, list[float]]]:
    """Run every contestant once per round, in random order, after one round of warming up.

    A contestant is given the round's number (the same input for all) and returns its figures by name. Returns, for each
    contestant and figure, a value per round.
    """
    order = random.Random(0)
    values: dict[str, dict[str, list[float]]] = {name: {} for name in contestants}
    for number in range(-1, num_rounds):
        names = list(contestants)
        order.shuffle(names)
        for name in names:
            progress(f"{say} round {number + 1} of {num_rounds}: {name}")
            for figure, value in contestants[name](number).items():
                if number >= 0:
                    values[name].setdefault(figure, []).append(value)
    progress("")
    return values


def progress(text: str) -> None:
    """Show one line in place, on a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text}")
        sys.stderr.flush()


def ratios(mine: list[float], theirs: list[float]) -> list[float]:
    """Round by round: mine over theirs."""
    return [a / b for a, b in zip(mine, theirs, strict=True)]


def spread(values: list[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def show(figures: Mapping[str, float], digits: int = 2) -> str:
    """A spread as text: median (lowest-highest)."""
    return f"{figures['median']:.{digits}f} ({figures['min']:.{digits}f}-{figures['max']:.{digits}f})"


def finish(
    given: Options,
    result: Mapping[str, Any],
    bars: list[Bar],
    summary: str,
    plots: Mapping[str, Callable[[Path], None]] | None = None,
) -> None:
    """Write result.json and plots, name missed bars, print the summary last. Exits 1 where --check fails."""
    missed = [bar for bar in bars if bar.missed]
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        judged = [{"name": bar.name, "value": bar.value, "least": bar.least, "missed": bar.missed} for bar in bars]
        full = {**result, "quick": given.quick, "rounds": given.num_rounds, "bars": judged, "summary": summary}
        (given.out / "result.json").write_text(json.dumps(full, indent=2) + "\n")
        for name, plot in (plots or {}).items():
            plot(given.out / name)
    for bar in missed:
        print(f"missed: {bar.name} is {bar.value:.2f}, the bar is {bar.least}")
    print(summary)
    if given.check and missed:
        raise SystemExit(1)
