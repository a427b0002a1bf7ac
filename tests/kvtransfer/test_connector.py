"""Two workers in one process over real gRPC, on the fake transport, whose peers freeze and die on command."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest
import xxhash

from services.kvtransfer import checksum_mix, metrics
from services.kvtransfer.connector import ConnectorLimits
from services.kvtransfer.fake_transport import FakeFabric
from services.kvtransfer.holder_stub import LinkLimits
from services.kvtransfer.leases import LeaseOutcome
from services.kvtransfer.messages import (
    BlocksCorrupt,
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
from services.kvtransfer.server import BlockTransferServicer
from services.wire import rpc
from services.wire.pb import block_transfer_pb2 as transfer_pb
from services.wire.pb import block_transfer_pb2_grpc as transfer_grpc
from services.wire.pb import common_pb2
from tests.kvtransfer.worker_rig import LAYOUT, Worker

TOKEN = FirstToken(42, -0.5, ((42, -0.5), (7, -1.25)), "length")


def with_pair(
    scenario: Callable[[Worker, Worker, FakeFabric], Awaitable[None]],
    *,
    limits: ConnectorLimits | None = None,
    holder_options: dict[str, Any] | None = None,
    puller_options: dict[str, Any] | None = None,
) -> None:
    async def body() -> None:
        fabric = FakeFabric()
        holder = await Worker("prefill", fabric=fabric, limits=limits, **(holder_options or {})).start()
        puller = await Worker("decode", fabric=fabric, limits=limits, **(puller_options or {})).start()
        try:
            await scenario(holder, puller, fabric)
        finally:
            await puller.stop()
            await holder.stop()

    asyncio.run(body())


def test_blocks_move_chunk_by_chunk_while_the_prompt_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[int] = []
    follow = BlockTransferServicer.Follow

    async def counted(self: Any, *arguments: Any) -> Any:
        streams.append(1)
        async for news in follow(self, *arguments):
            yield news

    monkeypatch.setattr(BlockTransferServicer, "Follow", counted)

    async def scenario(holder: Worker, puller: Worker, fabric: FakeFabric) -> None:
        moved = metrics.PULLED_BYTES.labels("fake")._value.get()
        puller.fetches.begin("h", holder.ref)  # either side may hear first
        puller.fetches.begin("other", holder.ref)
        await asyncio.sleep(0.05)
        remote = [9, 3, 30, 4, 11]
        assert holder.offers.open("h", 70, remote)  # 70 tokens: four full blocks and one of six
        holder.fill(remote, 50)
        holder.offers.progress("h", 40)
        ready = await puller.message(HandoffReady)
        checksum = xxhash.xxh3_64_intdigest(bytes([50]) * LAYOUT.block_bytes)
        assert (ready.handoff_id, ready.num_tokens, ready.num_blocks) == ("h", 70, 5)
        assert [(b.index, b.block_id) for b in ready.blocks] == [(0, 9), (1, 3)]
        assert ready.blocks[0].checksum == checksum
        puller.fetch("h", ready.blocks, [20, 21])
        fetched = await puller.message(BlocksFetched)
        assert (fetched.indices, fetched.num_bytes) == ((0, 1), 2 * LAYOUT.block_bytes)

        holder.offers.progress("h", 40)  # nothing new
        holder.offers.progress("h", 70)
        sampled_s = time.monotonic()
        holder.offers.complete("h", TOKEN)
        ready = await puller.message(HandoffReady)
        assert [(b.index, b.block_id) for b in ready.blocks] == [(2, 30), (3, 4), (4, 11)]
        assert await puller.message(HandoffComplete) == HandoffComplete("h", replace(TOKEN))
        puller.fetch("h", ready.blocks, [22, 23, 24])
        assert (await puller.message(BlocksFetched)).indices == (2, 3, 4)
        assert puller.bytes_of([20, 21, 22, 23, 24]) == [50, 51, 52, 53, 54]
        assert puller.fetches.writable() == {}

        puller.fetches.release("h")
        released = await puller.message(Released)
        assert released.handoff_id == "h" and released.held
        assert released.since_complete_s is not None and 0 < released.since_complete_s < time.monotonic() - sampled_s
        closed = await holder.ended()
        assert (closed.handoff_id, closed.block_ids) == ("h", tuple(remote))
        assert closed.outcome is LeaseOutcome.RELEASED
        assert metrics.PULLED_BYTES.labels("fake")._value.get() - moved == 5 * LAYOUT.block_bytes
        assert puller.fetches.cancel("h") == []  # after the end, nothing
        assert puller.fetches.cancel("other") == []
        assert holder.offers.num_open == 0
        assert len(streams) == 1  # both handoffs on one

    with_pair(scenario)


def test_a_follower_that_comes_late_hears_everything_from_the_start() -> None:
    async def scenario(holder: Worker, puller: Worker, fabric: FakeFabric) -> None:
        assert holder.offers.open("h", 16, [5])
        holder.offers.progress("h", 16)
        holder.offers.complete("h", TOKEN)
        await asyncio.sleep(0.05)
        puller.fetches.begin("h", holder.ref)
        assert [b.block_id for b in (await puller.message(HandoffReady)).blocks] == [5]
        assert (await puller.message(HandoffComplete)).first_token == TOKEN
        puller.fetches.release("h")  # it has the block already: a full hit, nothing is pulled
        assert (await puller.message(Released)).held
        assert (await holder.ended()).outcome is LeaseOutcome.RELEASED

    with_pair(scenario)


def test_a_corrupt_block_is_caught_named_and_told_to_its_holder() -> None:
    async def scenario(holder: Worker, puller: Worker, fabric: FakeFabric) -> None:
        failures = metrics.VERIFY_FAILURES._value.get()
        holder.offers.open("h", 48, [1, 2, 3])
        holder.offers.progress("h", 48)
        puller.fetches.begin("h", holder.ref)
        ready = await puller.message(HandoffReady)
        holder.blocks[2, 100] ^= 1  # after its checksum was taken
        puller.fetch("h", ready.blocks, [11, 12, 13])
        assert await puller.message(BlocksCorrupt) == BlocksCorrupt("h", (1,))
        assert (await puller.message(BlocksFetched)).indices == (0, 2)
        assert metrics.VERIFY_FAILURES._value.get() - failures == 1
        puller.fetches.release("h", corrupt_indices=[1])
        assert (await puller.message(Released)).held
        assert (await holder.ended()).corrupt_indices == (1,)

    with_pair(scenario)


@pytest.mark.parametrize("kind", ["xxh3_64", "mix32x2"])
def test_either_kind_of_checksum_catches_a_flipped_bit(kind: str) -> None:
    async def scenario(holder: Worker, puller: Worker, fabric: FakeFabric) -> None:
        holder.fill([1, 2, 3], 70)
        holder.offers.open("h", 48, [1, 2, 3])
        holder.offers.progress("h", 48)
        puller.fetches.begin("h", holder.ref)
        ready = await puller.message(HandoffReady)
        take = checksum_mix.checksum if kind == "mix32x2" else xxhash.xxh3_64_intdigest
        assert [b.checksum for b in ready.blocks] == [take(holder.blocks[i]) for i in (1, 2, 3)]
        holder.blocks[3, LAYOUT.block_bytes - 1] ^= 0x80
        puller.fetch("h", ready.blocks, [11, 12, 13])
        assert await puller.message(BlocksCorrupt) == BlocksCorrupt("h", (2,))
        assert (await puller.message(BlocksFetched)).indices == (0, 1)

    options = {"layout": replace(LAYOUT, checksum=kind)}
    with_pair(scenario, holder_options=options, puller_options=options)


def test_different_kinds_of_checksum_are_refused_by_name() -> None:
    async def scenario(holder: Worker, puller: Worker, fabric: FakeFabric) -> None:
        assert await puller.fetches.warm_up(holder.ref) == "failed_precondition: checksum: mix32x2 here, xxh3_64 there"

    with_pair(scenario, holder_options={"layout": replace(LAYOUT, checksum="mix32x2")})


def test_a_fault_from_the_environment_corrupts_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_FAULT", "corrupt_block:4,slow_transfer_s:0.2")

    async def scenario(holder: Worker, puller: Worker, fabric: FakeFabric) -> None:
        holder.offers.open("h", 96, [1, 2, 3, 4, 5, 6])
        holder.offers.progress("h", 48)
        puller.fetches.begin("h", holder.ref)
        first = await puller.message(HandoffReady)
        puller.fetch("h", first.blocks, [11, 12, 13])
        await asyncio.sleep(0.1)
        assert puller.fetches.writable() == {}  # slowed: not even posted
        assert (await puller.message(BlocksFetched)).indices == (0, 1, 2)
        holder.offers.progress("h", 96)
        second = await puller.message(HandoffReady)
        puller.fetch("h", second.blocks, [14, 15, 16])
        assert (await puller.message(BlocksCorrupt)).indices == (3,)
        assert (await puller.message(BlocksFetched)).indices == (4, 5)
        puller.fetch("h", second.blocks, [14, 15, 16])
        assert (await puller.message(BlocksFetched)).indices == (3, 4, 5)  # only once
        puller.fetch("h", second.blocks, [14, 15, 16])
        assert puller.fetches.cancel("h") == []  # cancelled while slowed: nothing was posted
        await asyncio.sleep(0.3)
        assert puller.fetches.writable() == {}
        assert not [m for m in puller.messages if isinstance(m, BlocksFetched | QuarantineEnded)]

    with_pair(scenario)


def test_a_layout_mismatch_is_refused_by_the_name_of_the_field() -> None:
    async def scenario(holder: Worker, puller: Worker, fabric: FakeFabric) -> None:
        assert await puller.fetches.warm_up(holder.ref) == "failed_precondition: block_size: 32 here, 16 there"
        puller.fetches.begin("h", holder.ref)
        assert "block_size: 32 here, 16 there" in (await puller.message(HandoffFailed)).reason

    with_pair(scenario, holder_options={"layout": replace(LAYOUT, block_size=32)})


def test_an_unknown_handoff_may_stay_so_only_for_a_while() -> None:
    async def scenario(holder: Worker, puller: Worker, fabric: FakeFabric) -> None:
        puller.fetches.begin("h", holder.ref)
        failed = await puller.message(HandoffFailed)
        assert failed == HandoffFailed("h", "prefill: the holder never heard of it")
        assert puller.fetches.cancel("h") == []
        await asyncio.sleep(0.1)
        assert holder.offers.open("h", 16, [0]) is False  # the cancel came first, and wins

    with_pair(scenario, limits=ConnectorLimits(link=LinkLimits(unknown_s=0.2)))


def test_a_handoff_whose_prompt_is_queued_is_waited_for() -> None:
    async def scenario(holder: Worker, puller: Worker, fabric: FakeFabric) -> None:
        holder.offers.expect("h")
        puller.fetches.begin("h", holder.ref)
        await asyncio.sleep(0.6)  # three times as long as an unknown one
        assert holder.offers.open("h", 16, [0]) is True
        holder.offers.progress("h", 16)
        ready = await puller.message(HandoffReady)
        assert (ready.handoff_id, ready.num_tokens, ready.num_blocks) == ("h", 16, 1)

    with_pair(scenario, limits=ConnectorLimits(link=LinkLimits(unknown_s=0.2)))


def test_leases_live_by_renewals_and_end_without() -> None:
    """The puller would renew every second; the holder's leases are half as long, and it adapts."""
    limits = ConnectorLimits(lease_s=0.5)

    async def scenario(holder: Worker, puller: Worker, fabric: FakeFabric) -> None:
        puller.fetches.begin("kept", holder.ref)
        holder.offers.open("kept", 16, [1])
        holder.offers.open("lonely", 16, [2])
        closed = await holder.ended()
        assert (closed.handoff_id, closed.outcome) == ("lonely", LeaseOutcome.EXPIRED)
        await asyncio.sleep(0.8)
        assert holder.closed == []
        puller.fetches.begin("lonely", holder.ref)
        failed = await puller.message(HandoffFailed)
        assert failed.handoff_id == "lonely"
        assert "the lease is" in failed.reason
        puller.fetches.release("lonely")
        assert await puller.message(Released) == Released("lonely", held=False)

    with_pair(scenario, limits=limits)


def test_the_holders_failure_and_a_pullers_cancel_reach_the_other_side() -> None:
    async def scenario(holder: Worker, puller: Worker, fabric: FakeFabric) -> None:
        for handoff_id in ("a", "b"):
            puller.fetches.begin(handoff_id, holder.ref)
            holder.offers.open(handoff_id, 64, [1, 2, 3, 4])
        holder.offers.progress("b", 20)
        await puller.message(HandoffReady)
        holder.offers.fail("a", "preempted")
        assert await puller.message(HandoffFailed) == HandoffFailed("a", "prefill: preempted")
        closed = await holder.ended()
        assert (closed.handoff_id, closed.outcome) == ("a", LeaseOutcome.CANCELLED)
        assert puller.fetches.cancel("b") == []
        closed = await holder.ended(1.0)
        assert (closed.handoff_id, closed.outcome) == ("b", LeaseOutcome.CANCELLED)

    with_pair(scenario)


def test_a_frozen_peer_quarantines_what_it_may_still_write_and_opens_its_breaker() -> None:
    size = LAYOUT.block_bytes
    limits = ConnectorLimits(
        pulls=PullLimits(max_in_flight_bytes=4 * size, max_pull_bytes=2 * size, overdue_s=0.3, slowest_bytes_per_s=1e9)
    )

    async def scenario(holder: Worker, puller: Worker, fabric: FakeFabric) -> None:
        remote, local = list(range(10)), list(range(20, 30))
        holder.fill(remote, 100)
        holder.offers.open("h", 160, remote)
        holder.offers.progress("h", 160)
        puller.fetches.begin("h", holder.ref)
        ready = await puller.message(HandoffReady)
        fabric.frozen.add(holder.ref.agent_name)
        puller.fetch("h", ready.blocks, local)
        await puller.some(lambda: [1] if puller.fetches.writable() else [])
        assert puller.fetches.writable() == dict.fromkeys(local[:4], 1)  # the cap holds the rest back
        assert "overdue" in (await puller.message(FetchFailed)).reason
        quarantined = puller.fetches.cancel("h")
        assert sorted(quarantined) == local[:4]
        assert puller.fetches.cancel("h") == []
        puller.fill(local[:4], 1)

        puller.fetches.begin("next", holder.ref)
        assert "overdue" in (await puller.message(HandoffFailed)).reason
        assert metrics.QUARANTINED._value.get() == 2
        assert not [m for m in puller.messages if isinstance(m, QuarantineEnded)]

        fabric.frozen.clear()
        ended = [await puller.message(QuarantineEnded), await puller.message(QuarantineEnded)]
        assert sorted(ended[0].local_block_ids + ended[1].local_block_ids) == local[:4]
        assert puller.bytes_of(local[:4]) == [100, 101, 102, 103]  # they did land, late
        assert puller.bytes_of(local[4:]) == [0] * 6
        assert puller.fetches.writable() == {}
        assert metrics.QUARANTINED._value.get() == 0

        await asyncio.sleep(0.1)  # the breaker closes with the last overdue transfer
        holder.offers.open("again", 16, [0])
        holder.offers.progress("again", 16)
        puller.fetches.begin("again", holder.ref)
        puller.fetch("again", (await puller.message(HandoffReady)).blocks, [30])
        assert (await puller.message(BlocksFetched)).indices == (0,)

    with_pair(scenario, limits=limits)


def test_a_killed_peer_leaves_nothing_to_quarantine() -> None:
    async def scenario(holder: Worker, puller: Worker, fabric: FakeFabric) -> None:
        holder.offers.open("h", 32, [1, 2])
        holder.offers.progress("h", 32)
        puller.fetches.begin("h", holder.ref)
        ready = await puller.message(HandoffReady)
        fabric.frozen.add(holder.ref.agent_name)
        puller.fetch("h", ready.blocks, [3, 4])
        await puller.some(lambda: [1] if puller.fetches.writable() else [])
        fabric.dead.add(holder.ref.agent_name)
        assert "killed" in (await puller.message(FetchFailed)).reason
        assert puller.fetches.cancel("h") == []
        assert puller.fetches.writable() == {}

    with_pair(scenario)


def test_a_lost_path_to_a_living_peer_is_connected_anew() -> None:
    async def scenario(holder: Worker, puller: Worker, fabric: FakeFabric) -> None:
        holder.offers.open("h", 32, [1, 2])
        holder.offers.progress("h", 32)
        puller.fetches.begin("h", holder.ref)
        ready = await puller.message(HandoffReady)
        fabric.dead.add(holder.ref.agent_name)
        puller.fetch("h", ready.blocks[:1], [3])
        await puller.message(FetchFailed)
        fabric.dead.clear()
        puller.fetch("h", ready.blocks[1:], [4])
        assert (await puller.message(BlocksFetched)).indices == (1,)

    with_pair(scenario)


def test_a_holder_that_ends_or_falls_silent_fails_its_handoffs(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = ConnectorLimits(link=LinkLimits(renew_s=0.1, call_s=0.2, silence_s=0.6, refollow_s=0.3, release_s=0.5))

    renew, silent = BlockTransferServicer.RenewLeases, asyncio.Event()

    async def renew_or_hang(self: Any, *arguments: Any) -> Any:
        if silent.is_set():
            await asyncio.sleep(60)
        return await renew(self, *arguments)

    monkeypatch.setattr(BlockTransferServicer, "RenewLeases", renew_or_hang)

    async def scenario(holder: Worker, puller: Worker, fabric: FakeFabric) -> None:
        puller.fetches.begin("h", holder.ref)
        holder.offers.open("h", 16, [1])
        holder.offers.progress("h", 16)
        await puller.message(HandoffReady)
        holder2 = await Worker("prefill2", fabric=fabric).start()
        puller.fetches.begin("h2", holder2.ref)
        holder2.offers.open("h2", 16, [1])
        holder2.offers.progress("h2", 16)
        await puller.message(HandoffReady)
        await holder2.stop()
        assert (await puller.message(HandoffFailed)).handoff_id == "h2"
        puller.fetches.release("h2")
        assert await puller.message(Released) == Released("h2", held=False)
        silent.set()  # its streams stay open, as a frozen process's do
        assert await puller.message(HandoffFailed) == HandoffFailed("h", "prefill: the holder answers no renewal")

    with_pair(scenario, limits=limits)


def test_a_restarted_peer_behind_the_same_address_is_another_peer() -> None:
    async def scenario(holder: Worker, puller: Worker, fabric: FakeFabric) -> None:
        old, port = holder.ref, holder.port
        assert await puller.fetches.warm_up(old) is None
        await holder.stop()
        new = await Worker("prefill", "e2", fabric=fabric).start(port)
        try:
            puller.fetches.begin("stale", old)
            failed = await puller.message(HandoffFailed)
            assert failed.handoff_id == "stale"
            new.offers.open("h", 16, [3])
            new.fill([3], 77)
            new.offers.progress("h", 16)
            puller.fetches.begin("h", new.ref)
            puller.fetch("h", (await puller.message(HandoffReady)).blocks, [8])
            await puller.message(BlocksFetched)
            assert puller.bytes_of([8]) == [77]
            puller.fetches.begin("staler", old)
            assert await puller.message(HandoffFailed) == HandoffFailed("staler", "epoch: e1 of prefill is over")
        finally:
            await new.stop()

    async def body() -> None:
        fabric = FakeFabric()
        limits = ConnectorLimits(link=LinkLimits(unknown_s=0.3, refollow_s=0.2))
        holder = await Worker("prefill", fabric=fabric).start()
        puller = await Worker("decode", fabric=fabric, limits=limits).start()
        await scenario(holder, puller, fabric)
        await puller.stop()

    asyncio.run(body())


def test_an_epoch_that_nobody_answers_with_deposes_nobody() -> None:
    """A dispatch that names a life of the holder which never was is refused; handoffs from the live one go on."""

    async def scenario(holder: Worker, puller: Worker, fabric: FakeFabric) -> None:
        for number in range(3):
            stranger = replace(holder.ref, epoch=f"never-{number}")
            puller.fetches.begin(f"lost-{number}", stranger)
            failed = await puller.message(HandoffFailed)
            assert (failed.handoff_id, "never" in failed.reason) == (f"lost-{number}", True)
            handoff_id = f"h-{number}"
            holder.offers.open(handoff_id, 16, [1])
            holder.offers.progress(handoff_id, 16)
            puller.fetches.begin(handoff_id, holder.ref)
            puller.fetch(handoff_id, (await puller.message(HandoffReady)).blocks, [8])
            assert (await puller.message(BlocksFetched)).handoff_id == handoff_id
        assert len(puller.fetches._links) <= 2, "links to lives that never answered are given up"

    with_pair(scenario)


def test_messages_of_and_for_past_epochs_are_refused() -> None:
    async def scenario(holder: Worker, puller: Worker, fabric: FakeFabric) -> None:
        assert await puller.fetches.warm_up(holder.ref) is None
        reborn = await Worker("decode", "e2", fabric=fabric).start()
        assert await reborn.fetches.warm_up(holder.ref) is None
        assert "epoch: e1 of decode is over" in str(await puller.warm_anew(holder))
        await reborn.stop()
        holder.offers.open("h", 16, [1])
        async with rpc.channel(holder.ref.address) as channel:
            stub = transfer_grpc.BlockTransferServiceStub(channel)
            old, new = (common_pb2.ProcessId(worker_id="decode", epoch=epoch) for epoch in ("e1", "e2"))
            calls = [
                stub.RenewLeases(transfer_pb.RenewLeasesRequest(caller=old, handoff_ids=["h"])),
                stub.Release(transfer_pb.ReleaseRequest(caller=old, handoff_id="h", holder_epoch="e1")),
                stub.Release(transfer_pb.ReleaseRequest(caller=new, handoff_id="h", holder_epoch="e0")),
            ]
            for call, name in zip(calls, ("epoch: e1", "epoch: e1", "holder_epoch: e0"), strict=True):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
                assert name in str(caught.value.details())
            stream = stub.Follow(iter([transfer_pb.FollowRequest(caller=old, handoff_id="h")]))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stream.read()
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            answer = await stub.Release(
                transfer_pb.ReleaseRequest(caller=new, handoff_id="h", holder_epoch=holder.ref.epoch)
            )
            assert answer.held

    with_pair(scenario)
