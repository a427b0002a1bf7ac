"""Ordering: any loss that is repaired, repetition and reordering give the same tokens, once each."""

from __future__ import annotations

import random

from services.gateway.request import Finish, Token
from services.gateway.stream import TokenStream

TOKENS = [Token(100 + i) for i in range(12)]


def test_any_order_with_repeats_gives_each_token_once() -> None:
    rng = random.Random(2)
    for _ in range(300):
        runs = []
        begin = 3
        while begin < len(TOKENS):
            size = rng.randrange(1, 4)
            runs.append((begin, TOKENS[begin : begin + size]))
            begin += size
        messages = runs + rng.sample(runs, rng.randrange(len(runs)))
        rng.shuffle(messages)
        stream = TokenStream(first_index=3)
        got: list[Token] = []
        for first, tokens in messages:
            last = first + len(tokens) == len(TOKENS)
            stream.add(first, tokens, Finish.LENGTH if last else None)
            got += stream.take()
            if stream.complete:
                break
        assert got == TOKENS[3:]
        assert stream.finish is Finish.LENGTH and not stream.has_gap


def test_a_gap_shows_when_something_lies_behind_it() -> None:
    stream = TokenStream(0)
    stream.add(0, TOKENS[:2])
    assert not stream.has_gap
    stream.add(3, TOKENS[3:4])
    assert stream.has_gap and stream.take() == TOKENS[:2] and stream.next_index == 2
    assert not stream.add(3, TOKENS[3:4])
    assert stream.add(2, TOKENS[2:3])
    assert not stream.has_gap and stream.take() == TOKENS[2:4]


def test_a_finish_waits_for_its_tokens() -> None:
    stream = TokenStream(0)
    stream.add(3, [], Finish.STOP)
    assert stream.has_gap and not stream.complete
    stream.add(0, TOKENS[:3])
    assert stream.complete and stream.take() == TOKENS[:3]


def test_the_first_end_is_believed_and_nothing_comes_from_beyond() -> None:
    stream = TokenStream(0)
    stream.add(0, TOKENS[:5])
    assert stream.end_at(3, Finish.LENGTH)
    assert not stream.end_at(5, Finish.STOP)
    assert stream.take() == TOKENS[:3] and stream.complete and stream.finish is Finish.LENGTH


def test_emitted_tokens_never_change() -> None:
    stream = TokenStream(0)
    stream.add(0, TOKENS[:2])
    assert not stream.add(0, [Token(1), Token(2)])
    assert stream.take() == TOKENS[:2]
