import pytest

from services.engine.sequence import FinishReason, PriorityClass, SamplingParams, Sequence, SequenceState


def sequence(prompt=(), output=(), eos=frozenset(), **params):
    return Sequence(
        "s", list(prompt), SamplingParams(**params), eos_token_ids=frozenset(eos), output_token_ids=list(output)
    )


def test_starts_waiting_with_nothing():
    seq = sequence([5, 6])
    assert seq.state is SequenceState.WAITING
    assert (seq.num_tokens, seq.num_computed_tokens, seq.block_ids) == (2, 0, [])


def test_values_are_those_of_the_wire_and_the_api():
    assert [(p.name, int(p)) for p in PriorityClass] == [("REALTIME", 1), ("INTERACTIVE", 2), ("BATCH", 3)]
    assert [str(r.value) for r in FinishReason] == ["stop", "length", "cancelled", "error"]


def test_token_ids_is_a_slice_of_prompt_and_output():
    seq = sequence(range(10, 15), range(20, 24))
    whole = [10, 11, 12, 13, 14, 20, 21, 22, 23]
    assert seq.num_tokens == 9
    for start in range(10):
        for stop in range(start, 10):
            assert seq.token_ids(start, stop) == whole[start:stop]


@pytest.mark.parametrize(
    ("output", "params", "reason"),
    [
        ([], {}, None),
        ([7], {"max_tokens": 2}, None),
        ([7, 7], {"max_tokens": 2}, FinishReason.LENGTH),
        ([7, 2], {"max_tokens": 3}, FinishReason.STOP),  # 2 ends a sequence
        ([7, 2], {"max_tokens": 2}, FinishReason.STOP),  # both at once: it stopped by itself
        ([7, 2], {"max_tokens": 3, "ignore_eos": True}, None),
        ([7, 9], {"max_tokens": 3, "stop_token_ids": frozenset({9})}, FinishReason.STOP),
        ([7, 9], {"max_tokens": 3, "stop_token_ids": frozenset({9}), "ignore_eos": True}, FinishReason.STOP),
        ([7, 2], {"max_tokens": 5, "min_tokens": 3}, None),
        ([7, 7, 2], {"max_tokens": 5, "min_tokens": 3}, FinishReason.STOP),
        ([2, 7], {"max_tokens": 5}, None),  # only the last token counts
    ],
)
def test_check_stop(output, params, reason):
    assert sequence([1, 2], output, eos={2}, **params).check_stop() is reason


def test_an_end_token_in_the_prompt_stops_nothing():
    assert sequence([1, 2], [], eos={2}).check_stop() is None


def test_is_decoding_only_with_one_output_token_to_compute():
    seq = sequence([1, 2, 3])
    seq.num_computed_tokens = 2
    assert not seq.is_decoding  # the last token of the prompt
    seq.num_computed_tokens = 3
    seq.output_token_ids.append(4)
    assert seq.is_decoding
    seq.output_token_ids.append(5)
    assert not seq.is_decoding
