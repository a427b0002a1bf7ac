"""Epochs, faults, the beat of serving, the transfer thread, the books of pulls: each alone."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kvtransfer import faults
from services.kvtransfer.epochs import EpochBook
from services.kvtransfer.messages import BlockPull
from services.kvtransfer.pull_book import Pull, PullBook, PullLimits
from services.kvtransfer.serve_beat import BUSY_S, IDLE_S, OFFERING_S, ServeBeat
from services.kvtransfer.transfer_thread import TransferThread
from services.kvtransfer.transport import PeerRef


def test_an_epoch_that_was_replaced_never_returns() -> None:
    book = EpochBook()
    assert book.admit("w", "1")
    assert book.admit("w", "1")
    assert not book.is_over("w", "2")  # never heard of is not over
    assert book.admit("w", "2")
    assert book.is_over("w", "1")
    assert not book.admit("w", "1")
    assert book.admit("other", "1")
    assert not book.is_over("w", "2")


def test_faults_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PDSERVE_FAULT", raising=False)
    assert faults.from_environment() == faults.Faults()
    assert faults.from_environment().corrupted(10) is None
    monkeypatch.setenv("PDSERVE_FAULT", "corrupt_block:3, slow_transfer_s:0.5")
    found = faults.from_environment()
    assert found.slow_transfer_s == 0.5
    assert [found.corrupted(2), found.corrupted(2), found.corrupted(2)] == [None, 0, None]
    monkeypatch.setenv("PDSERVE_FAULT", "explode")
    with pytest.raises(ValueError, match="explode"):
        faults.from_environment()


def test_the_beat_is_fast_with_work_slower_on_offer_and_slowest_idle() -> None:
    answers: list[bool | None] = [True]
    offering = [True]
    beat = ServeBeat(lambda: answers[0], lambda: offering[0])

    def settled() -> float | None:
        delay = None
        for _ in range(20):
            beat._due_s = 0.0
            delay = beat.poll()
        return delay

    assert settled() == BUSY_S
    answers[0] = False
    assert settled() == OFFERING_S
    offering[0] = False
    assert settled() == IDLE_S
    early = beat.poll()
    assert early is not None and 0 < early <= IDLE_S
    beat.expect()
    assert settled() == OFFERING_S
    answers[0] = None
    assert settled() is None


def test_the_transfer_thread_keeps_order_carries_errors_and_reports_its_death() -> None:
    died: Future[str] = Future()
    seen: list[int] = []
    polls = threading.Event()

    def poll() -> float | None:
        polls.set()
        return 0.001

    thread = TransferThread(poll, died.set_result)
    for i in range(100):
        thread.submit(lambda i=i: seen.append(i))  # type: ignore[misc]
    thread.start()
    assert thread.ask(lambda: len(seen)).result(5) == 100
    assert seen == list(range(100))
    with pytest.raises(ZeroDivisionError):
        thread.ask(lambda: 1 // 0).result(5)
    polls.clear()
    assert polls.wait(5)
    thread.submit(lambda: seen.remove(-1))
    assert "ValueError" in died.result(5)
    thread.stop()


Action = tuple[str, int, int]


@given(st.lists(st.tuples(st.sampled_from(["add", "abandon", "take", "settle"]), st.integers(0, 2), st.integers(1, 5))))
def test_the_books_of_pulls_balance_whatever_happens(actions: list[Action]) -> None:
    """Every posted pull is writable until settled, and an abandoned one is returned exactly once."""
    peer_ref = PeerRef("p", "1")
    book = PullBook(PullLimits(max_in_flight_bytes=60, max_pull_bytes=20), block_bytes=10)
    peer = book.peer(peer_ref)
    next_block = 0
    waiting: Counter[int] = Counter()
    posted: dict[int, int] = {}  # local block: handoff
    returned: list[int] = []
    pulls: list[Pull] = []
    for what, handoff, count in actions:
        name = str(handoff)
        if what == "add":
            blocks = [BlockPull(i, i, next_block + i, 0) for i in range(count)]
            next_block += count
            book.add(peer_ref, name, blocks, not_before_s=0.0)
            waiting[handoff] += count
        elif what == "abandon":
            found = book.abandon(name)
            assert set(found) == {b for b, h in posted.items() if h == handoff and b not in returned}
            returned += found
            waiting[handoff] = 0
        elif what == "take":
            pull = book.take(peer, now=time.monotonic())
            if isinstance(pull, Pull):
                assert len(pull.blocks) <= 2
                pulls.append(pull)
                posted |= dict.fromkeys(pull.local_block_ids, int(pull.handoff_id))
                waiting[int(pull.handoff_id)] -= len(pull.blocks)
            else:
                assert not sum(waiting.values()) or peer.in_flight_bytes > 40
        elif what == "settle" and pulls:
            pull = pulls.pop(0)
            wanted = book.settle(peer, pull)
            assert wanted == (not set(pull.local_block_ids) & set(returned))
            for block in pull.local_block_ids:
                del posted[block]
        assert book.writable() == dict.fromkeys(posted, 1)
        assert peer.in_flight_bytes == 10 * len(posted) <= 60
        assert sum(len(pull.blocks) for pull in peer.waiting) == sum(waiting.values())
