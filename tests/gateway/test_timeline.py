"""The timeline's stages, from times chosen by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.gateway.request import Finish
from services.gateway.timeline import STAGES, AttemptRecord, Timeline
from services.gateway.workers import DecodeResult, PrefillResult

PREFILL = PrefillResult(num_cached_tokens=3, queue_s=0.5, prefill_s=8.0, first_token=None, finish=None)
DECODE = DecodeResult(
    finish=Finish.STOP,
    num_output_tokens=5,
    num_cached_tokens=2,
    num_pulled_blocks=4,
    num_pulled_bytes=4096,
    queue_s=0.25,
    prefill_s=4.0,
    transfer_s=3.0,
    exposed_transfer_s=1.0,
    first_decode_s=2.0,
    decode_s=16.0,
    num_preemptions=0,
)


def record(**more: Any) -> AttemptRecord:
    fields: dict[str, Any] = {"number": 1, "path": "disaggregated", "prefill_worker": "p0", "began_s": 11.0}
    return AttemptRecord(handoff_id="h", decode_worker="d0", fallback=None, **(fields | more))


def timeline(*records: AttemptRecord, sent_s: float | None = 45.0) -> Timeline:
    made = Timeline("r", "r", "chat", arrived_s=10.0, tokenise_s=0.5, choices=[list(records)])
    made.sent_s, made.ended_s = sent_s, 46.0
    return made


def stages(made: Timeline) -> dict[str, float]:
    view: Any = made.view(now_s=99.0)
    assert tuple(view["stages"]) == STAGES
    assert view["residual_s"] == pytest.approx(36.0 - sum(view["stages"].values()))
    found: dict[str, float] = view["stages"]
    return found


def test_each_stage_is_who_measured_its_own() -> None:
    attempt = record()
    attempt.end(PREFILL, DECODE, received_s=13.0, tokens_ended_s=43.0)
    assert list(stages(timeline(attempt)).values()) == [0.5, 2.0, 0.5, 8.0, 1.0, 2.0, 16.0, 2.0]


def test_colocated_the_prompt_is_decodes() -> None:
    attempt = record(path="colocated", prefill_worker=None)
    attempt.end(None, replace(DECODE, exposed_transfer_s=0.0), received_s=12.0, tokens_ended_s=44.0)
    assert list(stages(timeline(attempt)).values()) == [0.5, 1.0, 0.25, 4.0, 0.0, 2.0, 16.0, 1.0]


def test_what_nobody_told_of_is_0() -> None:
    attempt = record()
    attempt.end(None, None, received_s=None, tokens_ended_s=None)
    assert set(list(stages(timeline(attempt)).values())[1:]) == {0.0}
    attempt.end(PREFILL, DECODE, received_s=13.0, tokens_ended_s=43.0)
    assert stages(timeline(attempt, sent_s=None))["delivery"] == 0.0  # still running, or it failed
    assert list(stages(timeline()).values()) == [0.5] + [0.0] * 7


def test_the_last_attempt_counts() -> None:
    first, last = record(), record(number=2, began_s=20.0)
    first.end(PREFILL, None, received_s=13.0, tokens_ended_s=None)
    last.end(PREFILL, DECODE, received_s=21.0, tokens_ended_s=43.0)
    found = stages(timeline(first, last))
    assert (found["dispatch"], found["delivery"]) == (1.0, 2.0)
