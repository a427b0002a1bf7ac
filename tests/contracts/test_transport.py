"""What every Transport promises, kept by nixl and shm between real processes, and by the fake.

`nixl-tcp` is NIXL held to tcp: the only path here on which a peer's freezing is felt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.kvtransfer.fake_transport import FakeFabric
from services.kvtransfer.shm_transport import SEGMENT_PREFIX, remove_stale_segments
from services.kvtransfer.transport import PeerRef, PeerUnreachableError
from tests.contracts.peer import BLOCK_BYTES, LocalEnd, RemoteEnd

NUM_BLOCKS = 64
MakeEnd = Callable[..., Any]

TRANSPORTS = {
    "fake": {},
    "shm": {},
    "nixl": {},
    "nixl-tcp": {"UCX_TLS": "tcp"},
}


@pytest.fixture(params=list(TRANSPORTS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_end(kind: str) -> Iterator[MakeEnd]:
    fabric = FakeFabric()
    ends: list[Any] = []

    def make(worker_id: str, epoch: str = "e1", num_blocks: int = NUM_BLOCKS) -> Any:
        me = PeerRef(worker_id, epoch)
        if kind == "fake":
            end: Any = LocalEnd(me, num_blocks, fabric)
        else:
            end = RemoteEnd(kind.partition("-")[0], me, num_blocks, TRANSPORTS[kind])
        ends.append(end)
        return end

    yield make
    for end in ends:
        end.end()


def test_blocks_arrive_where_they_were_asked_for_and_nowhere_else(kind: str, make_end: MakeEnd) -> None:
    holder, puller = make_end("holder"), make_end("puller")
    assert holder.pool_size() == NUM_BLOCKS * BLOCK_BYTES
    assert puller.bytes_of([0, NUM_BLOCKS - 1]) == [0, 0]
    holder.fill(100)
    puller.set_bytes(list(range(NUM_BLOCKS)), 255)
    puller.connect(holder.endpoint())
    puller.connect(holder.endpoint())  # idempotent
    assert kind == "fake" or holder.endpoint() == holder.endpoint()

    remote, local = [3, 4, 5, 60, 7, 0], [10, 11, 12, 0, 63, 5]
    transfer = puller.read(holder.me, remote, local)
    assert puller.num_bytes(transfer) == 6 * BLOCK_BYTES
    assert puller.wait(transfer, 20.0) == ("done", False, True)
    assert puller.bytes_of(local) == [103, 104, 105, 160, 107, 100]
    untouched = [i for i in range(NUM_BLOCKS) if i not in local]
    assert puller.bytes_of(untouched) == [255] * len(untouched)
    assert puller.abandon(transfer) is True  # settled: nothing can land any more
    expected = {"fake": "fake", "shm": "shm", "nixl-tcp": "tcp"}
    active = puller.active()
    assert active == expected[kind] if kind in expected else active in ("cma", "xpmem", "shm", "tcp"), active

    several = [puller.read(holder.me, [i], [20 + i]) for i in range(8)]
    assert [puller.wait(t, 20.0)[0] for t in several] == ["done"] * 8
    assert puller.bytes_of(list(range(20, 28))) == list(range(100, 108))

    with pytest.raises(ValueError, match="remote block id"):
        puller.read(holder.me, [NUM_BLOCKS], [0])
    with pytest.raises(ValueError, match="local block id"):
        puller.read(holder.me, [0], [-1])
    puller.disconnect(holder.me)
    puller.disconnect(holder.me)
    with pytest.raises(PeerUnreachableError):
        puller.read(holder.me, [0], [0])


def test_a_killed_peer_is_a_disconnect_and_its_next_life_works(kind: str, make_end: MakeEnd) -> None:
    holder, puller = make_end("holder", "e1"), make_end("puller")
    holder.fill(7)
    puller.connect(holder.endpoint())
    assert puller.wait(puller.read(holder.me, [0], [0]), 20.0)[0] == "done"
    every = list(range(NUM_BLOCKS))
    if kind == "nixl":  # cross-memory attach copies while it is posted: the kill falls before, and is seen by the post
        holder.kill()
        with pytest.raises(PeerUnreachableError):
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                state, gone, settled = puller.wait(puller.read(holder.me, every, every), 10.0)
                assert (state, gone, settled) != ("done", False, True), "bytes of a dead process"
    else:
        holder.freeze()  # so that the kill falls into the middle of the transfer
        transfer = puller.read(holder.me, every, every)
        holder.kill()
        assert puller.wait(transfer, 20.0) == ("failed", True, True)
        with pytest.raises(PeerUnreachableError):
            puller.read(holder.me, [0], [0])
    puller.disconnect(holder.me)

    again = make_end("holder", "e2")
    again.fill(50)
    puller.connect(again.endpoint())
    assert puller.wait(puller.read(again.me, [1], [1]), 20.0) == ("done", False, True)
    assert puller.bytes_of([1]) == [51]
    with pytest.raises(PeerUnreachableError):
        puller.read(holder.me, [1], [1])  # the old life stays over


@pytest.mark.parametrize("kind", ["fake", "nixl-tcp"], indirect=True)
def test_the_bytes_of_a_frozen_peer_land_late(kind: str, make_end: MakeEnd) -> None:
    """Why quarantine exists: what was abandoned is still written when the peer wakes."""
    holder, puller = make_end("holder"), make_end("puller")
    holder.fill(30)
    puller.connect(holder.endpoint())
    holder.freeze()
    transfer = puller.read(holder.me, [2, 3], [40, 41])
    assert puller.wait(transfer, 0.5) == ("pending", False, False)
    assert puller.abandon(transfer) is False
    puller.set_bytes([40, 41], 200)  # as if the blocks had been given to somebody else
    assert puller.wait(transfer, 0.2) == ("pending", False, False)
    assert puller.bytes_of([40, 41]) == [200, 200]
    holder.thaw()
    assert puller.wait(transfer, 20.0) == ("done", False, True)
    assert puller.bytes_of([40, 41]) == [32, 33]


@pytest.mark.parametrize("kind", ["shm"], indirect=True)
def test_segments_go_with_their_owner(kind: str, make_end: MakeEnd) -> None:
    holder, other = make_end("holder"), make_end("other")
    name, others = holder.endpoint().agent_metadata.decode(), other.endpoint().agent_metadata.decode()
    folder = Path("/dev/shm")
    assert name.startswith(SEGMENT_PREFIX)
    assert (folder / name).exists()
    assert name not in remove_stale_segments()  # its owner lives
    holder.kill()
    assert name in remove_stale_segments()
    assert not (folder / name).exists()
    other.end()
    assert not (folder / others).exists()
