"""Tokens kept for replay."""

from __future__ import annotations

from services.engine.batch import SampledToken
from services.engine.sequence import FinishReason
from services.worker.intake import Attempt, GatewayRef
from services.worker.token_log import SILENCE_S, TokenLog

GATEWAY = GatewayRef("g", "e")


def attempt(name: str) -> Attempt:
    return Attempt(name, 1, name, GATEWAY)


def test_replays_from_an_index() -> None:
    log = TokenLog(10**6)
    log.open(attempt("h"), num_forced_tokens=3)
    for token in (7, 8, 9):
        log.append("h", SampledToken(token), None)
    assert log.replay("h", 3) == (3, [SampledToken(7), SampledToken(8), SampledToken(9)], None)
    assert log.replay("h", 5) == (5, [SampledToken(9)], None)
    assert log.replay("h", 6) == (6, [], None), "nothing new is an answer of its own"
    assert log.replay("h", 2) is None, "forced tokens are the gateway's own"
    assert log.replay("other", 0) is None
    log.append("h", None, FinishReason.STOP)
    assert log.replay("h", 6) == (6, [], FinishReason.STOP)


def test_acknowledged_is_forgotten_and_limits_hold() -> None:
    log = TokenLog(max_bytes=1000)
    for name in ("a", "b", "c"):
        log.open(attempt(name), 0)
        log.append(name, SampledToken(1), FinishReason.LENGTH)
    log.forget(["a", "a"])
    assert len(log) == 2
    log.open(attempt("running"), 0)
    for token in range(20):
        log.append("running", SampledToken(token), None)
    assert log.replay("running", 0) is not None, "a running choice is never dropped"
    assert log.replay("b", 0) is None and log.replay("c", 0) is None


def test_a_silent_gateways_finished_choices_go() -> None:
    now = 0.0
    log = TokenLog(10**6, clock=lambda: now)
    log.open(attempt("done"), 0)
    log.append("done", SampledToken(1), FinishReason.STOP)
    log.open(attempt("runs"), 0)
    now = SILENCE_S + 1
    log.sweep()
    assert log.replay("done", 0) is None
    assert log.replay("runs", 0) is not None
