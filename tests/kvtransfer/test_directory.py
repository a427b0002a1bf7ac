"""Membership and prefix map, plain; then the directory as a process that is killed and comes back."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kvtransfer import directory_client, metrics
from services.kvtransfer.directory import Change, Member, Membership, PrefixMap
from services.kvtransfer.directory_client import DirectoryClient
from services.kvtransfer.fake_transport import FakeFabric
from services.kvtransfer.messages import BlocksFetched, HandoffReady
from services.kvtransfer.transport import Endpoint, PeerRef
from services.wire import rpc
from services.wire.pb import common_pb2, directory_pb2, directory_pb2_grpc
from tests.conftest import free_port, wait_for_port
from tests.kvtransfer.worker_rig import LAYOUT, Worker


def member(worker_id: str, epoch: str, role: str = "prefill") -> Member:
    return Member(role, Endpoint(PeerRef(worker_id, epoch, "a:1"), "fake", LAYOUT, 1, 0, 0, "DRAM", b"", "host"))


def test_everyone_hears_of_everyone_in_any_order() -> None:
    membership = Membership()
    heard: dict[str, list[Change]] = {"p": [], "d": [], "p2": []}
    p, d, p2 = member("p", "1"), member("d", "1", "decode"), member("p", "2")
    membership.join(p, heard["p"].append)
    membership.join(d, heard["d"].append)
    assert heard["d"] == [Change(joined=(p,))]
    assert heard["p"] == [Change(), Change(joined=(d,))]
    membership.join(p2, heard["p2"].append)  # behind the same name: the first life is over
    assert heard["p"][2:] == [Change(left=(p.peer,))]
    assert heard["d"][1:] == [Change(left=(p.peer,)), Change(joined=(p2,))]
    membership.leave(p, heard["p"].append)  # too late to matter
    assert membership.has(p2.peer)
    assert not membership.has(p.peer)
    membership.leave(p2, heard["p2"].append)
    assert heard["d"][3:] == [Change(left=(p2.peer,))]
    assert membership.all() == [d]


def test_a_life_that_joins_again_before_its_first_stream_broke_stays() -> None:
    membership = Membership()
    first: list[Change] = []
    second: list[Change] = []
    p = member("p", "1")
    membership.join(p, lambda change: first.append(change))
    again = second.append
    membership.join(p, again)
    membership.leave(p, lambda change: first.append(change))
    assert membership.has(p.peer)


def test_a_report_after_a_gap_is_not_taken_until_a_full_one() -> None:
    prefixes, peer = PrefixMap(), PeerRef("d", "1")
    assert prefixes.report(peer, 0, False, [b"a"], []) is False
    assert prefixes.report(peer, 5, True, [b"a", b"b"], []) is True
    assert prefixes.report(peer, 6, False, [b"c"], [b"b"]) is True
    assert prefixes.report(peer, 8, False, [b"x"], []) is False
    assert prefixes.find([b"a", b"b", b"c"]) == [(peer, 1)]
    assert prefixes.report(peer, 9, True, [b"a", b"b", b"c", b"d"], []) is True
    assert prefixes.find([b"a", b"b", b"c"]) == [(peer, 3)]
    prefixes.forget(peer)
    assert prefixes.find([b"a"]) == []


@given(st.dictionaries(st.sampled_from("vwxyz"), st.sets(st.integers(0, 6))), st.integers(0, 7))
def test_the_longest_run_from_the_first_block_counts(held: dict[str, set[int]], length: int) -> None:
    prefixes = PrefixMap()
    for name, blocks in held.items():
        prefixes.report(PeerRef(name, "1"), 0, True, [bytes([block]) for block in blocks], [])
    expected = {}
    for name, blocks in held.items():
        run = 0
        while run < length and run in blocks:
            run += 1
        if run:
            expected[name] = run
    found = prefixes.find([bytes([block]) for block in range(length)])
    assert {peer.worker_id: run for peer, run in found} == expected
    assert [run for _, run in found] == sorted(expected.values(), reverse=True)


class DirectoryProcess:
    def __init__(self) -> None:
        self.port, self.admin_port = free_port(), free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "services.kvtransfer", "--port", str(self.port)]
        command += ["--admin-port", str(self.admin_port), "--log-level", "warning"]
        self._process = subprocess.Popen(command)
        wait_for_port(self.port, 30.0)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def end(self) -> int:
        """Asks it to leave; returns its exit status."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.terminate()
        return self._process.wait(10)

    def page(self, name: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}/{name}") as page:
            return str(page.read().decode())


@pytest.fixture
def directory() -> Iterator[DirectoryProcess]:
    process = DirectoryProcess()
    process.start()
    yield process
    process.end()


async def until(condition: Callable[[], Any], what: str) -> None:
    async with asyncio.timeout(15):
        while not condition():
            await asyncio.sleep(0.02)


async def holders(directory: DirectoryProcess, chain: list[bytes]) -> dict[str, int]:
    async with rpc.channel(directory.address) as channel:
        stub = directory_pb2_grpc.DirectoryServiceStub(channel)
        answer = await stub.FindPrefix(directory_pb2.FindPrefixRequest(chain=chain), timeout=5)
    return {holder.worker.worker_id: holder.num_blocks for holder in answer.holders}


async def until_found(directory: DirectoryProcess, chain: list[bytes], expected: dict[str, int]) -> None:
    async with asyncio.timeout(15):
        while await holders(directory, chain) != expected:
            await asyncio.sleep(0.05)


def test_workers_meet_through_the_directory_and_go_on_without_it(
    directory: DirectoryProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_client, "REPORT_S", 0.05)

    async def handoff(prefill: Worker, decode: Worker, name: str) -> None:
        prefill.offers.open(name, 16, [1])
        prefill.offers.progress(name, 16)
        decode.fetches.begin(name, prefill.ref)
        decode.fetch(name, (await decode.message(HandoffReady)).blocks, [2])
        await decode.message(BlocksFetched)

    async def body() -> None:
        fabric = FakeFabric()
        prefill = await Worker("prefill", fabric=fabric).start()
        decode = await Worker("decode", fabric=fabric).start()
        contacts = metrics.CONTACT_SECONDS._sum.get()
        clients = [
            DirectoryClient(directory.address, role, worker.connector, away_s=0.2)
            for role, worker in (("decode", decode), ("prefill", prefill))
        ]
        running = [asyncio.create_task(client.run()) for client in clients]
        await until(lambda: all(len(client.peers) == 1 for client in clients), "both know one another")
        await until(lambda: metrics.CONTACT_SECONDS._sum.get() > contacts, "decode was warmed up")
        assert directory.page("ready") == "ready\n"
        assert await rpc.is_serving(directory.address, 5.0)
        assert '"worker_id": "decode"' in directory.page("debug/members")
        assert 'pdserve_kvtransfer_directory_members{role="prefill"} 1.0' in directory.page("metrics")

        clients[1].report([b"a", b"b"], [])
        await until_found(directory, [b"a", b"b"], {"prefill": 2})
        clients[1].report([b"c"], [b"b"])
        await until_found(directory, [b"a", b"b"], {"prefill": 1})
        await handoff(prefill, decode, "before")

        directory.kill()
        await until(lambda: not any(client.connected for client in clients), "they noticed")
        assert [len(client.peers) for client in clients] == [1, 1]
        clients[1].report([b"b"], [])
        await handoff(prefill, decode, "while down")

        directory.start()
        await until(lambda: all(client.connected for client in clients), "they joined again")
        await until_found(directory, [b"a", b"b", b"c"], {"prefill": 3})
        await until(lambda: all(len(client.peers) == 1 for client in clients), "both know one another again")
        await handoff(prefill, decode, "after")

        running[1].cancel()
        await until(lambda: not clients[0].peers, "prefill left")
        await until_found(directory, [b"a"], {})
        running[0].cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await decode.stop()
        await prefill.stop()

    asyncio.run(body())
    assert directory.end() == 0


def test_who_has_not_joined_cannot_report_and_nobody_joins_nameless(directory: DirectoryProcess) -> None:
    async def body() -> None:
        async with rpc.channel(directory.address) as channel:
            stub = directory_pb2_grpc.DirectoryServiceStub(channel)
            worker = common_pb2.ProcessId(worker_id="x", epoch="1")
            with pytest.raises(Exception, match="x has not joined"):
                await stub.ReportBlocks(directory_pb2.ReportBlocksRequest(worker=worker))
            with pytest.raises(Exception, match=r"member\.role"):
                await stub.Join(directory_pb2.JoinRequest()).read()
            nameless = directory_pb2.Member(role=directory_pb2.WORKER_ROLE_DECODE)
            with pytest.raises(Exception, match="worker_id and epoch"):
                await stub.Join(directory_pb2.JoinRequest(member=nameless)).read()

    asyncio.run(body())
