"""Which attempts live: fences, tombstones, renewals, gateways that restart."""

from __future__ import annotations

import pytest

from services.worker.attempts import TOMBSTONE_S, AttemptBook, FencedError
from services.worker.intake import Attempt, GatewayRef

GATEWAY = GatewayRef("g", "epoch-1")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def book(clock: Clock) -> AttemptBook:
    return AttemptBook(renewal_s=2.0, clock=clock)


def attempt(request: str, number: int, gateway: GatewayRef = GATEWAY) -> Attempt:
    return Attempt(request, number, f"{request}-{number}", gateway)


def test_a_higher_attempt_fences_the_lower(book: AttemptBook) -> None:
    first, second = attempt("r", 1), attempt("r", 2)
    assert book.admit(first) == []
    assert book.admit(second) == [first]
    with pytest.raises(FencedError, match="fenced by attempt 2"):
        book.admit(Attempt("r", 1, "late", GATEWAY))


def test_a_cancel_that_overtakes_its_request_wins(book: AttemptBook) -> None:
    assert book.cancel("r-1") is None
    with pytest.raises(FencedError, match="before it came"):
        book.admit(attempt("r", 1))


def test_a_tombstone_lasts_longer_than_a_late_call(book: AttemptBook, clock: Clock) -> None:
    book.admit(attempt("r", 1))
    book.end("r-1")
    assert len(book) == 0
    clock.now += TOMBSTONE_S - 1
    book.sweep()
    with pytest.raises(FencedError):
        book.admit(attempt("r", 1))
    clock.now += TOMBSTONE_S + 1
    book.sweep()
    assert book.admit(attempt("r", 1)) == []


def test_what_is_not_renewed_is_swept(book: AttemptBook, clock: Clock) -> None:
    kept, silent = attempt("a", 1), attempt("b", 1)
    book.admit(kept)
    book.admit(silent)
    clock.now += 1.5
    book.renew([kept.handoff_id, "unknown"])
    clock.now += 1.0
    assert book.sweep() == [silent]
    assert book.sweep() == [], "each is released once"
    assert silent in book.live(), "it stays live until its sequence has left"
    book.end(silent.handoff_id)
    assert book.sweep() == []


def test_a_restarted_gateways_old_life_is_over(book: AttemptBook, clock: Clock) -> None:
    old = attempt("a", 1)
    book.admit(old)
    reborn = GatewayRef("g", "epoch-2")
    assert book.hear(reborn) == [], "it may still speak"
    clock.now += 2.1
    assert book.hear(reborn) == [old]
    with pytest.raises(FencedError, match="epoch is over"):
        book.admit(attempt("c", 1))
    assert book.admit(attempt("d", 1, reborn)) == []


def test_a_late_message_of_a_past_life_does_not_depose_the_living(book: AttemptBook, clock: Clock) -> None:
    """The worker never knew the past life: it may think it a new one, but the living goes on speaking."""
    book.admit(attempt("a", 1))
    assert book.hear(GatewayRef("g", "epoch-0")) == []
    for _ in range(5):
        clock.now += 1.0
        assert book.hear(GATEWAY) == []
    assert book.admit(attempt("b", 1)) == []
    with pytest.raises(FencedError, match="epoch is over"):
        book.admit(attempt("c", 1, GatewayRef("g", "epoch-0")))


def test_another_gateway_changes_nothing(book: AttemptBook) -> None:
    book.admit(attempt("a", 1))
    assert book.hear(GatewayRef("other", "epoch-9")) == []
    assert book.live() == [attempt("a", 1)]
