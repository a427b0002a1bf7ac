"""A Work message becomes a sequence, or is refused by the name of the field."""

from __future__ import annotations

import math

import pytest

from services.engine.sequence import PriorityClass
from services.wire.pb import common_pb2
from services.worker.intake import RefusedWorkError, read_attempt, read_sequence


def work(**changes: object) -> common_pb2.Work:
    message = common_pb2.Work(
        attempt=common_pb2.AttemptId(request_id="r", attempt=2, handoff_id="h"),
        gateway=common_pb2.ProcessId(worker_id="g", epoch="e"),
        tenant="t",
        priority_class=common_pb2.PRIORITY_CLASS_BATCH,
        time_left_s=30,
        itl_target_s=0.05,
        num_choices=1,
        prompt_token_ids=[1, 2, 3],
        forced_token_ids=[4],
        sampling=common_pb2.SamplingParams(max_tokens=5, top_p=0.9, seed=2**63, stop_token_ids=[9]),
        cache_salt=b"s",
    )
    for name, value in changes.items():
        target, _, field = name.rpartition("__")
        where = getattr(message, target) if target else message
        if isinstance(value, list):
            del getattr(where, field)[:]
            getattr(where, field).extend(value)
        else:
            setattr(where, field, value)
    return message


def test_everything_is_carried() -> None:
    seq = read_sequence(work(), frozenset({0}), 100, leaves_after_first_token=False)
    assert (seq.sequence_id, seq.prompt_token_ids, seq.output_token_ids) == ("h", [1, 2, 3], [4])
    assert (seq.num_forced_tokens, seq.tenant, seq.cache_salt) == (1, "t", b"s")
    assert (seq.priority, seq.ttft_target_s, seq.itl_target_s) == (PriorityClass.BATCH, None, 0.05)
    assert seq.deadline_s is not None and math.isclose(seq.deadline_s - seq.arrival_s, 30)
    assert (seq.params.top_p, seq.params.seed, seq.params.stop_token_ids) == (0.9, 2**63, frozenset({9}))
    assert read_attempt(work()).number == 2


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt_token_ids": [100]}, "prompt_token_ids"),
        ({"forced_token_ids": [100]}, "prompt_token_ids"),
        ({"num_choices": 2}, "num_choices"),
        ({"time_left_s": math.nan}, "time_left_s"),
        ({"time_left_s": -1.0}, "time_left_s"),
        ({"sampling__temperature": math.nan}, "sampling.temperature"),
        ({"sampling__top_p": 1.5}, "sampling.top_p"),
        ({"sampling__min_p": -0.1}, "sampling.min_p"),
        ({"sampling__max_tokens": 0}, "sampling.max_tokens"),
    ],
)
def test_what_nobody_could_serve_is_refused(changes: dict[str, object], field: str) -> None:
    with pytest.raises(RefusedWorkError, match=rf"^{field}: "):
        read_sequence(work(**changes), frozenset(), 100, leaves_after_first_token=False)


@pytest.mark.parametrize("name", ["attempt__request_id", "attempt__handoff_id", "gateway__worker_id", "gateway__epoch"])
@pytest.mark.parametrize("value", ["", "x" * 200])
def test_ids_are_required(name: str, value: str) -> None:
    with pytest.raises(RefusedWorkError, match=rf"^{name.replace('__', '.')}: "):
        read_attempt(work(**{name: value}))


def test_a_class_that_only_a_newer_gateway_knows_is_interactive() -> None:
    for value in (0, 99):
        seq = read_sequence(work(priority_class=value), frozenset(), 100, leaves_after_first_token=False)
        assert seq.priority is PriorityClass.INTERACTIVE
