"""Connectors in processes of their own, over real NIXL/UCX and shared memory: what a frozen and a killed peer leave."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from services.kvtransfer.connector import ConnectorLimits
from services.kvtransfer.messages import (
    BlocksFetched,
    FetchFailed,
    FirstToken,
    HandoffComplete,
    HandoffFailed,
    HandoffReady,
    QuarantineEnded,
    Released,
)
from services.kvtransfer.pull_book import PullLimits
from tests.kvtransfer.worker_rig import LAYOUT, WorkerProcess

BIG = replace(LAYOUT, block_bytes=256 * 1024)
NUM_BLOCKS = 64
LIMITS = ConnectorLimits(lease_s=2.0, pulls=PullLimits(overdue_s=0.5, slowest_bytes_per_s=1e9))
Start = Callable[..., WorkerProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    workers: list[WorkerProcess] = []

    def make(worker_id: str, epoch: str = "e1", kind: str = "nixl", tls: str = "tcp") -> WorkerProcess:
        options = {"epoch": epoch, "kind": kind, "layout": BIG, "limits": LIMITS, "num_blocks": NUM_BLOCKS}
        worker = WorkerProcess(worker_id, options, {"UCX_TLS": tls} if tls else {})
        workers.append(worker)
        return worker

    yield make
    for worker in workers:
        worker.end()


def wait_for(worker: WorkerProcess, kind: type[Any]) -> Any:
    return worker.tell("message", kind, 10.0)


def offer(holder: WorkerProcess, handoff_id: str, blocks: list[int], value: int) -> None:
    holder.tell("fill", blocks, value)
    assert holder.tell("offers.open", handoff_id, 16 * len(blocks), blocks)
    holder.tell("offers.progress", handoff_id, 16 * len(blocks))
    holder.tell("offers.complete", handoff_id, FirstToken(1))


@pytest.mark.parametrize(("kind", "tls", "path"), [("nixl", "tcp", "tcp"), ("shm", "", "shm")])
def test_a_whole_handoff_between_processes(start: Start, kind: str, tls: str, path: str) -> None:
    holder, puller = start("prefill", kind=kind, tls=tls), start("decode", kind=kind, tls=tls)
    offer(holder, "h", list(range(40)), 10)
    puller.tell("fetches.begin", "h", holder.ref)
    ready = wait_for(puller, HandoffReady)
    wait_for(puller, HandoffComplete)
    puller.tell("fetch", "h", ready.blocks, list(range(24, 64)))
    assert len(wait_for(puller, BlocksFetched).indices) == 40
    puller.tell("fetches.release", "h")
    assert wait_for(puller, Released).held
    assert puller.tell("bytes_of", list(range(24, 64))) == list(range(10, 50))
    assert holder.tell("ended", 5.0).outcome.value == "released"
    assert puller.tell("connector.active_path") == path


def test_late_bytes_of_a_frozen_peer_land_in_quarantine_and_nowhere_else(start: Start) -> None:
    holder, puller = start("prefill"), start("decode")
    offer(holder, "h", [0, 1, 2, 3], 200)
    puller.tell("fetches.begin", "h", holder.ref)
    ready = wait_for(puller, HandoffReady)
    os.kill(holder.pid, signal.SIGSTOP)
    puller.tell("fetch", "h", ready.blocks, [10, 11, 12, 13])
    assert "overdue" in wait_for(puller, FetchFailed).reason
    assert puller.tell("fetches.cancel", "h") == [10, 11, 12, 13]
    puller.tell("fill", [10, 11, 12, 13], 1)  # where a careless worker would have put another request
    puller.tell("fetches.begin", "next", holder.ref)
    assert "overdue" in wait_for(puller, HandoffFailed).reason
    time.sleep(1.0)
    assert puller.tell("fetches.writable") == dict.fromkeys([10, 11, 12, 13], 1)
    assert puller.tell("bytes_of", [10, 11, 12, 13]) == [1, 2, 3, 4]
    os.kill(holder.pid, signal.SIGCONT)
    assert wait_for(puller, QuarantineEnded).local_block_ids == (10, 11, 12, 13)
    assert puller.tell("fetches.writable") == {}
    assert puller.tell("bytes_of", [9, 10, 11, 12, 13, 14]) == [0, 200, 201, 202, 203, 0]


def test_a_puller_with_quarantined_transfers_can_still_leave(start: Start) -> None:
    holder, puller = start("prefill"), start("decode")
    offer(holder, "h", [0, 1, 2, 3], 200)
    puller.tell("fetches.begin", "h", holder.ref)
    ready = wait_for(puller, HandoffReady)
    os.kill(holder.pid, signal.SIGSTOP)
    puller.tell("fetch", "h", ready.blocks, [10, 11, 12, 13])
    wait_for(puller, FetchFailed)
    assert len(puller.tell("fetches.cancel", "h")) == 4
    assert puller.leave(15.0) == 0


def test_a_killed_peer_fails_fast_and_its_next_life_serves(start: Start) -> None:
    holder, puller = start("prefill"), start("decode")
    offer(holder, "h", list(range(NUM_BLOCKS)), 0)
    puller.tell("fetches.begin", "h", holder.ref)
    ready = wait_for(puller, HandoffReady)
    os.kill(holder.pid, signal.SIGSTOP)  # so that the kill falls into the middle
    puller.tell("fetch", "h", ready.blocks[:16], list(range(16)))
    time.sleep(0.1)
    assert len(puller.tell("fetches.writable")) == 16
    os.kill(holder.pid, signal.SIGKILL)
    assert "gone" in wait_for(puller, FetchFailed).reason
    assert puller.tell("fetches.cancel", "h") == []
    assert puller.tell("fetches.writable") == {}

    reborn = start("prefill", "e2")
    offer(reborn, "again", [5], 90)
    puller.tell("fetches.begin", "again", reborn.ref)
    puller.tell("fetch", "again", wait_for(puller, HandoffReady).blocks, [20])
    wait_for(puller, BlocksFetched)
    assert puller.tell("bytes_of", [20]) == [90]


def test_a_frozen_puller_loses_its_lease(start: Start) -> None:
    holder, puller = start("prefill"), start("decode")
    offer(holder, "h", [0], 1)
    puller.tell("fetches.begin", "h", holder.ref)
    wait_for(puller, HandoffReady)
    os.kill(puller.pid, signal.SIGSTOP)
    assert holder.tell("ended", 2.0 + 5.0).outcome.value == "expired"
    os.kill(puller.pid, signal.SIGCONT)
    puller.tell("fetches.release", "h")
    assert wait_for(puller, Released).held is False
