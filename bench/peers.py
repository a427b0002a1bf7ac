"""`python -m bench.peers`: pdserve beside other servers, through the same HTTP API, on the same weights and cores.

    python -m bench.peers --prepare                          # once: environments, a build, GGUF files (an hour, 5 GB)
    python -m bench.peers --out bench/results/peers          # all servers
    python -m bench.peers --servers vllm,llama-bf16 --check  # pdserve and these

1. Peers lie under $PDSERVE_PEERS (default: `peers` in pdserve's cache); they are no dependency of pdserve. One that
   cannot be prepared or started is reported as not run, with the reason.
2. Servers are started one after another, each timed until the first token of its first request; the start that
   --prepare made has filled its caches. Then all stay up: pdserve colocated (one worker, all cores), pdserve
   disaggregated (a prefill and a decode worker that share the cores), and the peers. What each computes while idle is
   printed; one that spins is frozen outside its turns.
3. In each round, in random order, each server has a turn: decode throughput at 1, 8 and 32 streams, then the time to
   the first token of a 512-word prompt, alone. The colocated pdserve has two turns: their ratio is the noise.
4. Decode throughput: 32-word prompts, 64 tokens each, greedy, no end of text, streamed, sent at once; the tokens that
   come from when the last stream got its first token until the first stream ends, over that time. A server that does
   not make every token, or whose streams do not overlap, is not comparable there, and the reason is printed. `whole`
   is over the same requests, from sending to the last token of all, prompts included.
5. Ratios are pdserve's over the peer's, round by round: the median, and the 95 % interval (Student's t on the
   logarithms). All come from one run; with --servers a run can be split where its ratios need not be seen beside one
   another.

Bars for --check: colocated decode at least 1.15 / 1.4 / 1.5 times vLLM at 1 / 8 / 32 streams, 1.1 / 2 / 2.5 times
llama.cpp BF16, and ahead of llama.cpp Q4_1 at 32 (its figure at 8 is printed); time to first token of 512 over
vLLM's, upper end of the interval, at most 1.1; start to first token at most a tenth of vLLM's. Those of vLLM hold for
bf16 and for float32, each against its own row: which is faster depends on the processor. A bar whose peer was asked
for and did not run fails the check; one that this run was not to judge is printed as not run.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from bench import report
from bench.peer import fleet, shown, workshop
from bench.peer.bars import Bar, judge
from bench.peer.fleet import AGAIN, DISAGGREGATED, OURS, Yard
from bench.peer.measures import TTFT, Sizes, decode_name, differing, whole_name
from bench.peer.paired import compare
from bench.peer.rack import Rack
from bench.peer.server import NotRunError
from bench.peer.window import NotComparableError, throughput, whole
from services.runtime.model_store import resolve

MODEL = "smollm2-135m"
INTERRUPTED = 128 + signal.SIGINT  # exit status, as shells have it
QUICK = Sizes(concurrency=(1, 8), num_new_tokens=32, num_long_prompts=1)
Figures = dict[str, dict[str, list[float]]]  # server, measure: a value per round


@dataclass(slots=True)
class Failures:
    """Why a figure is missing: by server and measure; measure "" is the whole server."""

    reasons: dict[str, dict[str, str]] = field(default_factory=dict)

    def note(self, name: str, measure: str, why: str) -> None:
        """The first reason stays."""
        self.reasons.setdefault(name, {}).setdefault(measure, why)

    def has(self, name: str, measure: str) -> bool:
        """Whether that figure is missing."""
        return measure in self.reasons.get(name, {})


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--servers", default=",".join(fleet.USUAL), help=f"of {', '.join(fleet.KINDS)}")
    parser.add_argument("--prepare", action="store_true", help="make the peers, start each once, and stop")
    parser.add_argument("--out", type=Path, help="folder for result.json and peers.svg")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter requests, for a look")
    parser.add_argument("--check", action="store_true", help="exit 1, naming the figure, where a bar is missed")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="compute threads (all cores)")
    parser.add_argument("--rounds", type=int, default=report.FEWEST_ROUNDS, help="at least 5")
    given = parser.parse_args(arguments)
    given.rounds = max(report.FEWEST_ROUNDS, given.rounds)
    given.servers = [name for name in given.servers.split(",") if name]
    if unknown := [name for name in given.servers if name not in fleet.KINDS]:
        parser.error(f"no such server: {', '.join(unknown)}; there are {', '.join(fleet.KINDS)}")
    given.servers = list(dict.fromkeys([OURS, *given.servers]))  # everything is compared with it
    return given


def prepare(yard: Yard, names: list[str]) -> bool:
    """Make each server and start it once, so that what it compiles on first use lies there; whether all could be."""
    failed = False
    for name in names:
        print(f"{name}:", file=sys.stderr)
        started = yard.root / "started" / name
        try:
            fleet.KINDS[name].prepare(yard, yard.root / "logs" / f"prepare-{name}.log")
            if not started.exists():
                print("  a first start", file=sys.stderr)
                with Rack(yard.root / "logs", Sizes()) as rack:
                    rack.add(name, fleet.KINDS[name].make(yard))
                    print(f"  first token after {rack.places[name].start_s:.1f} s", file=sys.stderr)
                started.parent.mkdir(parents=True, exist_ok=True)
                started.touch()
            print("  ready", file=sys.stderr)
        except NotRunError as error:
            failed = True
            print(f"  not run: {error}", file=sys.stderr)
    return not failed


def start_all(rack: Rack, yard: Yard, names: list[str], failures: Failures) -> None:
    """Start what can be started, the others noted. Raises NotRunError where pdserve itself is among those."""
    for name in names:
        try:
            rack.add(name, fleet.KINDS[name].make(yard))
        except NotRunError as error:
            if name == OURS:
                raise
            failures.note(name, "", str(error))
            print(f"{name}: not run: {error}", flush=True)
            continue
        place = rack.places[name]
        held = ", frozen outside its turns" if place.spins else ""
        print(
            f"{name}: first token after {place.start_s:.1f} s; idle at {place.idle_share:.1%} of a core{held}",
            flush=True,
        )


def turn(rack: Rack, name: str, sizes: Sizes, failures: Failures) -> Callable[[int], dict[str, float]]:
    """What a contestant does in a round: its figures by measure. One that failed is noted, and not tried again."""

    def take(number: int) -> dict[str, float]:
        this = f"{number} again" if name == AGAIN else str(number)  # the control must not find its prompts cached
        figures: dict[str, float] = {}

        @contextmanager
        def trying(*measures: str) -> Iterator[None]:
            try:
                yield
            except NotComparableError as error:
                for measure in measures if number >= 0 else ():  # the round before the first only warms up
                    failures.note(name, measure, f"not comparable: {error} (round {number + 1})")

        with rack.play(OURS if name == AGAIN else name) as asker:
            with trying():
                asker.warm_up(this)
            for c in sizes.concurrency:
                if not failures.has(name, whole_name(c)):
                    with trying(decode_name(c), whole_name(c)):
                        batch = asker.batch(c, this)
                        figures[whole_name(c)] = whole(batch.answers, batch.sent_s)
                        with trying(decode_name(c)):
                            figures[decode_name(c)] = throughput(batch.answers)
            if not failures.has(name, TTFT):
                with trying(TTFT):
                    figures[TTFT] = asker.ttft_ms(this)
        return figures

    return take


def ratios_of(figures: Figures) -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """Of each pdserve over each other server, by measure, where both have every round."""
    return {
        mine: {
            theirs: {
                measure: compare(figures[mine][measure], values)
                for measure, values in measured.items()
                if measure in figures[mine]
            }
            for theirs, measured in figures.items()
            if theirs != mine
        }
        for mine in (OURS, DISAGGREGATED)
        if mine in figures
    }


def describe(rack: Rack, figures: Figures, failures: Failures, names: list[str]) -> dict[str, Any]:
    """All that is known of each server."""
    found: dict[str, Any] = {}
    for name in names:
        place = rack.places.get(OURS if name == AGAIN else name)
        entry: dict[str, Any] = {"failures": failures.reasons.get(name, {}), "figures": {}}
        if place is not None:
            entry |= {
                "versions": dict(place.server.versions),
                "settings": dict(place.server.settings),
                "start_s": place.start_s,
                "idle_share_of_a_core": place.idle_share,
                "frozen_outside_its_turns": place.spins,
                "prompt_tokens": {key: sorted(value) for key, value in place.asker.books.prompt_tokens.items()},
                "least_chunks_per_token": place.asker.books.chunks_per_token,
                "figures": {
                    measure: {**report.spread(values), "by_round": values}
                    for measure, values in figures.get(name, {}).items()
                },
            }
        found[name] = entry
    return found


def measure(yard: Yard, given: argparse.Namespace, sizes: Sizes) -> dict[str, Any]:
    """Start, measure, end; the result without its bars. Raises NotRunError where pdserve could not be started."""
    failures = Failures()
    where = report.machine(given.threads)
    with Rack(yard.root / "logs", sizes) as rack:
        start_all(rack, yard, given.servers, failures)
        names = [OURS, AGAIN, *(name for name in given.servers if name != OURS)]
        taking = [name for name in names if name == AGAIN or name in rack.places]
        contestants = {name: turn(rack, name, sizes, failures) for name in taking}
        values = report.rounds(contestants, given.rounds, "peers,")
        figures = {
            name: {m: each for m, each in by_measure.items() if not failures.has(name, m)}
            for name, by_measure in values.items()
        }
        servers = describe(rack, figures, failures, names)
        notes = differing({name: place.asker.books for name, place in rack.places.items()})
    notes += [
        f"{name}: {measure or 'not run'}: {why}"
        for name, reasons in failures.reasons.items()
        for measure, why in reasons.items()
    ]
    return {
        "machine": where,
        "model": yard.model,
        "load": f"prompts of random words; {sizes}",
        "servers": servers,
        "ratios": ratios_of(figures),
        "notes": notes,
    }


def bars_of(result: Mapping[str, Any], asked: list[str]) -> list[Bar]:
    """The bars, judged."""
    servers = result["servers"]
    starts = {
        name: servers[OURS]["start_s"] / each["start_s"]
        for name, each in servers.items()
        if name not in (OURS, AGAIN) and "start_s" in each
    }
    failures = {name: each["failures"] for name, each in servers.items()}
    return judge(result["ratios"].get(OURS, {}), starts, failures, asked)


def finish(given: argparse.Namespace, result: dict[str, Any], sizes: Sizes) -> None:
    """Print, write, and exit 1 where --check fails."""
    bars = bars_of(result, given.servers)
    summary = shown.summary(result, sizes)
    console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)
    measures = [name(c) for name in (decode_name, whole_name) for c in sizes.concurrency]
    console.print(shown.table(result, [*measures, TTFT]))
    for note in result["notes"]:
        print(note)
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        full = {**result, "quick": given.quick, "rounds": given.rounds}
        full |= {"bars": [bar.told() for bar in bars], "summary": summary}
        (given.out / "result.json").write_text(json.dumps(full, indent=2) + "\n")
        shown.plot(result, sizes, given.out / "peers.svg")
    for bar in bars:
        print(bar.line)
    print(summary)
    if given.check and any(bar.fails for bar in bars):
        raise SystemExit(1)


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    given = options(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    yard = Yard(workshop.root(), MODEL, resolve(MODEL), given.threads)
    if given.prepare:
        raise SystemExit(0 if prepare(yard, given.servers) else 1)
    sizes = QUICK if given.quick else Sizes()
    try:
        result = measure(yard, given, sizes)
    except KeyboardInterrupt as error:
        print(f"interrupted ({error or 'SIGINT'}); all servers are ended", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    except NotRunError as error:
        raise SystemExit(f"pdserve could not be started: {error}") from error
    finish(given, result, sizes)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


if __name__ == "__main__":
    main()
