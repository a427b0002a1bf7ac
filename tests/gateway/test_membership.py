"""Membership converges for any order of joining, leaving and restarting, and silence alone loses nobody."""

from __future__ import annotations

import itertools
from dataclasses import replace

from services.gateway.membership import Membership, Role, WorkerInfo, WorkerKey


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.bus_up = True

    def __call__(self) -> float:
        return self.now


def info(worker_id: str = "d", epoch: str = "1", address: str = "h:1", **more: object) -> WorkerInfo:
    fields = {"role": Role.DECODE, "model": "m", "max_model_len": 64} | more
    return WorkerInfo(WorkerKey(worker_id, epoch), address=address, **fields)  # type: ignore[arg-type]


def members(clock: Clock) -> tuple[Membership, list[WorkerKey]]:
    gone: list[WorkerKey] = []
    membership = Membership("m", "t", clock, lambda: clock.bus_up, silence_s=3)
    membership.on_gone(gone.append)
    return membership, gone


def keys(membership: Membership) -> set[WorkerKey]:
    return {worker.key for role in Role for worker in membership.workers(role)}


def test_a_restart_replaces_and_the_old_life_stays_over() -> None:
    membership, gone = members(Clock())
    membership.observe(info(epoch="1"))
    membership.observe(info(epoch="2", address="h:2"))
    assert keys(membership) == {("d", "2")} and gone == [("d", "1")]
    membership.observe(info(epoch="1"))
    assert keys(membership) == {("d", "2")}


def test_a_restart_behind_the_same_address_under_another_name() -> None:
    membership, gone = members(Clock())
    membership.observe(info("a"))
    membership.observe(info("b"))
    assert keys(membership) == {("b", "1")} and gone == [("a", "1")]


def test_any_order_of_heartbeats_converges_once_the_address_was_asked() -> None:
    """Two lives behind one address; whoever is heard first, the one that answers there is the member."""
    lives = [info(epoch="1"), info(epoch="2"), info("other", epoch="9")]
    for order in itertools.permutations([*lives, *lives]):
        clock = Clock()
        membership, _ = members(clock)
        for heartbeat in order:
            membership.observe(heartbeat)
        membership.observe(lives[1])  # the living one goes on
        for _ in range(3):
            for asked in membership.asking():
                membership.settle(asked, lives[1].key)
            membership.observe(lives[1])
        assert keys(membership) == {("d", "2")}


def test_leaving_in_order() -> None:
    membership, gone = members(Clock())
    membership.observe(info())
    membership.observe(info(leaving=True))
    assert keys(membership) == set() and gone == [("d", "1")]
    membership.observe(info())  # overtaken by its own farewell
    assert keys(membership) == set()
    (asked,) = membership.asking()
    membership.settle(asked, None)
    assert keys(membership) == set()


def test_silence_is_asked_about_and_only_no_answer_loses() -> None:
    clock = Clock()
    membership, gone = members(clock)
    membership.observe(info())
    clock.now += 3.1
    (asked,) = membership.asking()
    membership.settle(asked, asked.key)
    assert keys(membership) == {("d", "1")} and membership.asking() == ()
    clock.now += 3.1
    (asked,) = membership.asking()
    membership.settle(asked, None)
    assert keys(membership) == set() and gone == [("d", "1")]
    membership.observe(info())  # thawed
    assert keys(membership) == {("d", "1")}


def test_another_process_at_the_address_of_a_silent_one() -> None:
    clock = Clock()
    membership, gone = members(clock)
    membership.observe(info())
    clock.now += 3.1
    (asked,) = membership.asking()
    membership.settle(asked, WorkerKey("d", "2"))
    assert keys(membership) == set() and gone == [("d", "1")]
    membership.observe(info(epoch="2"))
    assert keys(membership) == {("d", "2")}


def test_frozen_while_the_bus_is_down() -> None:
    clock = Clock()
    membership, _ = members(clock)
    membership.observe(info())
    clock.bus_up = False
    clock.now += 1000
    assert membership.asking() == ()
    membership.suspect(WorkerKey("d", "1"))
    assert [asked.key for asked in membership.asking()] == [("d", "1")]
    membership.settle(info(), WorkerKey("d", "1"))
    clock.bus_up = True
    membership.thaw()
    assert membership.asking() == ()


def test_strangers_are_refused() -> None:
    membership, _ = members(Clock())
    membership.observe(info(model="another"))
    membership.observe(info("e", tokenizer_fingerprint="another"))
    assert keys(membership) == set()
    membership.observe(info("f", tokenizer_fingerprint="t"))
    assert keys(membership) == {("f", "1")}


def test_a_new_heartbeat_replaces_the_old_and_the_context_is_remembered() -> None:
    membership, gone = members(Clock())
    membership.observe(info())
    membership.observe(replace(info(), draining=True))
    assert [worker.draining for worker in membership.workers(Role.DECODE)] == [True] and gone == []
    membership.lose(WorkerKey("d", "1"))
    assert membership.max_model_len == 64
