"""A decode worker's life on a real scheduler, with a clock that moves when told, no transport and no bus."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from services.decode import worker as worker_module
from services.decode.choice import Decoded
from services.decode.worker import Arrive, DecodeLife
from services.engine.sequence import FinishReason, SamplingParams, Sequence
from services.kvtransfer.messages import (
    BlocksFetched,
    FirstToken,
    HandoffComplete,
    HandoffReady,
    ReadyBlock,
    Released,
)
from services.kvtransfer.transport import PeerRef
from services.worker.desk import CancelAttempt
from services.worker.intake import Attempt, GatewayRef
from services.worker.outlet import Failure
from tests.engine.scheduler_rig import Rig, receive

HOLDER = PeerRef("p0", "e", "127.0.0.1:1")
ATTEMPT = Attempt("r", 1, "h", GatewayRef("g", "e"))


class Fetches:
    """Writes down what it is asked for."""

    def __init__(self) -> None:
        self.fetched: list[int] = []
        self.released: list[str] = []
        self.cancelled: list[str] = []

    def begin(self, handoff_id: str, peer: PeerRef) -> None:
        pass

    def fetch(self, handoff_id: str, blocks: Any) -> None:
        self.fetched += [block.index for block in blocks]

    def release(self, handoff_id: str, corrupt_indices: Any = ()) -> None:
        self.released.append(handoff_id)

    def cancel(self, handoff_id: str) -> list[int]:
        self.cancelled.append(handoff_id)
        return []

    def writable(self) -> dict[int, int]:
        return {}


class Outlet:
    """Keeps how attempts ended."""

    def __init__(self) -> None:
        self.finishes: list[FinishReason | None] = []
        self.ended: list[tuple[object, bool]] = []

    def token(self, event: Any) -> None:
        self.finishes.append(event.finish)

    def end(self, handoff_id: str, outcome: object, *, cancelled: bool = False) -> None:
        self.ended.append((outcome, cancelled))


class World:
    """Blocks of 4 tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rig = Rig()
        self.rig.clock.now = 100.0
        monkeypatch.setattr(worker_module, "time", SimpleNamespace(monotonic=self.rig.clock))
        self.fetches, self.outlet = Fetches(), Outlet()
        parts: Any = SimpleNamespace(
            settings=SimpleNamespace(room_wait_s=5.0),
            assembly=SimpleNamespace(scheduler=self.rig.scheduler, pool=self.rig.pool),
            connector=SimpleNamespace(fetches=self.fetches),
            outlet=self.outlet,
        )
        self.life = DecodeLife(parts)

    def arrive(self, holder: PeerRef | None) -> Sequence:
        seq = Sequence("h", list(range(1, 11)), SamplingParams(max_tokens=50), arrival_s=self.rig.clock.now)
        self.life.receive(Arrive(ATTEMPT, seq, holder))
        return seq

    def wait(self, seconds: float) -> None:
        self.rig.clock.now += seconds

    def step(self, seconds: float) -> None:
        """One step, whose tokens are settled so many seconds later."""
        result = self.rig.engine.step()
        assert result is not None
        self.wait(seconds)
        self.life.settle(result)

    def pull(self) -> Sequence:
        """Three blocks of a prompt: room is found, they arrive in a quarter of a second; token 0 is known."""
        seq = self.arrive(HOLDER)
        self.life.receive(HandoffReady("h", 10, 3, tuple(ReadyBlock(i, 70 + i, 0) for i in range(3))))
        self.life.tick(self.rig.clock.now)
        assert self.fetches.fetched == [0, 1, 2]
        self.wait(0.25)
        receive(self.rig, seq)
        self.life.receive(BlocksFetched("h", (0, 1, 2), 3000, 0.25))
        self.life.receive(HandoffComplete("h", FirstToken(42)))
        assert self.fetches.released == ["h"]
        return seq

    def outcome(self) -> tuple[object, bool]:
        assert len(self.outlet.ended) == 1
        assert not self.rig.scheduler.sequences
        self.life.receive(CancelAttempt("h", "again", by_gateway=True))  # idempotent
        assert len(self.outlet.ended) == 1
        books = self.life.books()
        assert (books["free"], books["used"], books["sequences"]) == (16 - int(str(books["cached"])), 0, 0)
        return self.outlet.ended[0]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_a_choice_that_its_gateway_cancels_is_accounted_for(world: World) -> None:
    world.pull()
    world.wait(0.125)
    world.life.receive(Released("h", held=True, since_complete_s=0.5))
    world.step(1.0)
    world.step(2.0)
    world.step(4.0)
    world.wait(8.0)
    world.life.receive(CancelAttempt("h", "stop string", by_gateway=True))
    assert world.outcome() == (
        Decoded(
            finish=FinishReason.CANCELLED,
            num_output_tokens=4,  # the first, and one per step
            num_cached_tokens=0,
            num_pulled_blocks=3,
            num_pulled_bytes=3000,
            queue_s=0.0,
            prefill_s=0.0,
            transfer_s=0.25,
            exposed_transfer_s=0.5,  # as the holder said
            first_decode_s=1.0,
            decode_s=14.0,
            num_preemptions=0,
        ),
        True,
    )
    assert set(world.outlet.finishes) == {None}, "who cancels need not be told on the bus"


def test_colocated_it_says_where_its_time_went_and_what_was_cached(world: World) -> None:
    world.arrive(None)
    world.wait(0.5)
    world.step(1.0)
    world.step(2.0)
    world.life.receive(CancelAttempt("h", "stop string", by_gateway=True))
    first, _ = world.outcome()
    assert isinstance(first, Decoded)
    assert (first.queue_s, first.prefill_s, first.first_decode_s, first.decode_s) == (0.5, 1.0, 2.0, 0.0)
    assert (first.num_output_tokens, first.num_cached_tokens) == (2, 0)
    world.outlet.ended.clear()
    world.arrive(None)
    world.step(1.0)
    world.life.receive(CancelAttempt("h", "stop string", by_gateway=True))
    again, _ = world.outcome()
    assert isinstance(again, Decoded)
    assert again.num_cached_tokens == 8  # two full blocks of the prompt's 10 tokens


@pytest.mark.parametrize("how_far", ["followed", "pulling", "releasing"])
def test_what_a_cancel_cuts_short_counts_up_to_there(world: World, how_far: str) -> None:
    if how_far == "followed":
        world.arrive(HOLDER)
    else:
        world.pull()
    world.wait(2.0)
    world.life.receive(CancelAttempt("h", "attempt over", by_gateway=True))
    outcome, cancelled = world.outcome()
    assert isinstance(outcome, Decoded) and cancelled
    assert outcome.finish is FinishReason.CANCELLED and outcome.num_output_tokens == 0
    assert outcome.exposed_transfer_s == (0.0 if how_far == "followed" else 2.0)  # nobody released: decode's own clock
    assert (outcome.first_decode_s, outcome.decode_s) == (0.0, 0.0)
    assert world.fetches.cancelled == ["h"]


@pytest.mark.parametrize("code", ["CANCELLED", "UNAVAILABLE"])
def test_who_hung_up_was_fenced_or_is_handed_back_fails(world: World, code: str) -> None:
    world.arrive(None)
    world.step(1.0)
    world.life.receive(CancelAttempt("h", "why", code=code))
    assert world.outcome() == (Failure(code, "why"), code == "CANCELLED")


def test_without_the_holders_word_the_exposed_transfer_is_what_decode_saw(world: World) -> None:
    world.pull()
    world.wait(0.125)
    world.life.receive(Released("h", held=True))
    world.step(1.0)
    world.life.receive(CancelAttempt("h", "stop string", by_gateway=True))
    outcome, _ = world.outcome()
    assert isinstance(outcome, Decoded) and outcome.exposed_transfer_s == 0.125
