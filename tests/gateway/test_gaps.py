"""When a replay is due."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from services.gateway.gaps import AHEAD_S, GAP_S, REPLAY_AGAIN_S, Kept
from services.gateway.request import Finish, Token
from services.gateway.stream import TokenStream

T = Token(7)


def kept() -> Any:
    attempt: Any = SimpleNamespace(stream=TokenStream(0), progress_s=100.0, decode_ended=False)
    return Kept(attempt, asked_s=100.0)


def test_a_gap_may_close_by_itself_for_a_moment() -> None:
    one = kept()
    one.attempt.stream.add(1, [T])
    now = 100 + REPLAY_AGAIN_S
    assert one.missing(now, 9) is None
    assert one.missing(now + 2 * GAP_S, 9) == "gap"
    one.attempt.stream.add(0, [T])
    assert one.missing(now + 2 * GAP_S, 9) is None


def test_an_answer_that_counts_more_tokens_than_came() -> None:
    one = kept()
    one.attempt.stream.end_at(3, Finish.STOP)
    one.attempt.decode_ended = True
    one.missing(101, 9)
    assert one.missing(101 + 2 * GAP_S, 9) == "finish"


def test_a_worker_that_is_ahead() -> None:
    one = kept()
    one.worker_has(2, 101)
    assert one.missing(101, 9) is None
    assert one.missing(101 + 2 * AHEAD_S, 9) == "renewal"
    one.attempt.stream.add(0, [T, T])
    assert one.missing(101 + 2 * AHEAD_S, 9) is None


def test_silence_and_no_asking_twice_at_once() -> None:
    one = kept()
    assert one.missing(101.9, 2) is None
    assert one.missing(102.0, 2) == "silence"
    one.asked_s = 102.0
    assert one.missing(103.9, 2) is None
    assert one.missing(104.0, 2) == "silence"
    one.attempt.stream.add(0, [T], Finish.STOP)
    assert one.missing(999, 2) is None
