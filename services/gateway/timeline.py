"""Where a request's time went: every stage from its own measurement, and what is left unexplained.

`tokenise`, `dispatch`, `delivery` and the totals are the gateway's; `queue` and `prefill` the prefill worker's (the
decode worker's where it prefilled itself), `exposed_transfer` too; `first_decode` and `decode` the decode worker's.

| stage | from | to |
|---|---|---|
| tokenise | the request arrived | its prompts are token ids |
| dispatch | the last attempt begins, by routing | the worker that computes the prompt said that it has the request |
| queue | it arrived there | its first chunk is computed |
| prefill | then | token 0 is sampled |
| exposed_transfer | then, by the same clock | the KV is released by decode: all is there, verified |
| first_decode | it may run on decode | the first token made there |
| decode | then | the choice has ended there |
| delivery | what ended the first choice's tokens, an event or an answer, arrived | the last byte is with the server |

No stage is a difference of others, so the residual, the measured total less their sum, is what travels between
processes unseen (the answer to the release, the last event, the way to and from the client), less the way back of the
worker's word, by which `dispatch` reaches into `queue` and `prefill`. It is negative where that takes long.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from dataclasses import dataclass, field

from services.gateway.router import Route
from services.gateway.workers import DecodeResult, PrefillResult

STAGES = ("tokenise", "dispatch", "queue", "prefill", "exposed_transfer", "first_decode", "decode", "delivery")


@dataclass(slots=True)
class AttemptRecord:
    """One attempt: where it went and what its workers measured. `*_s` are times of the event loop's clock."""

    number: int
    handoff_id: str
    path: str  # disaggregated, colocated
    prefill_worker: str | None
    decode_worker: str
    fallback: str | None
    began_s: float
    received_s: float | None = None  # the worker that computes the prompt had it
    tokens_ended_s: float | None = None  # what ended the tokens arrived
    prefill: PrefillResult | None = None
    decode: DecodeResult | None = None
    failure: str | None = None

    @classmethod
    def of(cls, route: Route, number: int, began_s: float) -> AttemptRecord:
        """A record of an attempt that began with its routing, under a fresh handoff id."""
        return cls(
            number=number,
            handoff_id=secrets.token_hex(16),
            path="colocated" if route.prefill is None else "disaggregated",
            prefill_worker=route.prefill.key.worker_id if route.prefill is not None else None,
            decode_worker=route.decode.key.worker_id,
            fallback=route.fallback,
            began_s=began_s,
        )

    def end(
        self,
        prefill: PrefillResult | None,
        decode: DecodeResult | None,
        received_s: float | None,
        tokens_ended_s: float | None,
    ) -> None:
        """Takes the workers' accounts and the gateway's own, as far as they came."""
        self.prefill, self.decode = prefill, decode
        self.received_s, self.tokens_ended_s = received_s, tokens_ended_s

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were not computed again."""
        source = self.decode if self.path == "colocated" else self.prefill
        return source.num_cached_tokens if source is not None else 0

    def stages(self, sent_s: float | None) -> dict[str, float]:
        """Seconds by stage, as each was told; one nobody told of is 0. `sent_s`: the answer's last byte was sent."""
        prefill, decode = self.prefill, self.decode
        source = decode if self.path == "colocated" else prefill
        return {
            "dispatch": _span(self.began_s, self.received_s),
            "queue": source.queue_s if source else 0.0,
            "prefill": source.prefill_s if source else 0.0,
            "exposed_transfer": decode.exposed_transfer_s if decode else 0.0,
            "first_decode": decode.first_decode_s if decode else 0.0,
            "decode": decode.decode_s if decode else 0.0,
            "delivery": _span(self.tokens_ended_s, sent_s),
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
    sent_s: float | None = None  # the last byte was given to the server
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
        stages = {"tokenise": self.tokenise_s} | (last.stages(self.sent_s) if last else dict.fromkeys(STAGES[1:], 0.0))
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


def _span(begin_s: float | None, end_s: float | None) -> float:
    """Seconds; 0 where one end is not known."""
    return 0.0 if begin_s is None or end_s is None else end_s - begin_s


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
