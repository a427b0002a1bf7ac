"""Deployments of real processes, one per test file and mode; the books are looked at after every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.house import SMALL, House, house

TINY = "tiny-random-llama"
MODES = ("nixl", "shm", "colocated")


def options_for(mode: str) -> dict[str, object]:
    if mode == "colocated":
        return {"prefill": 0, "decode": 1}
    return {"prefill": 1, "decode": 1, "transport": mode}


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tiny_house(mode: str) -> Iterator[House]:
    """The tiny model in each mode: 64 blocks and chunks of 64 tokens, so that borders and evictions come soon."""
    env = {"*": SMALL | {"PDSERVE_NUM_BLOCKS": "64", "PDSERVE_TOKEN_BUDGET": "64"}}
    with house(TINY, env=env, **options_for(mode)) as made:
        yield made


@pytest.fixture(scope="module")
def pair() -> Iterator[House]:
    """One prefill and one decode worker, tiny model, NIXL."""
    with house(TINY, env={"*": SMALL}) as made:
        yield made
