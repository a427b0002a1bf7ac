"""Detokeniser, choice and tokenizer: what the pieces add up to."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from services.gateway.choice import Choice
from services.gateway.errors import BadRequestError
from services.gateway.request import Finish, Sampling, Token
from services.gateway.tokenizer import Tokenizer

SAMPLING = Sampling(1.0, 0, 1.0, 0.0, 0, 100, 0, (), False, False, 0)


def test_random_streams_equal_the_one_shot_decode_and_split_no_character(tokenizer: Tokenizer) -> None:
    rng = random.Random(1)
    for _ in range(1000):
        ids = [rng.randrange(tokenizer.vocab_size + 3) for _ in range(rng.randrange(40))]
        stream = tokenizer.decode_stream()
        pieces = [stream.feed(token_id) for token_id in ids]
        assert not any(piece.endswith("\ufffd") for piece in pieces)
        assert "".join(pieces) + stream.flush() == tokenizer.rust.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("text", ["🗼 Tour Eiffel", "é ü ñ", "한국어", "👩‍👩‍👧‍👦", "e\u0301", "☃" * 5, "plain"])
def test_characters_come_whole(tokenizer: Tokenizer, text: str) -> None:
    stream = tokenizer.decode_stream()
    pieces = [stream.feed(token_id) for token_id in tokenizer.rust.encode(text).ids]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)
    assert stream.flush() == ""


def test_half_a_character_at_the_end_comes_out_with_the_flush(tokenizer: Tokenizer) -> None:
    ids = tokenizer.rust.encode("a🗼").ids[:-1]
    stream = tokenizer.decode_stream()
    assert "".join(map(stream.feed, ids)) == "a"
    assert stream.flush() == tokenizer.rust.decode(ids)[1:] != ""
    assert stream.flush() == ""


def fed(tokenizer: Tokenizer, text: str, stops: list[str], sampling: Sampling = SAMPLING) -> tuple[Choice, str]:
    """A choice fed token by token until it stops or ends, and the text that its deltas add up to."""
    choice = Choice(0, tokenizer, sampling, stops)
    out = ""
    for token_id in tokenizer.rust.encode(text).ids:
        stopped = choice.feed([Token(token_id)])
        if delta := choice.take():
            out += delta.text
        if stopped:
            break
    choice.end(Finish.LENGTH)
    if delta := choice.take():
        out += delta.text
    assert choice.take() is None
    return choice, out


def test_a_choice_stops_and_ends_once(tokenizer: Tokenizer) -> None:
    choice, text = fed(tokenizer, "one two three", ["two"])
    assert text == "one " and choice.finish_reason == "stop"
    choice.end(Finish.LENGTH)
    assert choice.finish_reason == "stop"
    choice, text = fed(tokenizer, "one two three", ["four", "three!"])
    assert text == "one two three" and choice.finish_reason == "length"


def test_tokens_behind_the_stop_are_not_charged(tokenizer: Tokenizer) -> None:
    ids = tokenizer.rust.encode("a.b.c").ids
    assert len(ids) == 5
    choice = Choice(0, tokenizer, SAMPLING, ["."])
    assert choice.feed([Token(token_id) for token_id in ids])
    assert choice.num_tokens == 2
    delta = choice.take()
    assert delta is not None and (delta.text, delta.finish_reason) == ("a", "stop")


def test_min_tokens_come_before_any_stop_string(tokenizer: Tokenizer) -> None:
    choice, text = fed(tokenizer, "a.b.c.d", ["."], replace(SAMPLING, min_tokens=4))
    assert text == "a.b" and choice.num_tokens == 4


def test_a_stop_token_has_no_text(tokenizer: Tokenizer) -> None:
    (b,) = tokenizer.rust.encode("b").ids
    choice, text = fed(tokenizer, "ab", [], replace(SAMPLING, stop_token_ids=(b,)))
    assert text == "a" and choice.num_tokens == 2


def test_a_stop_string_completed_by_the_flush(tokenizer: Tokenizer) -> None:
    half = tokenizer.rust.encode("🗼").ids[:-1]
    choice = Choice(0, tokenizer, SAMPLING, ["\ufffd"])
    choice.feed([Token(token_id) for token_id in half])
    choice.end(Finish.LENGTH)
    assert choice.finish_reason == "stop"


def test_token_bytes_are_the_bytes_of_the_text(tokenizer: Tokenizer) -> None:
    text = "naïve 🗼 \n\ttab"
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in tokenizer.rust.encode(text).ids) == text.encode()


@pytest.mark.anyio
async def test_encoding_inline_and_in_a_thread_agree(tokenizer: Tokenizer) -> None:
    long = "the capital of France " * 1000
    assert await tokenizer.encode(long, False) == tuple(tokenizer.rust.encode(long).ids)
    assert tokenizer.least_tokens(long) <= len(await tokenizer.encode(long, False))


@pytest.mark.anyio
async def test_the_chat_template(tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    expected = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    assert await tokenizer.render(messages) == expected


@pytest.mark.anyio
async def test_a_template_that_refuses_is_a_bad_request(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer._auto, "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(BadRequestError, match="roles must alternate") as error:
        await tokenizer.render([{"role": "user", "content": "U"}])
    assert error.value.param == "messages"
