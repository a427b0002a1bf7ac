"""A handoff's progress into a decode worker."""

from __future__ import annotations

import pytest

from services.decode.inbound import HandoffMismatchError, Inbound
from services.engine.sequence import Sequence
from services.kvtransfer.messages import FirstToken, ReadyBlock


def inbound(num_tokens: int = 40, num_held: int = 0) -> Inbound:
    seq = Sequence("h", list(range(num_tokens)))
    seq.block_ids = [10, 11, 12]
    made = Inbound(seq, room_by_s=0.0, num_blocks=3)
    made.num_held = num_held
    return made


def test_pulls_each_block_once_and_skips_what_is_held() -> None:
    handoff = inbound(num_held=1)
    handoff.announced(40, 3, (ReadyBlock(0, 70, 1), ReadyBlock(1, 71, 2)))
    handoff.reserved = True
    first = handoff.take_pulls(now=5.0)
    assert [(pull.index, pull.remote_block_id, pull.local_block_id, pull.checksum) for pull in first] == [
        (1, 71, 11, 2)
    ]
    handoff.announced(40, 3, (ReadyBlock(2, 72, 3),))
    assert [pull.index for pull in handoff.take_pulls(now=6.0)] == [2]
    assert handoff.take_pulls(now=7.0) == []
    assert handoff.fetch_began_s == 5.0


def test_whole_needs_room_every_block_and_the_first_token() -> None:
    handoff = inbound(num_held=1)
    handoff.num_verified = 2
    assert not handoff.is_whole
    handoff.first_token = FirstToken(1)
    assert not handoff.is_whole
    handoff.reserved = True
    assert handoff.is_whole
    handoff.num_verified = 1
    assert not handoff.is_whole


def test_the_exposed_transfer_is_the_holders_word_else_decodes_own() -> None:
    handoff = inbound()
    assert handoff.exposed_s(runnable_s=9.0) == 0.0  # never heard that the prompt is computed
    handoff.complete_s = 7.0
    assert handoff.exposed_s(runnable_s=9.0) == 2.0
    handoff.since_complete_s = 0.5
    assert handoff.exposed_s(runnable_s=9.0) == 0.5


def test_another_prompts_blocks_are_refused() -> None:
    with pytest.raises(HandoffMismatchError, match="num_tokens"):
        inbound().announced(41, 3, ())
    with pytest.raises(HandoffMismatchError, match="in 4 blocks"):
        inbound().announced(40, 4, ())
    with pytest.raises(HandoffMismatchError, match="index"):
        inbound().announced(40, 3, (ReadyBlock(3, 70, 1),))
