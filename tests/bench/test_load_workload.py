"""Prompts: their lengths, their prefix, their seed, and the bodies around them."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from bench.load.workload import Lengths, bodies, make_prompts, plain_ids, text_of, token_ids, words


def test_lengths_vary_by_the_ratio_and_the_prefix_is_on_top():
    prompts = make_prompts(3000, Lengths(10, 5, 0.25, 4), token_ids(range(100, 200)), 0)
    # floor(7.5) to ceil(12.5), 4 more; floor(3.75) to ceil(6.25)
    assert {prompt.num_tokens for prompt in prompts} == set(range(11, 18))
    assert {prompt.num_output_tokens for prompt in prompts} == set(range(3, 8))
    assert all(len(prompt.content) == prompt.num_tokens for prompt in prompts)
    assert len({tuple(prompt.content[:4]) for prompt in prompts}) == 1
    assert len({tuple(prompt.content[4:]) for prompt in prompts}) == 3000
    assert all(100 <= each < 200 for prompt in prompts for each in prompt.content)


def test_without_a_ratio_all_are_as_long_as_asked():
    prompts = make_prompts(50, Lengths(10, 5), token_ids(range(1000)), 0)
    assert {(prompt.num_tokens, prompt.num_output_tokens) for prompt in prompts} == {(10, 5)}


def test_the_seed_decides():
    lengths, vocabulary = Lengths(10, 5, 0.5, 3), token_ids(range(1000))
    assert make_prompts(20, lengths, vocabulary, 7) == make_prompts(20, lengths, vocabulary, 7)
    assert make_prompts(20, lengths, vocabulary, 7) != make_prompts(20, lengths, vocabulary, 8)


def test_warm_ups_share_the_prefix_and_nothing_else():
    lengths, vocabulary = Lengths(10, 5, 0.0, 3), token_ids(range(1000))
    measured, warmup = make_prompts(1, lengths, vocabulary, 7)[0], make_prompts(1, lengths, vocabulary, "7 warm-up")[0]
    assert measured.content[:3] == warmup.content[:3]
    assert measured.content[3:] != warmup.content[3:]


def test_words_are_as_many_as_tokens_are_meant():
    prompt = make_prompts(1, Lengths(12, 1), words(), 0)[0]
    assert len(prompt.content.split(" ")) == 12


def test_text_has_the_length_in_tokens_that_was_asked():
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "b": 2, "c": 3}, "<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>"])
    assert plain_ids(tokenizer) == [1, 2, 3]
    prompt = make_prompts(1, Lengths(9, 1), text_of(tokenizer), 0)[0]
    assert len(prompt.content.split()) == 9
    assert set(prompt.content.split()) <= {"a", "b", "c"}


@pytest.mark.parametrize(("lengths"), [(0, 1), (10, 1, 1.0), (10, 1, -0.1)])
def test_lengths_that_are_none(lengths):
    with pytest.raises(ValueError, match=r"token|ratio"):
        Lengths(*lengths)


def test_bodies():
    prompts = make_prompts(1, Lengths(2, 9), token_ids([5]), 0)
    text = json.loads(bodies(prompts, "/v1/completions", "m", {"ignore_eos": True, "max_tokens": 3})[0])
    assert text == {
        "model": "m",
        "prompt": [5, 5],
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    prompts = make_prompts(1, Lengths(2, 9), words(), 0)
    chat = json.loads(bodies(prompts, "/v1/chat/completions", "m", {})[0])
    assert chat["messages"] == [{"role": "user", "content": prompts[0].content}]
    assert chat["max_completion_tokens"] == 9
    assert "prompt" not in chat
