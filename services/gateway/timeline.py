"""Where a request's time went: every stage from its own measurement, and what is left unexplained.

`tokenise` and the totals are the gateway's; `queue` and `prefill` the prefill worker's (the decode worker's where it
prefilled itself); `exposed_transfer`, `first_decode` and `decode` the decode worker's. The residual is the measured
total less their sum.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from dataclasses import dataclass, field

from services.gateway.router import Route
from services.gateway.workers import DecodeResult, PrefillResult

STAGES = ("tokenise", "queue", "prefill", "exposed_transfer", "first_decode", "decode")


@dataclass(slots=True)
class AttemptRecord:
    """One attempt: where it went and what its workers measured."""

    number: int
    handoff_id: str
    path: str  # disaggregated, colocated
    prefill_worker: str | None
    decode_worker: str
    fallback: str | None
    prefill: PrefillResult | None = None
    decode: DecodeResult | None = None
    failure: str | None = None

    @classmethod
    def of(cls, route: Route, number: int) -> AttemptRecord:
        """A record of an attempt about to begin, under a fresh handoff id."""
        return cls(
            number=number,
            handoff_id=secrets.token_hex(16),
            path="colocated" if route.prefill is None else "disaggregated",
            prefill_worker=route.prefill.key.worker_id if route.prefill is not None else None,
            decode_worker=route.decode.key.worker_id,
            fallback=route.fallback,
        )

    def end(self, prefill: PrefillResult | None, decode: DecodeResult | None) -> None:
        """Takes the workers' accounts, as far as they came."""
        self.prefill, self.decode = prefill, decode

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were not computed again."""
        source = self.decode if self.path == "colocated" else self.prefill
        return source.num_cached_tokens if source is not None else 0

    def stages(self) -> dict[str, float]:
        """Seconds by stage, as the workers told; a stage nobody told of is 0."""
        prefill, decode = self.prefill, self.decode
        source = decode if self.path == "colocated" else prefill
        return {
            "queue": source.queue_s if source else 0.0,
            "prefill": source.prefill_s if source else 0.0,
            "exposed_transfer": decode.exposed_transfer_s if decode else 0.0,
            "first_decode": decode.first_decode_s if decode else 0.0,
            "decode": decode.decode_s if decode else 0.0,
        }

    def view(self) -> dict[str, object]:
        """As JSON."""
        decode = self.decode
        return {
            "attempt": self.number,
            "path": self.path,
            "prefill_worker": self.prefill_worker,
            "decode_worker": self.decode_worker,
            "fallback": self.fallback,
            "failure": self.failure,
            "num_pulled_blocks": decode.num_pulled_blocks if decode else 0,
            "num_pulled_bytes": decode.num_pulled_bytes if decode else 0,
            "transfer_s": decode.transfer_s if decode else 0.0,
            "exposed_transfer_s": decode.exposed_transfer_s if decode else 0.0,
            "num_preemptions": decode.num_preemptions if decode else 0,
            "num_cached_tokens": self.num_cached_tokens,
            "num_decode_cached_tokens": decode.num_cached_tokens if decode else 0,
        }


@dataclass(slots=True)
class Timeline:
    """One HTTP request. Times are on the event loop's clock, in seconds."""

    request_id: str
    client_request_id: str
    route: str
    arrived_s: float
    tokenise_s: float = 0.0
    first_token_s: float | None = None
    ended_s: float | None = None
    outcome: str = "running"
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    choices: list[list[AttemptRecord]] = field(default_factory=list)  # attempts by prompt

    def open_choice(self) -> list[AttemptRecord]:
        """The list that the next prompt's attempts are to be recorded in."""
        self.choices.append([])
        return self.choices[-1]

    def end(self, now_s: float, outcome: str) -> None:
        """Stamps the end; the first to say so is believed."""
        if self.ended_s is None:
            self.ended_s, self.outcome = now_s, outcome

    def view(self, now_s: float) -> dict[str, object]:
        """As JSON. Stages are of the last attempt of the first prompt."""
        total_s = (self.ended_s if self.ended_s is not None else now_s) - self.arrived_s
        attempts = self.choices[0] if self.choices else []
        last = attempts[-1] if attempts else None
        stages = {"tokenise": self.tokenise_s} | (last.stages() if last else dict.fromkeys(STAGES[1:], 0.0))
        found: dict[str, object] = {
            "request_id": self.request_id,
            "client_request_id": self.client_request_id,
            "route": self.route,
            "outcome": self.outcome,
            "total_s": total_s,
            "ttft_s": None if self.first_token_s is None else self.first_token_s - self.arrived_s,
            "stages": stages,
            "residual_s": total_s - sum(stages.values()),
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
            "num_attempts": len(attempts),
            "attempts": [record.view() for record in attempts],
        }
        if last is not None:
            named = ("path", "num_pulled_blocks", "num_pulled_bytes", "transfer_s", "num_cached_tokens")
            names = (*named, "prefill_worker", "decode_worker")
            found |= {name: value for name, value in last.view().items() if name in names}
        if len(self.choices) > 1:
            found["choices"] = [[record.view() for record in records] for records in self.choices]
        return found


class Timelines:
    """The last so many requests, by our id and by the client's."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_id: OrderedDict[str, Timeline] = OrderedDict()
        self._names: dict[str, str] = {}  # client's id to ours

    def add(self, timeline: Timeline) -> None:
        """Remembers a request from its beginning."""
        self._by_id[timeline.request_id] = timeline
        self._names[timeline.client_request_id] = timeline.request_id
        if len(self._by_id) > self._most:
            _, oldest = self._by_id.popitem(last=False)
            if self._names.get(oldest.client_request_id) == oldest.request_id:
                del self._names[oldest.client_request_id]

    def find(self, name: str) -> Timeline | None:
        """By our id (also as it stands in the answer: chatcmpl-..., cmpl-...) or by the client's X-Request-Id."""
        bare = name.removeprefix("chatcmpl-").removeprefix("cmpl-")
        return self._by_id.get(bare) or self._by_id.get(self._names.get(name, ""))
