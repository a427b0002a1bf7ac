"""`python -m bench.transfer`: how fast KV blocks move between two processes, beside a plain memcpy.

1. A holder and a puller process per way: NIXL as it chooses its path, NIXL held to tcp, shared memory; one for memcpy.
2. Each round, in random order, every way pulls 1 to 512 blocks (bf16 blocks of SmolLM2-135M, scattered ids), plain and
   with the checksums verified. memcpy runs twice under two names: the ratio of the two is the noise.
3. First contact: from knowing a peer's endpoint to the first byte read from it, for a peer nobody has met.

Bars for `--check`, at 64 blocks and medians: shm at least 0.5 of memcpy; NIXL on its own path at least 0.3 of memcpy;
verifying costs at most the time of the move by memcpy.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.transfer_ends import End, Holder, Memcpy, Puller, scattered
from services.kvtransfer.layout import KVLayout
from services.kvtransfer.transport import PeerRef

LAYOUT = KVLayout("bfloat16", 16, 30, 3, 64, 30 * 2 * 3 * 16 * 64 * 2)
NUM_BLOCKS = 512
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
QUICK_SIZES = (1, 8, 64, 512)
BAR_SIZE = 64
SHM_BAR, NIXL_BAR = 0.5, 0.3


@dataclass(slots=True)
class Way:
    """One way of moving blocks. `seconds`: by number of blocks and whether they were verified, one for each round."""

    name: str
    puller: End
    holder: End | None = None
    seconds: dict[tuple[int, bool], list[float]] = field(default_factory=dict)
    contact_s: list[float] = field(default_factory=list)
    cold_contact_s: float | None = None
    path: str = "memcpy"

    @contextmanager
    def served(self) -> Iterator[None]:
        """The holder helps along, as its transfer thread would; at other times it leaves the cores alone."""
        if self.holder is not None:
            self.holder.tell("serving", True)
        yield
        if self.holder is not None:
            self.holder.tell("serving", False)

    def pull(self, count: int, checksums: list[int] | None) -> float:
        """Seconds of one pull of `count` blocks."""
        remote, local = scattered(NUM_BLOCKS, count, 1), scattered(NUM_BLOCKS, count, 2)
        with self.served():
            return float(self.puller.tell("pull", remote, local, checksums))

    def gbps(self, count: int, verified: bool) -> list[float]:
        """GB/s of each round."""
        return [count * LAYOUT.block_bytes / seconds / 1e9 for seconds in self.seconds[count, verified]]


def start_ways(stack: ExitStack) -> list[Way]:
    """All processes, connected and warm."""

    def end(*arguments: Any, environment: dict[str, str] | None = None) -> End:
        process = End(*arguments, environment=environment)
        stack.callback(process.end)
        return process

    ways = []
    kinds: tuple[tuple[str, str, dict[str, str]], ...] = (
        ("nixl", "nixl", {}),
        ("nixl-tcp", "nixl", {"UCX_TLS": "tcp"}),
        ("shm", "shm", {}),
    )
    for name, kind, environment in kinds:
        holder = end(Holder, kind, LAYOUT, NUM_BLOCKS, environment=environment)
        puller = end(Puller, kind, LAYOUT, NUM_BLOCKS, environment=environment)
        way = Way(name, puller, holder)
        with way.served():
            way.cold_contact_s = puller.tell("contact", holder.tell("endpoint"), True)
        ways.append(way)
    memcpy = end(Memcpy, "", LAYOUT, NUM_BLOCKS)
    return [*ways, Way("memcpy", memcpy), Way("memcpy again", memcpy)]


def measure(rounds: int, sizes: tuple[int, ...]) -> tuple[list[Way], list[float]]:
    """The ways with their seconds, and the GB/s of taking checksums, one per round."""
    order = random.Random(0)
    checksum_gbps = []
    with ExitStack() as stack:
        ways = start_ways(stack)
        holder = next(way.holder for way in ways if way.holder is not None)
        expected = {count: holder.tell("checksums", scattered(NUM_BLOCKS, count, 1))[0] for count in sizes}
        for number in range(-1, rounds):  # the first round warms up
            jobs = [(way, count, verified) for way in ways for count in sizes for verified in (False, True)]
            order.shuffle(jobs)
            for way, count, verified in jobs:
                seconds = way.pull(count, expected[count] if verified else None)
                if number >= 0:
                    way.seconds.setdefault((count, verified), []).append(seconds)
            if number >= 0:
                for way in ways:
                    meet_stranger(way, number)
                taken_s = holder.tell("checksums", list(range(NUM_BLOCKS)))[1]
                checksum_gbps.append(NUM_BLOCKS * LAYOUT.block_bytes / taken_s / 1e9)
        for way in ways:
            if way.holder is not None:
                way.path = way.puller.tell("path")
    return ways, checksum_gbps


def meet_stranger(way: Way, number: int) -> None:
    """First contact with an agent that is new to a process that is not."""
    if way.holder is None:
        return
    endpoint = way.holder.tell("stranger", number)
    assert endpoint.peer == PeerRef("stranger", str(number))
    with way.served():
        way.contact_s.append(way.puller.tell("contact", endpoint, False))


def ratios(way: Way, other: Way, count: int, verified: bool) -> list[float]:
    """Speed of `way` over that of `other`, round by round."""
    return [mine / theirs for mine, theirs in zip(way.gbps(count, verified), other.gbps(count, verified), strict=True)]


def summary(ways: list[Way], sizes: tuple[int, ...], checksum_gbps: list[float]) -> dict[str, Any]:
    """The figures, by name: medians with the lowest and highest round."""

    def spread(values: list[float]) -> dict[str, float]:
        return {"median": statistics.median(values), "min": min(values), "max": max(values)}

    memcpy, again = ways[-2:]
    return {
        "block_bytes": LAYOUT.block_bytes,
        "noise": spread([ratio for count in sizes for ratio in ratios(again, memcpy, count, False)]),
        "checksum_gbps": spread(checksum_gbps),
        "ways": {
            way.name: {
                "path": way.path,
                "cold_contact_s": way.cold_contact_s,
                "contact_s": spread(way.contact_s) if way.contact_s else None,
                "gbps": {
                    str(count): {
                        "plain": spread(way.gbps(count, False)),
                        "verified": spread(way.gbps(count, True)),
                        "of_memcpy": spread(ratios(way, memcpy, count, False)),
                    }
                    for count in sizes
                },
            }
            for way in ways
        },
    }


def machine() -> dict[str, Any]:
    """Where this ran, as far as it matters here."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
    load = round(os.getloadavg()[0], 1)
    return {"cpu": cpu, "cores": os.cpu_count(), "load_before": load, "kernel": platform.release(), "threads": 1}


def print_tables(result: dict[str, Any], sizes: tuple[int, ...]) -> None:
    """GB/s by number of blocks, then first contact."""
    names = list(result["ways"])
    print(f"\nGB/s, plain / verified (median), blocks of {result['block_bytes']:,} bytes")
    print(f"{'blocks':>7}" + "".join(f"{name:>18}" for name in names))
    for count in sizes:
        cells = [result["ways"][name]["gbps"][str(count)] for name in names]
        row = [f"{cell['plain']['median']:.2f} / {cell['verified']['median']:.2f}" for cell in cells]
        print(f"{count:>7}" + "".join(f"{text:>18}" for text in row))
    print("\nratio to memcpy, plain (median, lowest to highest round)")
    for count in sizes:
        cells = [result["ways"][name]["gbps"][str(count)]["of_memcpy"] for name in names if name != "memcpy"]
        row = [f"{cell['median']:.2f} ({cell['min']:.2f}-{cell['max']:.2f})" for cell in cells]
        print(f"{count:>7}" + "".join(f"{text:>18}" for text in row) + ("   last column: noise" if count == 1 else ""))
    print(f"\nchecksums alone: {result['checksum_gbps']['median']:.1f} GB/s on one core")
    for name, way in result["ways"].items():
        if way["contact_s"]:
            print(
                f"first contact, {name} over {way['path']}: {way['contact_s']['median'] * 1e3:.1f} ms, "
                f"{way['cold_contact_s'] * 1e3:.0f} ms for a process's very first"
            )


def missed_bars(result: dict[str, Any], size: int) -> list[str]:
    """Every bar of the docstring that was missed, with its figure."""
    ways = {name: way["gbps"][str(size)] for name, way in result["ways"].items()}
    verify = ways["memcpy"]["plain"]["median"] / ways["memcpy"]["verified"]["median"] - 1
    figures = [
        ("shm of memcpy", ways["shm"]["of_memcpy"]["median"], SHM_BAR, True),
        ("nixl of memcpy", ways["nixl"]["of_memcpy"]["median"], NIXL_BAR, True),
        ("cost of verifying, in memcpys", verify, 1.0, False),
    ]
    return [
        f"{name}: {value:.2f}, bar {bar}"
        for name, value, bar, at_least in figures
        if (value < bar if at_least else value > bar)
    ]


def plot(result: dict[str, Any], sizes: tuple[int, ...], path: Path) -> None:
    """GB/s over the number of blocks."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, way in result["ways"].items():
        if name == "memcpy again":
            continue
        for kind, dash in (("plain", "-"), ("verified", "--")):
            values = [way["gbps"][str(count)][kind]["median"] for count in sizes]
            axes.plot(sizes, values, dash, label=f"{name} ({way['path']}), {kind}", alpha=0.9)
    axes.set(xscale="log", xlabel=f"blocks of {result['block_bytes']:,} bytes", ylabel="GB/s", title="Moving KV blocks")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    """Measures, prints, writes result.json and transfer.svg; with --check, exits 1 where a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.transfer")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="a minute, for a look")
    parser.add_argument("--check", action="store_true", help="exit 1 where a bar of the docstring is missed")
    options = parser.parse_args()
    sizes = QUICK_SIZES if options.quick else SIZES
    where = machine()
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    ways, checksum_gbps = measure(5 if options.quick else 11, sizes)
    result = {"machine": where, **summary(ways, sizes, checksum_gbps)}
    print_tables(result, sizes)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "result.json").write_text(json.dumps(result, indent=2))
        plot(result, sizes, options.out / "transfer.svg")
    missed = missed_bars(result, BAR_SIZE) if options.check else []
    for line in missed:
        print(f"missed: {line}")
    best = result["ways"]["nixl"]["gbps"][str(BAR_SIZE)]
    print(
        f"NIXL over {result['ways']['nixl']['path']} moves {BAR_SIZE} blocks at {best['plain']['median']:.2f} GB/s "
        f"({best['of_memcpy']['median']:.2f} of memcpy), {best['verified']['median']:.2f} verified."
    )
    if missed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
