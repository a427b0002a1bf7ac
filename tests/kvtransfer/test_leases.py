"""Leases: every one ends exactly once, and repeated questions get the same answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kvtransfer.leases import LeaseClosed, LeaseOutcome, LeaseTable, ReleaseAnswer


def test_a_lease_that_is_renewed_lives_and_one_that_is_not_expires() -> None:
    table = LeaseTable(lease_s=5.0)
    assert table.open("a", [1, 2], now=100.0)
    assert table.open("b", [3], now=100.0)
    assert table.renew(["a", "never-heard-of"], now=104.0) == []
    assert table.sweep(now=105.0) == []  # exactly at its end it still holds
    assert table.sweep(now=105.1) == [LeaseClosed("b", (3,), LeaseOutcome.EXPIRED)]
    assert table.renew(["a", "b"], now=108.9) == ["b"]
    assert table.sweep(now=113.0) == []
    assert table.release("b", (), now=113.0).held is False
    assert table.num_open == 1


def test_a_renewal_that_arrives_before_the_sweep_counts_however_late() -> None:
    table = LeaseTable(lease_s=5.0)
    table.open("a", [1], now=0.0)
    assert table.renew(["a"], now=9.0) == []  # the engine was busy for nine seconds and swept nothing
    assert table.sweep(now=9.1) == []


def test_release_says_held_again_and_again_and_reports_once() -> None:
    table = LeaseTable()
    table.open("a", [7, 8], now=0.0)
    table.complete("a")
    assert table.release("a", [1], now=1.0).held is True
    assert table.release("a", [], now=1.1).held is True
    assert table.num_open == 1  # its blocks are not given back yet
    assert table.sweep(now=1.2) == [LeaseClosed("a", (7, 8), LeaseOutcome.RELEASED, (1,))]
    assert table.sweep(now=1.3) == []
    assert table.num_open == 0


def test_a_release_tells_how_long_ago_token_0_was_sampled() -> None:
    table = LeaseTable()
    for name in ("a", "b"):
        table.open(name, [7], now=0.0)
        table.complete(name)  # all is readable, nothing sampled yet
    table.complete("a", sampled_s=2.0)
    table.complete("a")
    assert table.release("a", [], now=2.5) == ReleaseAnswer(held=True, since_complete_s=0.5)
    assert table.release("a", [], now=9.0) == ReleaseAnswer(held=True, since_complete_s=0.5)  # the first one counts
    assert table.release("b", [], now=2.5) == ReleaseAnswer(held=True, since_complete_s=None)
    assert table.release("never opened", [], now=2.5) == ReleaseAnswer(held=False, since_complete_s=None)


def test_a_release_before_all_is_readable_is_a_cancel() -> None:
    table = LeaseTable()
    table.open("a", [7], now=0.0)
    assert table.release("a", [], now=1.0).held is True
    assert table.sweep(now=1.0) == [LeaseClosed("a", (7,), LeaseOutcome.CANCELLED)]


def test_a_cancel_that_overtakes_its_request_wins_until_the_tombstone_falls() -> None:
    table = LeaseTable(tombstone_s=60.0)
    assert table.release("a", [], now=0.0).held is False
    assert table.open("a", [1], now=1.0) is False
    table.close("a", now=2.0)
    assert table.sweep(now=59.0) == []
    assert table.open("a", [1], now=59.0) is False
    assert table.sweep(now=60.5) == []
    assert table.open("a", [1], now=61.0) is True


def test_the_holder_may_close_and_an_open_lease_cannot_open_again() -> None:
    table = LeaseTable()
    table.open("a", [1], now=0.0)
    with pytest.raises(ValueError, match="a has a lease"):
        table.open("a", [2], now=0.0)
    table.close("a", now=1.0)
    table.close("a", now=1.0)
    assert table.release("a", [], now=2.0).held is False
    assert [closed.outcome for closed in table.sweep(now=3.0)] == [LeaseOutcome.CANCELLED]


@given(
    st.lists(
        st.tuples(st.sampled_from(["open", "renew", "release", "close", "complete", "sweep"]), st.integers(0, 3)),
        max_size=60,
    )
)
def test_whatever_happens_every_lease_is_given_back_once(steps: list[tuple[str, int]]) -> None:
    table = LeaseTable(lease_s=3.0, tombstone_s=1e9)
    opened: set[str] = set()
    given_back: list[str] = []
    for now, (what, which) in enumerate(steps):
        name = str(which)
        if what == "open" and name not in opened:
            if table.open(name, [which], float(now)):
                opened.add(name)
        elif what == "renew":
            table.renew([name], float(now))
        elif what == "release":
            first = table.release(name, [], float(now))
            assert table.release(name, [], float(now)) == first
        elif what == "close":
            table.close(name, float(now))
        elif what == "complete":
            table.complete(name)
        elif what == "sweep":
            given_back += [closed.handoff_id for closed in table.sweep(float(now))]
    given_back += [closed.handoff_id for closed in table.sweep(1e6)]
    assert sorted(given_back) == sorted(opened)
    assert table.num_open == 0
