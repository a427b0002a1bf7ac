"""What is measured of a server, over HTTP, with the load generator's own connections and parser.

Every prompt is a text of random common words, each a token or so, the same for all servers in a round and never used
again; what a server counted is kept, so that one can see that all counted alike.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

import uvloop

from bench.load.connections import Pool, Target
from bench.load.generator import Job, Limits, Outcome, Run, run
from bench.load.workload import Lengths, Prompt, bodies, make_prompts, words
from bench.peer.server import Wants
from bench.peer.window import Answer, NotComparableError

PATH = "/v1/completions"
NUM_PROMPT_WORDS = 32
LONG_PROMPT_WORDS = 512
NUM_NEW_AFTER_LONG = 2  # of the prompt that is timed: what comes after the first token does not count
WITHOUT_DONE = "the stream ended without [DONE]"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured in a round."""

    concurrency: tuple[int, ...] = (1, 8, 32)
    num_new_tokens: int = 64
    num_long_prompts: int = 3
    timeout_s: float = 600.0  # of all requests that are sent at once


@dataclass(slots=True)
class Books:
    """What a server counted, over all rounds."""

    prompt_tokens: dict[str, set[int]] = field(default_factory=dict)  # by measure; {None}: it does not say
    chunks_per_token: dict[str, float] = field(default_factory=dict)  # the least, by measure


def decode_name(concurrency: int) -> str:
    """The name of the measure: decode throughput, tokens/s."""
    return f"decode {concurrency}"


def whole_name(concurrency: int) -> str:
    """The name of the measure: tokens/s from sending to the last token, prompts included."""
    return f"whole {concurrency}"


TTFT = "ttft 512"  # milliseconds


@dataclass(frozen=True, slots=True)
class Batch:
    """Streams that were sent at once, at `sent_s` in `perf_counter` seconds."""

    answers: list[Answer]
    sent_s: float


class Asker:
    """Asks one server."""

    def __init__(self, base_url: str, wants: Wants, sizes: Sizes) -> None:
        self._base_url, self._wants, self._sizes = base_url, wants, sizes
        self.books = Books()

    def first_token_s(self) -> float:
        """When the first token of a short answer came, in `perf_counter` seconds. Raises NotComparableError."""
        outcome = self._ask(make_prompts(1, Lengths(4, 2), words(), "first"))[0]
        return outcome.stream.chunk_times_s[0]

    def warm_up(self, turn: str) -> None:
        """A short answer after an idle time. Raises NotComparableError."""
        self._ask(make_prompts(1, Lengths(NUM_PROMPT_WORDS, 8), words(), f"warm {turn}"))

    def batch(self, concurrency: int, turn: str) -> Batch:
        """So many streams at once, every one whole. Raises NotComparableError."""
        lengths = Lengths(NUM_PROMPT_WORDS, self._sizes.num_new_tokens)
        outcomes = self._ask(make_prompts(concurrency, lengths, words(), f"decode {concurrency} {turn}"))
        self._note(decode_name(concurrency), outcomes)
        answers = [Answer(each.stream.chunk_times_s, each.prompt.num_output_tokens) for each in outcomes]
        return Batch(answers, min(each.sent_s for each in outcomes if each.sent_s is not None))

    def ttft_ms(self, turn: str) -> float:
        """From sending a long prompt to its first token, alone: median of some, ms. Raises NotComparableError."""
        times_ms = []
        for n in range(self._sizes.num_long_prompts):
            lengths = Lengths(LONG_PROMPT_WORDS, NUM_NEW_AFTER_LONG)
            outcome = self._ask(make_prompts(1, lengths, words(), f"long {turn} {n}"))[0]
            self._note(TTFT, [outcome])
            assert outcome.sent_s is not None  # it was answered
            times_ms.append(1e3 * (outcome.stream.chunk_times_s[0] - outcome.sent_s))
        return median(times_ms)

    def _ask(self, prompts: list[Prompt]) -> list[Outcome]:
        """The answers to prompts that are sent at once, each whole. Raises NotComparableError."""
        requests = bodies(prompts, PATH, self._wants.model, self._wants.extra)
        jobs = [Job(prompt, body, 0.0) for prompt, body in zip(prompts, requests, strict=True)]
        try:
            outcomes = uvloop.run(
                send(Target(self._base_url, PATH, {}), jobs, Limits(None, self._sizes.timeout_s))
            ).outcomes
        except OSError as error:
            raise NotComparableError(f"no connection: {error}") from error
        for outcome in outcomes:
            self._refuse_faulty(outcome)
        return outcomes

    def _refuse_faulty(self, outcome: Outcome) -> None:
        error, stream = outcome.error, outcome.stream
        if self._wants.ends_without_done and error == WITHOUT_DONE and stream.chunk_times_s:
            error = ""
        if error:
            raise NotComparableError(error)
        counted = stream.usage.completion_tokens if stream.usage is not None else None
        made = counted if counted is not None else len(stream.chunk_times_s)
        if made != outcome.prompt.num_output_tokens:
            raise NotComparableError(f"made {made} tokens of {outcome.prompt.num_output_tokens}")

    def _note(self, measure: str, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            usage = outcome.stream.usage
            if usage is not None and usage.prompt_tokens is not None:
                self.books.prompt_tokens.setdefault(measure, set()).add(usage.prompt_tokens)
            share = len(outcome.stream.chunk_times_s) / outcome.prompt.num_output_tokens
            self.books.chunks_per_token[measure] = min(share, self.books.chunks_per_token.get(measure, share))


async def send(target: Target, jobs: list[Job], limits: Limits) -> Run:
    """All jobs, over connections that are open before the first is sent."""
    pool = Pool(target)
    try:
        await pool.warm(min(len(jobs), limits.max_concurrency or len(jobs)))
        return await run(jobs, pool, limits)
    finally:
        pool.close()


def differing(books: Mapping[str, Books]) -> list[str]:
    """Where servers counted the prompts of a measure differently, in words."""
    seen: dict[str, dict[str, tuple[int, int]]] = {}
    for name, each in books.items():
        for measure, counts in each.prompt_tokens.items():
            seen.setdefault(measure, {})[name] = (min(counts), max(counts))
    return [
        f"prompts of {measure} are not as long for all: "
        + ", ".join(f"{name} {low}-{high} tokens" for name, (low, high) in by_name.items())
        for measure, by_name in seen.items()
        if len(set(by_name.values())) > 1
    ]
