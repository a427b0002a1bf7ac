"""Prefill and decode on two hosts: network namespaces joined by a veth pair, UCX over tcp, advertised addresses."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from services.launcher.plan import Place
from tests.e2e import reference
from tests.e2e.conftest import TINY
from tests.e2e.house import LEASE_MARGIN_S, SMALL, house
from tests.e2e.test_tiny import random_prompts

pytestmark = [pytest.mark.e2e, pytest.mark.netns]

# This process, the gateway, NATS and the directory live on .1 (a bridge), prefill on .2, decode on .3.
NET = "10.213.77"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def make_hosts(tag: str) -> tuple[str, str, str]:
    bridge, names = f"pdb{tag}", (f"pdp{tag}", f"pdd{tag}")
    ip("link", "add", bridge, "type", "bridge")
    ip("addr", "add", f"{NET}.1/24", "dev", bridge)
    ip("link", "set", bridge, "up")
    for number, name in enumerate(names, start=2):
        ip("netns", "add", name)
        ip("link", "add", f"v{name}", "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("link", "set", f"v{name}", "master", bridge, "up")
        ip("-n", name, "addr", "add", f"{NET}.{number}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", name, "link", "set", "lo", "up")
    return bridge, *names


def remove_hosts(tag: str) -> None:
    for name in (f"pdp{tag}", f"pdd{tag}"):
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    subprocess.run(["ip", "link", "del", f"pdb{tag}"], capture_output=True)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    if shutil.which("ip") is None:
        pytest.skip("SKIPPED LOUDLY: no `ip` command (Debian: iproute2), so nothing here has crossed a network")
    tag = f"{os.getpid() % 10000}"
    try:
        _, prefill, decode = make_hosts(tag)
    except subprocess.CalledProcessError as error:
        remove_hosts(tag)
        why = error.stderr.decode().strip()
        pytest.skip(f"SKIPPED LOUDLY: network namespaces can't be made here ({why}), so nothing has crossed a network")
    try:
        yield prefill, decode
    finally:
        remove_hosts(tag)


def test_two_hosts_over_tcp(hosts: tuple[str, str]) -> None:
    places = {"prefill-0": Place(f"{NET}.2", ("ip", "netns", "exec", hosts[0]))}
    places["decode-0"] = Place(f"{NET}.3", ("ip", "netns", "exec", hosts[1]))
    places |= {name: Place(f"{NET}.1") for name in ("nats", "kvtransfer", "gateway")}
    env = {"*": SMALL | {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "eth0"}}
    prompts = random_prompts((1, 33, 400, 1200), seed=21)
    expected = reference.here(TINY, prompts, 16)
    with house(TINY, env=env, places=places) as two:
        answers = two.complete_all(prompts, 16)
        assert [answer.token_ids for answer in answers] == expected
        assert {two.timeline(answer.request_id)["path"] for answer in answers} == {"disaggregated"}
        num_blocks = sum(-(-len(prompt) // 16) for prompt in prompts)
        assert two.total("decode", "pdserve_kvtransfer_pulled_blocks_total", transport="nixl") == num_blocks
        assert two.metric("decode-0", "pdserve_kvtransfer_transport_info", transport="nixl", path="tcp") == 1
        assert two.total("decode", "pdserve_worker_prompt_tokens_computed") == 0
        two.assert_books_close(LEASE_MARGIN_S)
