"""`python -m bench.transfer`: how fast KV blocks move between two processes, and how much of that anybody waits for.

1. A holder and a puller process per way: NIXL as it chooses its path; beside it NIXL's own Python API in a bare loop
   (transfer_raw.py); NIXL held to tcp; shared memory; one process for memcpy. Our transports, and no lease around them.
2. Each round, in random order, every way pulls 1 to 512 blocks (bf16 blocks of SmolLM2-135M; the same scattered ids for
   all), plain and with the checksums verified. memcpy runs twice under two names: the ratio of the two is the noise;
   and once between huge pages, which NIXL's pools have and shared memory does not.
3. CPU time per GB: user and system, of both processes.
4. First contact: from knowing a peer's endpoint to the first byte read from it, for a peer nobody has met.
5. Through real workers: the share of a transfer that hides behind the prefill, by prompt length (transfer_hidden.py).

Bars for --check, medians. At 64 and at 512 blocks, plain: NIXL through our transport at least 0.80 of the bare loop;
shm at least 0.80 of memcpy. At 64: NIXL at least 0.3 of memcpy; verifying takes at most the time of the move by memcpy.
At least half of the transfer of 2,048 tokens and more is hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench import report, transfer_hidden
from bench.transfer_ends import End, Holder, Memcpy, Puller, scattered
from bench.transfer_raw import RawHolder, RawPuller
from services.kvtransfer.layout import KVLayout
from services.kvtransfer.transport import PeerRef

LAYOUT = KVLayout("bfloat16", 16, 30, 3, 64, 30 * 2 * 3 * 16 * 64 * 2)
NUM_BLOCKS = 512
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
QUICK_SIZES = (1, 8, 64, 512)
BAR_SIZES = (64, 512)
RAW_BAR, SHM_BAR, NIXL_BAR, VERIFY_BAR = 0.80, 0.80, 0.3, 1.0
ROUNDS = 11
Figures = dict[str, float]
Values = Mapping[str, Mapping[str, list[float]]]


@dataclass(slots=True)
class Way:
    """One way of moving blocks."""

    name: str
    puller: End
    holder: End | None = None
    verifies: bool = True
    meets: bool = False  # can be introduced to strangers
    cold_contact_s: float | None = None
    path: str = "memcpy"

    @contextmanager
    def served(self) -> Iterator[Figures]:
        """The holder helps along, as its transfer thread would; at other times it leaves the cores alone.

        Afterwards `cpu_s` is what that took.
        """
        spent = {"cpu_s": 0.0}
        if self.holder is not None:
            spent["cpu_s"] -= self.holder.tell("serving", True)
        yield spent
        if self.holder is not None:
            spent["cpu_s"] += self.holder.tell("serving", False)

    def pull(self, count: int, checksums: list[int] | None, _number: int) -> Figures:
        """GB/s of one pull of `count` blocks, and the CPU seconds per GB of both ends."""
        remote, local = scattered(NUM_BLOCKS, count, 1), scattered(NUM_BLOCKS, count, 2)
        with self.served() as spent:
            seconds, cpu_s = self.puller.tell("pull", remote, local, checksums)
        gb = count * LAYOUT.block_bytes / 1e9
        return {"gbps": gb / seconds, "cpu_s_per_gb": (cpu_s + spent["cpu_s"]) / gb}

    def meet_stranger(self, number: int) -> Figures:
        """First contact with an agent that is new to a process that is not."""
        assert self.holder is not None
        endpoint = self.holder.tell("stranger", number)
        assert endpoint.peer == PeerRef("stranger", str(number))
        with self.served():
            return {"contact_s": self.puller.tell("contact", endpoint, False)}


def start_ways(stack: ExitStack) -> list[Way]:
    """All processes, connected and warm."""

    def end(*arguments: Any, environment: dict[str, str] | None = None) -> End:
        process = End(*arguments, LAYOUT, NUM_BLOCKS, environment=environment)
        stack.callback(process.end)
        return process

    def pair(name: str, kind: str, environment: dict[str, str] | None = None) -> Way:
        puller, holder = (end(each, kind, environment=environment) for each in (Puller, Holder))
        return Way(name, puller, holder, meets=True)

    raw = Way("raw nixl", end(RawPuller), end(RawHolder), verifies=False)
    ways = [pair("nixl", "nixl"), raw, pair("nixl-tcp", "nixl", {"UCX_TLS": "tcp"}), pair("shm", "shm")]
    for way in ways:
        assert way.holder is not None
        with way.served():
            way.cold_contact_s = way.puller.tell("contact", way.holder.tell("endpoint"), True)
    memcpy, huge = end(Memcpy, False), end(Memcpy, True)
    return [*ways, Way("memcpy huge pages", huge), Way("memcpy", memcpy), Way("memcpy again", memcpy)]


def job(name: str, count: int, verified: bool) -> str:
    """How a pull is called among the contestants of a round."""
    return f"{name}, {count} blocks{', verified' if verified else ''}"


def measure(num_rounds: int, sizes: tuple[int, ...]) -> tuple[list[Way], Values]:
    """The ways, and the figures of every job, one per round."""
    with ExitStack() as stack:
        ways = start_ways(stack)
        holder = next(way.holder for way in ways if way.meets and way.holder is not None)
        expected = {count: holder.tell("checksums", scattered(NUM_BLOCKS, count, 1))[0] for count in sizes}

        def take_checksums(_number: int) -> Figures:
            taken_s = holder.tell("checksums", list(range(NUM_BLOCKS)))[1]
            return {"gbps": NUM_BLOCKS * LAYOUT.block_bytes / taken_s / 1e9}

        contestants: dict[str, Callable[[int], Figures]] = {"checksums": take_checksums}
        for way in ways:
            for count in sizes:
                contestants[job(way.name, count, False)] = partial(way.pull, count, None)
                if way.verifies:
                    contestants[job(way.name, count, True)] = partial(way.pull, count, expected[count])
            if way.meets:
                contestants[f"{way.name} meets"] = way.meet_stranger
        values = report.rounds(contestants, num_rounds, "moving,")
        for way in ways:
            if way.meets:
                way.path = way.puller.tell("path")
        next(way for way in ways if way.name == "raw nixl").path = "as nixl"
    return ways, values


def speed_ratio(values: Values, name: str, other: str, count: int) -> list[float]:
    """Speed of one way over that of another, plain, round by round."""
    return report.ratios(values[job(name, count, False)]["gbps"], values[job(other, count, False)]["gbps"])


def verify_ratio(values: Values, count: int) -> list[float]:
    """How often the blocks can be verified in the time of their move by memcpy: memcpy / (memcpy verified - memcpy)."""
    pairs = (values[job("memcpy", count, verified)]["gbps"] for verified in (False, True))
    return [(1 / plain) / max(1e-9, 1 / verified - 1 / plain) for plain, verified in zip(*pairs, strict=True)]


def summary(ways: list[Way], values: Values, sizes: tuple[int, ...]) -> dict[str, Any]:
    """The figures by name: medians with the lowest and highest round."""

    def of_size(way: Way, count: int) -> dict[str, Any]:
        plain, verified = (values.get(job(way.name, count, each)) for each in (False, True))
        assert plain is not None
        return {
            "plain": report.spread(plain["gbps"]),
            "verified": report.spread(verified["gbps"]) if verified else None,
            "of_memcpy": report.spread(speed_ratio(values, way.name, "memcpy", count)),
            "of_raw_nixl": report.spread(speed_ratio(values, way.name, "raw nixl", count)),
            "cpu_s_per_gb": report.spread(plain["cpu_s_per_gb"]),
            "cpu_s_per_gb_verified": report.spread(verified["cpu_s_per_gb"]) if verified else None,
        }

    return {
        "block_bytes": LAYOUT.block_bytes,
        "noise": report.spread([each for n in sizes for each in speed_ratio(values, "memcpy again", "memcpy", n)]),
        "checksum_gbps": report.spread(values["checksums"]["gbps"]),
        "verifications_per_memcpy": {str(count): report.spread(verify_ratio(values, count)) for count in sizes},
        "ways": {
            way.name: {
                "path": way.path,
                "cold_contact_s": way.cold_contact_s,
                "contact_s": report.spread(values[f"{way.name} meets"]["contact_s"]) if way.meets else None,
                "sizes": {str(count): of_size(way, count) for count in sizes},
            }
            for way in ways
        },
    }


def print_tables(result: dict[str, Any], sizes: tuple[int, ...]) -> None:
    """By number of blocks: GB/s, the ratios that bars are about, CPU time; then first contact."""
    ways = {name: way["sizes"] for name, way in result["ways"].items()}

    def table(title: str, names: list[str], counts: tuple[int, ...], cell: Callable[[dict[str, Any]], str]) -> None:
        print(f"\n{title}\n{'blocks':>7}" + "".join(f"{name:>18}" for name in names))
        for count in counts:
            print(f"{count:>7}" + "".join(f"{cell(ways[name][str(count)]):>18}" for name in names))

    def both(cell: dict[str, Any], plain: str, verified: str, digits: int) -> str:
        figures = [cell[name]["median"] for name in (plain, verified) if cell[name]]
        return " / ".join(f"{figure:.{digits}f}" for figure in figures)

    names = list(ways)
    speeds = f"GB/s, plain / verified (median), blocks of {result['block_bytes']:,} bytes"
    table(speeds, names, sizes, lambda cell: both(cell, "plain", "verified", 2))
    spread = "(median, lowest to highest round)"
    others = [name for name in names if name != "memcpy"]
    table(f"speed over memcpy, plain {spread}", others, sizes, lambda cell: report.show(cell["of_memcpy"]))
    table(f"speed over raw nixl, plain {spread}", ["nixl"], sizes, lambda cell: report.show(cell["of_raw_nixl"]))
    title = "CPU seconds per GB, both ends, plain / verified (median)"
    counts = tuple(count for count in sizes if count in BAR_SIZES)
    table(title, names, counts, lambda cell: both(cell, "cpu_s_per_gb", "cpu_s_per_gb_verified", 3))
    print(f"\nnoise, memcpy over memcpy: {report.show(result['noise'])}")
    print(f"checksums alone: {result['checksum_gbps']['median']:.1f} GB/s on one core")
    for name, way in result["ways"].items():
        if way["contact_s"]:
            print(
                f"first contact, {name} over {way['path']}: {way['contact_s']['median'] * 1e3:.1f} ms, "
                f"{way['cold_contact_s'] * 1e3:.0f} ms for a process's very first"
            )


def bars(result: dict[str, Any]) -> list[report.Bar]:
    """Those of the docstring that are about moving blocks."""
    ways = {name: way["sizes"] for name, way in result["ways"].items()}
    found = []
    for count in map(str, BAR_SIZES):
        raw, shm = ways["nixl"][count]["of_raw_nixl"]["median"], ways["shm"][count]["of_memcpy"]["median"]
        found.append(report.Bar(f"nixl over raw nixl at {count} blocks", raw, RAW_BAR))
        found.append(report.Bar(f"shm over memcpy at {count} blocks", shm, SHM_BAR))
    at = str(BAR_SIZES[0])
    verify = result["verifications_per_memcpy"][at]["median"]
    return [
        *found,
        report.Bar(f"nixl over memcpy at {at} blocks", ways["nixl"][at]["of_memcpy"]["median"], NIXL_BAR),
        report.Bar(f"verifications of {at} blocks in the time of their memcpy", verify, VERIFY_BAR),
    ]


def plot(result: dict[str, Any], sizes: tuple[int, ...], path: Path) -> None:
    """GB/s over the number of blocks."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, way in result["ways"].items():
        if name == "memcpy again":
            continue
        for kind, dash in (("plain", "-"), ("verified", "--")):
            cells = [way["sizes"][str(count)][kind] for count in sizes]
            if None not in cells:
                values = [cell["median"] for cell in cells]
                axes.plot(sizes, values, dash, label=f"{name} ({way['path']}), {kind}", alpha=0.9)
    axes.set(xscale="log", xlabel=f"blocks of {result['block_bytes']:,} bytes", ylabel="GB/s", title="Moving KV blocks")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    """Measure, print, write result.json and transfer.svg."""
    given = report.options("transfer", __doc__, rounds=ROUNDS)
    sizes = QUICK_SIZES if given.quick else SIZES
    where = report.machine(1)
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    ways, values = measure(given.num_rounds, sizes)
    result = summary(ways, values, sizes)
    print_tables(result, sizes)
    hidden = transfer_hidden.measure(given.quick)
    transfer_hidden.print_table(hidden)
    at = str(BAR_SIZES[0])
    nixl, shm = (result["ways"][name]["sizes"][at] for name in ("nixl", "shm"))
    longest = max(hidden, key=int)
    report.finish(
        given,
        {"machine": where, **result, "hidden": hidden, "hidden_rounds": transfer_hidden.num_rounds(given.quick)},
        [*bars(result), *transfer_hidden.bars(hidden)],
        f"At {at} blocks NIXL over {result['ways']['nixl']['path']} moves {nixl['plain']['median']:.2f} GB/s through "
        f"our transport, {report.show(nixl['of_raw_nixl'])} of a bare loop; shm is {report.show(shm['of_memcpy'])} of "
        f"memcpy; {report.show(hidden[longest]['hidden'])} of the transfer of {longest} tokens hides behind prefill.",
        {"transfer.svg": lambda path: plot(result, sizes, path)},
    )


if __name__ == "__main__":
    main()
